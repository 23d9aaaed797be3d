"""BM25 over a corpus on disk (bm25s: Lucene's formula with its default parameters, English stems)."""

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
import Stemmer
from etils import epath

from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.jsonl import id_field, read_jsonl, text_field
from mopd_jax.retrieval.search import Document


def read_corpus(path: str) -> list[Document]:
    """Returns the passages of a `{"id", "contents"}` JSONL file in the file's order.

    Raises:
      Refusal: no file, a line is no JSON object, a field is missing or empty, an id comes twice, or the
        file holds no passage; the message names file, line and reason.
    """
    documents, first_seen = [], {}
    for place, record in read_jsonl(path):
        document = Document(id_field(record, place), text_field(record, "contents", place))
        if document.id in first_seen:
            raise Refusal(f"{place}: id {document.id!r} was already used in {first_seen[document.id]}.")
        first_seen[document.id] = place
        documents.append(document)
    if not documents:
        raise Refusal(f'{path}: found no passage, expected lines of {{"id", "contents"}}.')
    return documents


class BM25Search:
    """A retriever that holds corpus and index in memory.

    Every query gets `min(k, passages)` documents, as from a dense index: fewer than `k` means that
    the corpus is smaller than `k` and nothing else, and no search shows an empty block [D]. Passages
    are ranked by score; equal scores, zeros included, keep the corpus' order.
    """

    identity: str
    """"bm25:" and the first 16 hex digits of the corpus file's sha256."""

    def __init__(self, path: str):
        """Reads and indexes the whole file `path` (see `read_corpus` for what is refused).

        Build it after `jax.distributed.initialize`: importing bm25s starts JAX's backend.
        """
        import bm25s

        self._tokenize = functools.partial(
            bm25s.tokenize, stopwords="english", stemmer=Stemmer.Stemmer("english"), show_progress=False
        )
        self._documents = read_corpus(path)
        self._index = bm25s.BM25()
        tokens = self._tokenize([document.contents for document in self._documents])
        if not any(tokens.ids):
            raise Refusal(f"{path}: found no word to search for but stop words, expected English passages.")
        self._index.index(tokens, show_progress=False)
        self.identity = f"bm25:{_sha256(path)[:16]}"

    def search(self, queries: Sequence[str], k: int) -> list[tuple[Document, ...]]:
        """Returns one tuple per query, best first, with `min(k, passages)` documents, none repeated."""
        terms = self._tokenize(list(queries), return_ids=False)
        return [tuple(self._documents[i] for i in self._top(query, k)) for query in terms]

    def _top(self, terms: list[str], k: int) -> np.ndarray:
        """Returns positions of the `k` best passages. bm25s' own selection breaks ties arbitrarily."""
        scores = self._index.get_scores_from_ids(self._index.get_tokens_ids(terms))
        k = min(k, len(scores))
        floor = np.partition(scores, -k)[-k]
        contenders = np.flatnonzero(scores >= floor)
        return contenders[np.argsort(-scores[contenders], kind="stable")[:k]]


def _sha256(path: str) -> str:
    with epath.Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
