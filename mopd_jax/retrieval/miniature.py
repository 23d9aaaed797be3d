"""The embedded world's retriever: BM25 over a few hundred passages, forgetful on purpose."""

import hashlib
import re
from collections.abc import Sequence

import numpy as np

from mopd_jax.retrieval.search import Document

K1, B = 1.2, 0.75
"""BM25's usual constants."""
TITLE = 3
"""How often a word of the title counts: a passage about somebody beats one that mentions them."""


def words(text: str) -> list[str]:
    """Returns the lower-case words of a text, punctuation and the possessive 's left out."""
    return re.findall(r"[a-z]+", text.lower().replace("'s", " "))


class MiniatureSearch:
    """Lexical search that loses the best passage for a fixed share of query wordings [D].

    Which wordings are unlucky depends on the words and their order alone, so a search that failed
    fails again when repeated, and asking in other words pays. Passages of equal score come in an
    order that depends on the wording too, so a vague query finds a passage only by chance.
    """

    def __init__(self, passages: Sequence[dict[str, str]], forgotten: float = 0.15):
        """Indexes `{"id", "contents"}` passages; `forgotten` is the share of unlucky wordings."""
        self._documents = [Document(p["id"], p["contents"]) for p in passages]
        self._forgotten = forgotten
        self._index, self._weights_VN = _bm25(
            [f"{d.title} " * (TITLE - 1) + d.contents for d in self._documents]
        )
        corpus = hashlib.sha256("\n\n".join(p["contents"] for p in passages).encode())
        self.identity = f"miniature:{corpus.hexdigest()[:16]}:forgotten={forgotten}"

    def search(self, queries: Sequence[str], k: int) -> list[tuple[Document, ...]]:
        """Returns per query its `k` best passages, best first (fewer where the corpus is smaller)."""
        return [self._best(query, k) for query in queries]

    def _best(self, query: str, k: int) -> tuple[Document, ...]:
        asked = words(query)
        known = [self._index[w] for w in asked if w in self._index]
        scores_N = self._weights_VN[known].sum(0)
        wording = hashlib.blake2b(" ".join(asked).encode(), digest_size=8).digest()
        rng = np.random.default_rng(int.from_bytes(wording))
        lost = int(rng.random() < self._forgotten)
        order = np.lexsort((rng.permutation(len(scores_N)), -scores_N))
        return tuple(self._documents[i] for i in order[lost : lost + k])


def _bm25(texts: Sequence[str]) -> tuple[dict[str, int], np.ndarray]:
    """Returns the word index and the BM25 weight of each word in each text, float32 [V, N]."""
    bags = [words(text) for text in texts]
    index = {w: i for i, w in enumerate(sorted({w for bag in bags for w in bag}))}
    counts = [np.bincount([index[w] for w in bag], minlength=len(index)) for bag in bags]
    counts_VN = np.stack(counts, axis=1).astype(np.float32)
    lengths_N = counts_VN.sum(0)
    holders_V = (counts_VN > 0).sum(1)
    idf_V = np.log1p((len(bags) - holders_V + 0.5) / (holders_V + 0.5))
    saturation_N = K1 * (1 - B + B * lengths_N / lengths_N.mean())
    return index, idf_V[:, None] * counts_VN * (K1 + 1) / (counts_VN + saturation_N)
