"""BM25 over a corpus on disk (bm25s: Lucene's formula with its default parameters, English stems)."""

import functools
import hashlib
import mmap
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import Stemmer

from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.corpus import Corpus, batched, scan
from mopd_jax.retrieval.index import available_bytes, building, require_memory, seal, unseal
from mopd_jax.retrieval.search import Document

KIND = "bm25"
STARTS, HASHES, ENDS, BOUNDS, NUMBERS, WEIGHTS = FILES = (
    "starts.npy",  # int64 [passages]: where they start in the corpus, in bytes
    "hashes.npy",  # uint64 [words], ascending: a word's number is the place of its hash
    "ends.npy",  # int64 [words + 1]: where the list of each word starts and, last, where all end
    "bounds.npy",  # float32 [words]: the highest score that a word gives to any passage
    "numbers.npy",  # int32: the passages that hold a word, ascending; list after list
    "weights.npy",  # float32: the scores that they get of it
)
CHUNK = 10_000
"""Passages that are cut into words at a time."""
BUILD_BYTES = 10
"""Most memory that building takes, in bytes per byte of the corpus: 8.2 measured for 65 MB of random words,
7.3 for 650 MB, 5.9 for 22 MB of Wikipedia; of an opened index less than a third is resident."""
BLOCK = 1 << 21
"""Bytes of a file that one read may map: at most a whole large page of the system's cache, 2 MB on Linux."""
HELD = 1 / 4
"""Share of the words' lists that stays mapped: with the other files an index holds less than a third [D]."""
SMALL = 32
"""Blocks of either file that stay mapped whatever their share: 128 MB are no burden [D]."""
FEW = 4
"""Passages found are searched for in a list at least so many times as long, and merged with a shorter one."""
SLACK = 1 - 1e-5
"""What a sum of float32 scores may lose, so that no passage is given up because of rounding."""


def build(corpus: str, folder: str, progress: bool = False) -> None:
    """Makes the index of a corpus file in `folder`, in place of an earlier one.

    Import of bm25s starts JAX's backend: call it after `jax.distributed.initialize`.

    Raises:
      Refusal: the corpus is refused (see `corpus.scan`), holds no word, or needs more memory than is free;
        `folder` holds something else.
    """
    with building(folder) as partial:
        arrays = dict(zip(FILES, _indexed(corpus, progress), strict=True))
        for name, array in arrays.items():
            np.save(partial / name, array)
        seal(partial, KIND, corpus, passages=len(arrays[STARTS]))


def _indexed(corpus: str, progress: bool) -> tuple[np.ndarray, ...]:
    """Returns what an index holds, in the order of `FILES`."""
    import bm25s

    need = BUILD_BYTES * Path(corpus).stat().st_size
    require_memory(f"Indexing {corpus}", need, available_bytes(), "use a machine with more, once")
    starts, vocabulary = [], {}
    bags, tokenize = [], make_tokenizer()
    for chunk in batched(scan(corpus, "Cutting into words" if progress else ""), CHUNK):
        starts += [start for start, _ in chunk]
        for words in tokenize([document.contents for _, document in chunk], show_progress=False):
            bags.append([vocabulary.setdefault(word, len(vocabulary)) for word in words])
    if not vocabulary.keys() - {""}:
        raise Refusal(f"{corpus}: found no word to search for but stop words, expected English passages.")
    hashes, ranks = ranked(vocabulary)
    for bag in bags:
        bag[:] = [ranks[word] for word in bag]
    scores = bm25s.BM25().build_index_from_ids(range(len(ranks)), bags, show_progress=progress)
    data, ends = scores["data"], scores["indptr"]
    bounds = np.maximum.reduceat(data, ends[:-1])
    return np.array(starts, np.int64), hashes, ends, bounds, scores["indices"], data


def ranked(words: Iterable[str]) -> tuple[np.ndarray, list[int]]:
    """Returns the hashes of words, ascending, and at which place among them each word's is.

    Raises:
      Refusal: two words have the same hash: once in ten million corpora of two million words.
    """
    hashes = hashed(words)
    order = np.argsort(hashes)
    if (same := np.flatnonzero(np.diff(hashes[order]) == 0)).size:
        first, second = (list(words)[order[place]] for place in (same[0], same[0] + 1))
        raise Refusal(
            f"{first!r} and {second!r} have the same hash, expected another for every word: leave out the "
            "passages that hold the rarer one."
        )
    return hashes[order], np.argsort(order).tolist()


def hashed(words: Iterable[str]) -> np.ndarray:
    """Returns 64 bits per word that tell it from others, uint64 [words]."""
    digests = (hashlib.blake2b(word.encode(), digest_size=8).digest() for word in words)
    return np.frombuffer(b"".join(digests), "<u8")


def make_tokenizer() -> Callable[..., list[list[str]]]:
    """Returns what cuts a list of texts into stems, stop words left out."""
    import bm25s

    stemmer = Stemmer.Stemmer("english")
    return functools.partial(bm25s.tokenize, stopwords="english", stemmer=stemmer, return_ids=False)


