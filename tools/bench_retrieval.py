"""Measures the retrievers: a mode, then its flags.

    python -m tools.bench_retrieval corpus --passages 1000000 --out synthetic.jsonl
    python -m tools.bench_retrieval bm25 --corpus synthetic.jsonl --index index/synthetic
    python -m tools.bench_retrieval exact --passages 500000 --width 384
    python -m tools.bench_retrieval recall --corpus corpus.jsonl --index index/bm25 --questions nq.jsonl
    python -m tools.bench_retrieval fit --topology v5e:2x4 --passages 21000000 --width 768

`corpus` writes synthetic passages, `bm25` times an index of them (`tools/build_index` makes it), `exact`
compares exact search on this machine's devices with faiss-cpu (`pip install -e ".[test]"`), `recall` looks
for gold answers in what an index finds, `fit` compiles exact search for a TPU slice ahead of time.
"""

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from mopd_jax.refusal import Refusal, in_words
from mopd_jax.retrieval.search import Document

VOCABULARY = 300_000
"""Words of the synthetic passages; the n-th is 1/n as frequent as the first, as in English."""
WORDS = 100
"""Words of a passage."""
GB = 1e9
T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` defaults to the process' own arguments."""
    args = _parse(argv)
    args.run(args)


# ---------------------------------------------------------------- synthetic passages


@functools.cache
def _shares() -> np.ndarray:
    """Returns the cumulative frequencies of the words, which fall as 1 / rank; the last is their sum."""
    return np.cumsum(1 / np.arange(1, VOCABULARY + 1))


def _words(rng: np.random.Generator, count: int) -> np.ndarray:
    """Returns the numbers of words drawn at random by their frequency."""
    return np.searchsorted(_shares(), rng.random(count) * _shares()[-1])


def _spelled(numbers: np.ndarray) -> str:
    """Returns words of letters alone that stemming leaves apart."""
    letters = "bcdfghjklmnpqrtvwxz"
    return " ".join(
        "".join(letters[n // len(letters) ** i % len(letters)] for i in range(5)) for n in numbers
    )


def write_corpus(args: argparse.Namespace) -> None:
    """Writes `{"id", "contents"}` lines; the same seed gives the same file."""
    rng = np.random.default_rng(args.seed)
    vocabulary = np.array([_spelled([n]) for n in range(VOCABULARY)])
    with open(args.out, "w") as file:
        for number in range(args.passages):
            contents = f'"Title {number}"\n' + " ".join(vocabulary[_words(rng, WORDS)])
            file.write(json.dumps({"id": str(number), "contents": contents}) + "\n")


# ---------------------------------------------------------------- BM25


def bench_bm25(args: argparse.Namespace) -> None:
    """Prints how an index is opened, what it holds in memory, and queries per second."""
    import bm25s  # noqa: F401  here, so that only what the index takes is measured

    from mopd_jax.retrieval.bm25 import BM25Search

    rng = np.random.default_rng(args.seed)
    queries = [_spelled(_words(rng, 6)) for _ in range(args.queries)]
    before, start = _resident_bytes(), time.perf_counter()
    search = BM25Search(args.corpus, args.index)
    opened = time.perf_counter() - start
    batched, found = _timed(lambda: search.search(queries, 3), repeat=3)
    single, alone = _timed(lambda: [search.search([query], 3)[0] for query in queries], repeat=3)
    assert found == alone
    after = [_resident_bytes() for query in queries if search.search([query], 3)]
    own, mapped = (max(sizes) - first for sizes, first in zip(zip(*after, strict=True), before, strict=True))
    size = sum(file.stat().st_size for file in Path(args.index).iterdir())
    print(f"index of {size / GB:.3f} GB opened in {opened:.2f} s")
    print(f"most resident after any of {len(queries)} queries: {own / GB:.3f} GB of its own and")
    print(f"{mapped / GB:.3f} GB of mapped pages, {own / size:.1%} and {mapped / size:.1%} of the index")
    print(f"batched {len(queries) / batched:.0f} queries/s, one by one {len(queries) / single:.0f}")
    _bench_bm25s(args.index, queries[:32], found)


def _bench_bm25s(index: str, queries: list[str], found: list[tuple[Document, ...]]) -> None:
    """Prints how many queries bm25s itself answers with the same lists, told the words' numbers."""
    import bm25s

    from mopd_jax.retrieval.bm25 import ENDS, HASHES, NUMBERS, STARTS, WEIGHTS, known, make_tokenizer

    names = WEIGHTS, NUMBERS, ENDS, HASHES, STARTS
    data, indices, indptr, hashes, starts = (np.load(Path(index) / name, mmap_mode="r") for name in names)
    library = bm25s.BM25()
    library.scores = {"data": data, "indices": indices, "indptr": indptr, "num_docs": len(starts)}
    library.nonoccurrence_array, library.unique_token_ids_set = None, range(len(hashes))
    bags = [known(hashes, words).tolist() for words in make_tokenizer()(queries, show_progress=False)]
    retrieve = functools.partial(library.retrieve, k=3, show_progress=False)
    seconds, results = _timed(lambda: [retrieve([bag]) for bag in bags], repeat=3)
    ours = [[document.score for document in documents] for documents in found[: len(queries)]]
    np.testing.assert_allclose(ours, [result.scores[0] for result in results], rtol=1e-5)
    print(f"bm25s' own retrieve, one by one: {len(queries) / seconds:.0f} queries/s, the same scores")


def _resident_bytes() -> tuple[int, int]:
    """Returns the resident memory of this process: its own, and pages of mapped files."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


def _timed(call: Callable[[], T], repeat: int = 1) -> tuple[float, T]:
    """Returns the fewest seconds that a call took, and its last result."""
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


# ---------------------------------------------------------------- recall


def bench_recall(args: argparse.Namespace) -> None:
    """Prints the share of questions of which a gold answer stands in the first 3 and 10 passages."""
    from mopd_jax.data.questions import load_questions
    from mopd_jax.data.recall import gold_recall
    from mopd_jax.retrieval.local import open_index

    search = open_index(args.corpus, args.index)
    print(search.identity)
    for path in args.questions:
        questions = load_questions(path)
        found = search.search([question.text for question in questions], 10)
        recalls = {
            k: [gold_recall(q.answers, hits[:k]) for q, hits in zip(questions, found, strict=True)]
            for k in (3, 10)
        }
        shares = {k: np.mean([r for r in recall if r is not None]) for k, recall in recalls.items()}
        print(f"{path}: " + ", ".join(f"recall@{k} {share:.1%}" for k, share in shares.items()), flush=True)


# ---------------------------------------------------------------- exact search


def bench_exact(args: argparse.Namespace) -> None:
    """Prints seconds per batch of exact search and of faiss on the same vectors, and whether they agree."""
    import faiss
    import jax
    import jax.numpy as jnp

    from mopd_jax.retrieval.exact import ExactSearch, make_mesh

    rng = np.random.default_rng(args.seed)
    vectors, queries = (
        _unit(rng.standard_normal((count, args.width), np.float32)).astype(jnp.bfloat16)
        for count in (args.passages, args.queries)
    )
    search = ExactSearch(vectors, make_mesh(jax.local_devices()))
    search.top(queries, 3)  # compiles
    ours, (scores, passages) = _timed(lambda: search.top(queries, 3), repeat=5)
    flat = faiss.IndexFlatIP(args.width)
    flat.add(vectors.astype(np.float32))
    theirs, (expected, numbers) = _timed(lambda: flat.search(queries.astype(np.float32), 3), repeat=3)
    print(f"{args.passages} × {args.width}, {args.queries} queries on {jax.local_device_count()} devices")
    print(f"exact search {ours:.3f} s, faiss {theirs:.3f} s: {theirs / ours:.1f} × as fast")
    print(
        f"same passages {(passages == numbers).mean():.2%}, scores to {np.abs(scores - expected).max():.0e}"
    )


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def bench_fit(args: argparse.Namespace) -> None:
    """Compiles exact search ahead of time and prints what it needs on a device."""
    from tools.compile_for_pod import HOST_ONLY, open_pod

    os.environ |= HOST_ONLY
    pod = open_pod(args.topology)
    from mopd_jax.retrieval.exact import lower_search, make_mesh

    lowered = lower_search(make_mesh(pod.devices), args.passages, args.width, args.queries, 3)
    seconds, compiled = _timed(lowered.compile)
    memory = compiled.memory_analysis()
    peak = memory.peak_memory_in_bytes
    print(
        f"{args.topology}, {args.passages} × {args.width}, {args.queries} queries: arguments "
        f"{memory.argument_size_in_bytes / GB:.2f} GB, peak {peak / GB:.2f} GB of "
        f"{pod.chip.memory / GB:.1f}, compiled in {seconds:.0f} s"
    )
    if peak > pod.chip.memory:
        raise Refusal(f"It does not fit {args.topology}: take a larger slice.")


# ---------------------------------------------------------------- command line


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    modes = parser.add_subparsers(required=True, metavar="mode")

    def mode(name: str, run: Callable[[argparse.Namespace], None], **defaults: int) -> Callable:
        added = modes.add_parser(name, help=run.__doc__.partition("\n")[0])
        added.set_defaults(run=run)
        for flag, default in defaults.items():
            added.add_argument(f"--{flag}", type=int, default=default)
        return added.add_argument

    mode("corpus", write_corpus, passages=1_000_000, seed=0)("--out", required=True)
    drawn = {"queries": 512, "seed": 0}
    for name, run, defaults in (("bm25", bench_bm25, drawn), ("recall", bench_recall, {})):
        add = mode(name, run, **defaults)
        add("--corpus", required=True)
        add("--index", required=True)
    add("--questions", nargs="+", required=True)
    mode("exact", bench_exact, passages=500_000, width=384, queries=64, seed=0)
    mode("fit", bench_fit, passages=21_000_000, width=768, queries=512)("--topology", default="v5e:2x4")
    return parser.parse_args(argv)


if __name__ == "__main__":
    with in_words():
        main()
