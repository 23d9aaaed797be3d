"""What a retriever is: documents in, documents out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Document:
    """One passage. `contents` is the corpus' own text: title line (often in quotes), newline, body."""

    id: str
    contents: str
    score: float | None = field(default=None, compare=False)
    """What it was ranked by, in the backend's own scale; None where the backend says nothing of it."""

    @property
    def title(self) -> str:
        """The first line as it stands, quotes included (Search-R1 keeps them); "" if it is the only line."""
        return self.contents.partition("\n")[0] if "\n" in self.contents else ""

    @property
    def text(self) -> str:
        """Everything after the first line, or the only line."""
        return self.contents.partition("\n")[2] if "\n" in self.contents else self.contents


class SearchError(RuntimeError):
    """A search failed for good: its workflow is aborted, never answered with a blank observation."""


class Retriever(Protocol):
    """A search backend."""

    identity: str
    """Names backend and index; results of different identities are not compared."""

    def search(self, queries: Sequence[str], k: int) -> list[tuple[Document, ...]]:
        """Returns one tuple per query, best first, at most `k` documents, none repeated.

        Raises:
          SearchError: the backend did not answer after its retries.
        """
        ...


class NoSearch:
    """A library without books: what a team answers from its own memory [D]."""

    identity = "none"

    def search(self, queries: Sequence[str], k: int) -> list[tuple[Document, ...]]:
        """Returns no document for any query."""
        return [()] * len(queries)
