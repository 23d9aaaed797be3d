"""Tables in Markdown."""

import datetime
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tools.bench import inputs
from tools.bench.cases import LOAD, LOGPROBS, OURS, STEP, TITLES, Job
from tools.bench.flops import model_flops
from tools.bench.measure import Line

PHASES = ("rollout", "score", "update")


@dataclass(frozen=True)
class Section:
    """One piece of work in one type on so many threads."""

    base: Job
    lines: Sequence[Line]
    machine: Sequence[Line]
    """Matrix products, measured in the same rounds."""


def conditions(versions: dict[str, str], repetitions: int) -> str:
    """Returns the line below all tables: what was run where and when."""
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.*)", info)
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    cores = len(os.sched_getaffinity(0))
    found = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return (
        f"{datetime.date.today()}, {model[1] if model else 'unknown processor'}, {cores} cores, "
        f"{gigabytes:.0f} GB; {found}. {repetitions} interleaved repetitions, medians (lowest – highest)."
    )


def versions(lines: Iterable[Line]) -> dict[str, str]:
    """Returns the versions that the contestants named; a second one of a library carries its user's name."""
    found: dict[str, str] = {}
    for line in lines:
        for library, version in line.first.get("versions", {}).items():
            if found.setdefault(library, version) != version:
                found[f"{library} ({line.job.contestant})"] = version
    return found


def section(s: Section) -> str:
    """Returns a title, a table, what the machine did meanwhile, and how far the results agree."""
    title = TITLES[s.base.work].format(**asdict(s.base.sizes))
    where = f"{s.base.dtype}, {s.base.threads} thread{'s' if s.base.threads > 1 else ''}"
    table = _phases if s.base.work == STEP else _speeds
    paragraphs = [
        f"### {title}; {where}",
        inputs.describe(s.base),
        table(s),
        _machine(s),
        *_agreement(s),
    ]
    return "\n\n".join(filter(None, paragraphs))


def _speeds(s: Section) -> str:
    ours = next((line.speed for line in s.lines if line.job.contestant == OURS and line.replies), None)
    best = _best_rate(s.machine)
    rows = [_speed_row(line, ours, best) for line in s.lines]
    compared = "of the slots used" if s.base.work == LOAD else "ours ÷ it"
    header = ["", "rows per micro-batch", "tokens/s", compared, "peak memory, MB", "of the machine's rate"]
    return _table([header, *rows])


def _speed_row(line: Line, ours: float | None, best: float) -> list[str]:
    job = line.job
    if line.failure:
        return [job.title, "", f"failed: {line.failure}", "", "", ""]
    speeds, flops = line.speeds, model_flops(job)
    share = flops / line.median("seconds") / best
    compared = f"{ours / line.speed:.2f}" if ours and job.contestant != OURS else ""
    if job.work == LOAD:
        compared = f"{line.median('utilisation'):.0%}"
    return [
        job.title,
        str(job.micro_batch or ""),
        f"{line.speed:,.0f} ({min(speeds):,.0f} – {max(speeds):,.0f})",
        compared,
        f"{line.peak / 1e6:,.0f}",
        f"{share:.0%}",
    ]


def _phases(s: Section) -> str:
    header = ["", *(f"{phase}, s" for phase in PHASES), "whole, s", "of the slots used", "peak memory, MB"]
    rows = [
        [
            line.job.title,
            *(f"{line.median(f'seconds/{phase}'):.2f}" for phase in PHASES),
            f"{line.median('seconds'):.2f}",
            f"{line.median('utilisation'):.0%}",
            f"{line.peak / 1e6:,.0f}",
        ]
        for line in s.lines
    ]
    return _table([header, *rows])


def _table(rows: Sequence[Sequence[str]]) -> str:
    header, *body = ("| " + " | ".join(row) + " |" for row in rows)
    rule = "| --- |" + " --: |" * (len(rows[0]) - 1)
    return "\n".join([header, rule, *body])


# ---------------------------------------------------------------- the machine, the results


def _rate(line: Line) -> float:
    """Returns the FLOP/s of the fastest repetition of matrix products."""
    return model_flops(line.job) / min(line.values("seconds"))


def _best_rate(machine: Sequence[Line]) -> float:
    return max(map(_rate, machine))


def _machine(s: Section) -> str:
    rates = ", ".join(f"{'/'.join(line.first['versions'])} {_rate(line) / 1e9:,.0f}" for line in s.machine)
    n = s.base.sizes.matmul
    return f"Matrix products of {n} × {n}, best of the same rounds, GFLOP/s: {rates}."


def _agreement(s: Section) -> list[str]:
    """Returns one sentence per contestant that computes what ours computes."""
    done = [line for line in s.lines if line.replies]
    if not done or done[0].job.contestant != OURS:
        return []
    ours, *others = done
    if s.base.work == LOGPROBS:
        return [
            f"Largest difference of a log-probability, {line.job.title} – ours: "
            f"{np.abs(np.load(line.job.file) - np.load(ours.job.file)).max():.1e}."
            for line in others
        ]
    if "loss" in ours.first:
        return [
            f"Losses of the first two updates, {line.job.title}: "
            f"{line.first['loss']:.6f}, {line.replies[0]['loss']:.6f}."
            for line in (ours, *others)
        ]
    counts = ", ".join(f"{line.job.title} {line.replies[0]['tokens']:,}" for line in (ours, *others))
    return [f"Tokens per repetition: {counts}."]
