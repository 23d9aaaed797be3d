"""Ours and the peers in turn, on the same checkpoint and the same token ids: tokens per second and memory.

    python -m tools.benchmark --folder runs/benchmark --work sample,logprobs,update

Every contestant is a process of its own that keeps its warm state; in each round all of them do the work
once. The peers are transformers on PyTorch (`pip install -e ".[parity]"`) and Tunix, for which an environment
of its own is made in the folder (1.6 GB). Everything that is read is made first, once: a random Qwen3 of 41.6
million parameters, written by transformers, and, for `ragged` and `step`, the embedded world's base policy
(trained for some minutes) with the episodes that it plays. Run it from a checkout, on a quiet machine; the
tables are Markdown.

Work: `sample`, `logprobs`, `update` on uniform rows; `ragged`, an update on recorded H-MAS episodes, which
peers pad; `step`, a training step by phase; `load`, sampling of more and more requests by the same slots.
"""

import argparse
import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mopd_jax.refusal import Refusal, in_words
from tools.bench.cases import (
    CONTESTANTS,
    DTYPES,
    LOAD,
    OURS,
    ROOFLINE,
    SCALES,
    STEP,
    TRANSFORMERS,
    TUNIX,
    WORKS,
    Job,
    recipes,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` defaults to the process' own arguments."""
    args = _parse(argv)
    if not importlib.util.find_spec("torch"):
        raise Refusal('torch is not installed; it makes the checkpoint, too: pip install ".[parity]".')
    from tools.bench import inputs, report, tunix_env

    folder = args.folder.resolve() / args.scale
    inputs.make(folder, SCALES[args.scale], args.work)
    pythons = dict.fromkeys(CONTESTANTS, sys.executable)
    if TUNIX in args.contestants:
        pythons[TUNIX] = tunix_env.python(args.folder.resolve())
    sections = []
    for threads in args.threads:
        for dtype in args.dtype:
            base = Job(OURS, ROOFLINE, dtype, threads, args.scale, str(folder))
            for section in _sections(base, args, pythons):
                print(report.section(section) + "\n", flush=True)
                sections.append(section)
    lines = [line for section in sections for line in (*section.lines, *section.machine)]
    print(report.conditions(report.versions(lines), args.repetitions))


def _sections(base: Job, args: argparse.Namespace, pythons: dict[str, str]):
    """Yields the results of every piece of work in one type on so many threads."""
    from dataclasses import replace

    from tools.bench.measure import Worker, compete
    from tools.bench.report import Section

    with contextlib.ExitStack() as stack:
        beside = [
            stack.enter_context(Worker(replace(base, contestant=name), pythons[name]))
            for name in (OURS, TRANSFORMERS)
        ]
        for work in args.work:
            bases = [replace(base, work=work, contestant=name) for name in args.contestants]
            bases = [job for job in bases if recipes(job.contestant, work, job.dtype)]
            yield Section(bases[0], *compete(bases, beside, args.repetitions, pythons))


def _some_of(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns what reads a list like "a,b"."""

    def read(text: str) -> list[str]:
        found = text.split(",")
        unknown = [name for name in found if name not in allowed]
        if unknown or len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(
                f"found {text!r}, expected some of {','.join(allowed)}, each once, with commas between them"
            )
        return found

    return read


def _threads(text: str) -> list[int]:
    cores = len(os.sched_getaffinity(0))
    found = text.split(",")
    if not all(name.isdecimal() and 1 <= int(name) <= cores for name in found):
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected numbers from 1 to {cores} (the cores of this machine), e.g. 1,2"
        )
    return list(map(int, found))


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number from 1 on")
    return int(text)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--folder", type=Path, default=Path("runs/benchmark"), help="of everything that is made")
    add("--work", type=_some_of(WORKS), default=list(WORKS), help=",".join(WORKS))
    add(
        "--contestants",
        type=_some_of(CONTESTANTS),
        default=list(CONTESTANTS),
        help=",".join(CONTESTANTS),
    )
    add("--dtype", type=_some_of(DTYPES), default=list(DTYPES), help=",".join(DTYPES))
    add("--threads", type=_threads, default=[len(os.sched_getaffinity(0))], help="e.g. 1,2")
    add("--repetitions", type=_positive, default=5, help="rounds; medians are printed")
    add("--scale", choices=SCALES, default="full", help="tiny: sizes of a test, whose speeds say nothing")
    args = parser.parse_args(argv)
    if OURS not in args.contestants and {STEP, LOAD} & set(args.work):
        parser.error(f"--work {STEP} and {LOAD} are done by ours alone: add it to --contestants")
    return args


if __name__ == "__main__":
    with in_words():
        main()
