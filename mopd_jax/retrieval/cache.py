"""A retriever that remembers: workflows of one question often ask for the same."""

import collections
from collections.abc import Sequence

from mopd_jax.retrieval.search import Document, Retriever


class CachedSearch:
    """Asks another retriever only what it has not been asked before, each query once.

    The least recently used results go first. Errors are not remembered.
    """

    identity: str
    """Of the retriever behind it: the results are the same."""

    def __init__(self, retriever: Retriever, size: int):
        """Remembers the results of `size` queries in this process' memory."""
        self._retriever, self._size = retriever, size
        self.identity = retriever.identity
        self._found: collections.OrderedDict[tuple[str, str, int], tuple[Document, ...]] = (
            collections.OrderedDict()
        )
        self._asked = self._known = 0

    def search(self, queries: Sequence[str], k: int) -> list[tuple[Document, ...]]:
        """See `Retriever`."""
        keys = [(self.identity, query, k) for query in queries]
        results = {key: self._found[key] for key in keys if key in self._found}
        new = [key for key in dict.fromkeys(keys) if key not in results]
        if new:
            found = self._retriever.search([query for _, query, _ in new], k)
            results |= zip(new, found, strict=True)
        self._remember(results)
        self._asked += len(keys)
        self._known += len(keys) - len(new)
        return [results[key] for key in keys]

    def _remember(self, results: dict[tuple[str, str, int], tuple[Document, ...]]) -> None:
        for key, found in results.items():
            self._found[key] = found
            self._found.move_to_end(key)
        while len(self._found) > self._size:
            self._found.popitem(last=False)

    def take_counts(self) -> tuple[int, int]:
        """Returns how many queries came in since the last call, and how many of them were not passed on."""
        counts = self._asked, self._known
        self._asked = self._known = 0
        return counts
