"""Serves an index to the hosts of a run (the Search-R1 protocol), until it is interrupted.

    python -m tools.serve_retriever --corpus corpus.jsonl --index index/e5 --host 10.0.0.2 --port 8000

The hosts then search with `--config.retrieval.backend=http --config.retrieval.url=http://10.0.0.2:8000/retrieve`.
Whoever reaches the address can search; by default that is this machine alone.
"""

import argparse
import contextlib
import socket
from collections.abc import Sequence

from mopd_jax.refusal import Refusal, in_words
from mopd_jax.retrieval.cache import CachedSearch
from mopd_jax.retrieval.local import open_index
from mopd_jax.retrieval.server import SearchServer


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` defaults to the process' own arguments."""
    args = _parse(argv)
    _require_address(args.host, args.port)
    retriever = CachedSearch(open_index(args.corpus, args.index), args.cache)
    with SearchServer(retriever, args.host, args.port) as server:
        host, port = server.server_address
        print(f"{retriever.identity} answers at http://{host}:{port}/retrieve", flush=True)
        server.serve_forever()


def _require_address(host: str, port: int) -> None:
    """Refuses an address at which nothing can listen, before an index is opened, which may take minutes."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)  # as the server
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise Refusal(
                f"Cannot listen at {host}:{port} ({error}): choose another --port, or an address of this "
                "machine."
            ) from error


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--corpus", required=True, help='passages, {"id", "contents"} JSONL')
    add("--index", required=True, help="folder that tools/build_index made of them")
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 for all of this machine")
    add("--port", type=int, default=8000, help="0 takes any free one")
    add("--cache", type=int, default=100_000, help="queries whose results are remembered; 0 for none")
    args = parser.parse_args(argv)
    if args.cache < 0:
        parser.error(f"--cache: found {args.cache}, expected a number from 0 on")
    return args


if __name__ == "__main__":
    with in_words(), contextlib.suppress(KeyboardInterrupt):
        main()
