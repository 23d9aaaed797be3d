"""Makes the index of a corpus: BM25, or embeddings where an encoder is named.

    python -m tools.build_index --corpus corpus.jsonl --out index/bm25
    python -m tools.build_index --corpus corpus.jsonl --out index/e5 --encoder e5-base-v2 \\
        --query_prefix "query: " --passage_prefix "passage: "

The corpus is a file of `{"id", "contents"}` lines. The index refers to it by offsets and holds no text, so
both are named where they are used: `--config.retrieval.backend=bm25` (or dense)
`--config.retrieval.corpus=corpus.jsonl --config.retrieval.index=index/bm25`. An encoder is a Hugging Face
folder of a BERT model (E5, MiniLM); its files become a part of the index.
"""

import argparse
import time
from collections.abc import Sequence

from mopd_jax.refusal import in_words
from mopd_jax.retrieval import bm25, dense


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` defaults to the process' own arguments."""
    args, start = _parse(argv), time.monotonic()
    if args.encoder:
        dense.build(
            args.corpus,
            args.out,
            args.encoder,
            args.query_prefix,
            args.passage_prefix,
            args.tokens,
            progress=True,
        )
    else:
        bm25.build(args.corpus, args.out, progress=True)
    print(f"{args.out} holds the index of {args.corpus}, made in {time.monotonic() - start:.0f} s.")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--corpus", required=True, help='passages, {"id", "contents"} JSONL')
    add("--out", required=True, help="folder of the index; an earlier index in it is replaced")
    add("--encoder", default="", help="Hugging Face folder of a BERT encoder; BM25 without it")
    add("--query_prefix", default="", help='stands before every query, "query: " for E5')
    add("--passage_prefix", default="", help='stands before every passage, "passage: " for E5')
    add("--tokens", type=int, default=256, help="of a longer passage the end is not embedded")
    args = parser.parse_args(argv)
    if not args.encoder and (args.query_prefix or args.passage_prefix):
        parser.error("--query_prefix and --passage_prefix belong to an --encoder")
    return args


if __name__ == "__main__":
    with in_words():
        main()
