"""BM25 over a corpus on disk (bm25s: Lucene's formula with its default parameters, English stems)."""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import Stemmer

from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.corpus import Corpus, batched, scan
from mopd_jax.retrieval.index import available_bytes, building, require_memory, seal, unseal
from mopd_jax.retrieval.search import Document

KIND = "bm25"
STARTS, BOUNDS = "starts.npy", "bounds.npy"
CHUNK = 10_000
"""Passages that are cut into words at a time."""
BUILD_BYTES = 10
"""Most memory that building takes, in bytes per byte of the corpus: 8.2 measured for 65 MB of random words,
5.9 for 22 MB of Wikipedia; of an opened index little more than the vocabulary is held."""
SLACK = 1 - 1e-5
"""What a sum of float32 scores may lose, so that no passage is given up because of rounding."""


def build(corpus: str, folder: str, progress: bool = False) -> None:
    """Makes the index of a corpus file in `folder`, in place of an earlier one.

    Import of bm25s starts JAX's backend: call it after `jax.distributed.initialize`.

    Raises:
      Refusal: the corpus is refused (see `corpus.scan`), holds no word, or needs more memory than is free;
        `folder` holds something else.
    """
    import bm25s

    need = BUILD_BYTES * Path(corpus).stat().st_size
    require_memory(f"Indexing {corpus}", need, available_bytes(), "use a machine with more, once")
    starts, vocabulary = [], {}
    bags, tokenize = [], _tokenizer()
    for chunk in batched(scan(corpus, "Cutting into words" if progress else ""), CHUNK):
        starts += [start for start, _ in chunk]
        for words in tokenize([document.contents for _, document in chunk], show_progress=False):
            bags.append([vocabulary.setdefault(word, len(vocabulary)) for word in words])
    if not vocabulary.keys() - {""}:
        raise Refusal(f"{corpus}: found no word to search for but stop words, expected English passages.")
    index = bm25s.BM25()
    index.index((bags, vocabulary), show_progress=progress)
    with building(folder) as partial:
        index.save(partial, show_progress=False)
        np.save(partial / STARTS, np.array(starts, np.int64))
        np.save(partial / BOUNDS, _bounds(index.scores["data"], index.scores["indptr"]))
        seal(partial, KIND, corpus, passages=len(starts))


def _tokenizer():
    import bm25s

    stemmer = Stemmer.Stemmer("english")
    return functools.partial(bm25s.tokenize, stopwords="english", stemmer=stemmer, return_ids=False)


def _bounds(data: np.ndarray, indptr: np.ndarray) -> np.ndarray:
    """Returns the highest score that each word gives to any passage, float32 [words]."""
    bounds = np.zeros(len(indptr) - 1, np.float32)
    used = np.flatnonzero(np.diff(indptr))
    bounds[used] = np.maximum.reduceat(data, indptr[used])
    return bounds


class BM25Search:
    """A retriever over an index that `build` made; index and passages stay on disk.

    Every query gets `min(k, passages)` documents, as from a dense index: fewer than `k` means that
    the corpus is smaller than `k` and nothing else, and no search shows an empty block [D]. Passages
    are ranked by score; equal scores, zeros included, keep the corpus' order.
    """

    identity: str
    """"bm25:" and the corpus' fingerprint."""

    def __init__(self, corpus: str, folder: str = ""):
        """Opens the index in `folder`; without one it is made anew, in a temporary folder: a matter of
        seconds for tens of thousands of passages. Raises as `index.unseal` and `build`.
        """
        if folder:
            self._open(corpus, folder)
        else:
            with tempfile.TemporaryDirectory() as temporary:  # what is mapped outlives its name
                build(corpus, temporary)
                self._open(corpus, temporary)

    def _open(self, corpus: str, folder: str) -> None:
        import bm25s

        meta = unseal(folder, KIND, corpus)
        index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        self._numbers, self._weights = np.asarray(index.scores["indices"]), np.asarray(index.scores["data"])
        self._ends, self._vocabulary = np.asarray(index.scores["indptr"]), index.vocab_dict
        self._vocabulary.pop("", None)  # stands for passages without words
        self._bounds = np.load(Path(folder) / BOUNDS)
        self._corpus = Corpus(corpus, np.load(Path(folder) / STARTS, mmap_mode="r"))
        self._scores = np.zeros(len(self._corpus), np.float32)  # all zero between two queries
        self._tokenize = _tokenizer()
        self.identity = f"{KIND}:{meta['corpus']}"

    def search(self, queries: Sequence[str], k: int) -> list[tuple[Document, ...]]:
        """Returns one tuple per query, best first, with `min(k, passages)` documents, none repeated."""
        bags = self._tokenize(list(queries), show_progress=False)
        return [self._best(bag, k) for bag in bags]

    def _best(self, bag: list[str], k: int) -> tuple[Document, ...]:
        known = [self._vocabulary[word] for word in bag if word in self._vocabulary]
        words, counts = np.unique(np.array(known, np.int64), return_counts=True)
        found, scores = self._top(words, counts.astype(np.float32), k)
        if (missing := min(k, len(self._corpus)) - len(found)) > 0:
            others = np.setdiff1d(np.arange(len(found) + missing), found)[:missing]
            found, scores = np.append(found, others), np.append(scores, np.zeros(missing))
        return tuple(self._corpus.document(*hit) for hit in zip(found, scores.tolist(), strict=True))

    def _top(self, words: np.ndarray, counts: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns numbers and scores of the best passages that hold any of the words, at most `k`.

        The MaxScore algorithm (Turtle and Flood, 1995): words are taken by the most that they can give. As
        soon as all those left cannot lift a new passage among the best `k`, only the passages found so far
        are looked up in their lists, which are the long ones.
        """
        gains = counts * self._bounds[words]
        order = np.argsort(-gains, kind="stable")
        rest = np.append(np.cumsum(gains[order][::-1])[::-1], 0)  # rest[i]: what the words from i on can give
        touched, taken = np.zeros(0, np.int32), 0
        while taken < len(order) and self._floor(touched, k) * SLACK <= rest[taken]:
            numbers, weights = self._postings(words[order[taken]])
            fresh = numbers[self._scores[numbers] == 0]
            self._scores[numbers] += counts[order[taken]] * weights
            touched, taken = np.concatenate((touched, fresh)), taken + 1
        found = np.sort(touched)
        for i in range(taken, len(order)):
            found = found[self._scores[found] + rest[i] >= self._floor(found, k) * SLACK]
            numbers, weights = self._postings(words[order[i]])
            places = np.minimum(np.searchsorted(numbers, found), len(numbers) - 1)
            self._scores[found] += counts[order[i]] * np.where(numbers[places] == found, weights[places], 0)
        found = found[self._scores[found] >= self._floor(found, k)]
        best = found[np.argsort(-self._scores[found], kind="stable")[:k]]
        scores = self._scores[best]
        self._scores[touched] = 0
        return best, scores

    def _postings(self, word: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns numbers, ascending, and scores of the passages that hold a word."""
        part = slice(self._ends[word], self._ends[word + 1])
        return self._numbers[part], self._weights[part]

    def _floor(self, found: np.ndarray, k: int) -> float:
        """Returns the `k`-th best score so far, 0 while there are fewer."""
        return float(np.partition(self._scores[found], -k)[-k]) if len(found) >= k else 0.0