def known(hashes: np.ndarray, words: Iterable[str]) -> np.ndarray:
    """Returns the numbers of words that an index with these hashes holds, unknown ones left out."""
    wanted = hashed(filter(None, words))  # "" stands for passages without words
    places = np.minimum(np.searchsorted(hashes, wanted), len(hashes) - 1)
    return places[hashes[places] == wanted]


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
        meta = unseal(folder, KIND, corpus)
        maps = {name: np.load(Path(folder) / name, mmap_mode="r") for name in FILES}
        starts, self._hashes, ends, self._bounds = (np.asarray(maps[name]) for name in FILES[:4])
        self._lists = _Lists(ends, maps[NUMBERS], maps[WEIGHTS])
        self._corpus = Corpus(corpus, starts)
        self._tokenize = make_tokenizer()
        self.identity = f"{KIND}:{meta['corpus']}"

    def search(self, queries: Sequence[str], k: int) -> list[tuple[Document, ...]]:
        """Returns one tuple per query, best first, with `min(k, passages)` documents, none repeated."""
        bags = self._tokenize(list(queries), show_progress=False)
        return [self._best(bag, k) for bag in bags]

    def _best(self, bag: list[str], k: int) -> tuple[Document, ...]:
        words, counts = np.unique(known(self._hashes, bag), return_counts=True)
        found, scores = self._top(words, counts.astype(np.float32), k)
        if (missing := min(k, len(self._corpus)) - len(found)) > 0:
            others = np.setdiff1d(np.arange(len(found) + missing), found)[:missing]
            found, scores = np.append(found, others), np.append(scores, np.zeros(missing))
        return tuple(self._corpus.document(*hit) for hit in zip(found, scores.tolist(), strict=True))

    def _top(self, words: np.ndarray, counts: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns numbers and scores of the best passages that hold any of the words, at most `k`.

        After the MaxScore algorithm (Turtle and Flood, 1995): words are taken by the most that they can give.
        A passage joins those found only if this word and all those left can lift it among the best `k` so
        far, and leaves them as soon as those left cannot. So only few passages are looked up in the lists of
        frequent words, which are the long ones.
        """
        gains = counts * self._bounds[words]
        order = np.argsort(-gains, kind="stable")
        rest = np.append(np.cumsum(gains[order][::-1], dtype=np.float64)[::-1], 0).tolist()
        found, scores, floor = np.zeros(0, np.int32), np.zeros(0, np.float32), 0.0
        for word, count, most, after in zip(words[order], counts[order], rest[:-1], rest[1:], strict=True):
            numbers, weights = self._lists.postings(word)
            there, here = _shared(found, numbers)
            scores[there] += count * weights[here]
            if most >= floor:
                floor = floor or _floor(count * weights, k, floor)
                joining = weights >= (floor - after) / count
                joining[here] = False
                new = np.flatnonzero(joining)
                found = np.concatenate((found, numbers[new]))
                scores = np.concatenate((scores, count * weights[new]))
            floor = _floor(scores, k, floor)
            kept = np.flatnonzero(scores >= floor - after)
            found, scores = found[kept], scores[kept]
        best = np.lexsort((found, -scores))[:k]
        return found[best], scores[best]


class _Lists:
    """Of every word the passages that hold it: two files, of which `HELD` stays mapped, `SMALL`, or one list.

    Threads may share it: what is let go of while another one reads it comes back, and at worst late.
    """

    def __init__(self, ends: np.ndarray, numbers: np.memmap, weights: np.memmap):
        self._ends, self._numbers, self._weights = ends, np.asarray(numbers), np.asarray(weights)
        self._maps = numbers.base, weights.base
        self._offset, self._width = numbers.offset, numbers.itemsize  # of either file: they are alike
        self._most = max(SMALL, int(HELD * (self._offset + numbers.nbytes) / BLOCK))
        self._touched: set[int] = set()  # blocks

    def postings(self, word: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns numbers, ascending, and scores of the passages that hold a word."""
        start, stop = int(self._ends[word]), int(self._ends[word + 1])
        first, last = ((self._offset + place * self._width) // BLOCK for place in (start, stop))
        blocks = range(first, last + 1)
        self._touched.update(blocks)
        if len(self._touched) > self._most:
            self._let_go()
            self._touched.update(blocks)
        return self._numbers[start:stop], self._weights[start:stop]

    def _let_go(self) -> None:
        """Unmaps all pages. The system may keep them, then the next to read one has it without the disk."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)
        self._touched.clear()


def _shared(found: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the passages stand that are in both: among those found, and in the list of a word."""
    if FEW * len(found) <= len(numbers):
        here = np.minimum(np.searchsorted(numbers, found), len(numbers) - 1)
        there = np.flatnonzero(numbers[here] == found)
        return there, here[there]
    both = np.concatenate((found, numbers))
    order = np.argsort(both, kind="stable")  # merges what is sorted already
    twins = np.flatnonzero(np.diff(both[order]) == 0)
    return order[twins], order[twins + 1] - len(found)


def _floor(scores: np.ndarray, k: int, floor: float) -> float:
    """Returns the `k`-th best score, a little less because of rounding, or `floor` if that is higher."""
    above = scores[np.flatnonzero(scores > floor)]
    return max(floor, float(np.partition(above, -k)[-k]) * SLACK) if len(above) >= k else floor
