"""What a run shows: one plain line per step, and one decoded row with the trained tokens in colour."""

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple, TextIO

import rich.console
import rich.panel
import rich.text

from mopd_jax.run.metrics import Metrics

ROLES = ("leader", "searcher", "answerer", "agent")
"""By initial; Answerer and agent share theirs and never speak in one workflow."""


class Column(NamedTuple):
    """A part of the line: a label and metrics that are shown with one format, roles by their initial."""

    label: str
    names: tuple[str, ...]
    format: str


def _by_role(group: str) -> tuple[str, ...]:
    return tuple(f"{group}/{role}" for role in ROLES)


COLUMNS = (
    Column("loss", ("loss",), "9.2e"),
    Column("nll", ("nll",), "5.3f"),
    Column("R", _by_role("reward"), "5.2f"),
    Column("EM", ("em",), "4.2f"),
    Column("eval EM", ("eval/em",), "5.3f"),
    Column("searches", ("searches",), "4.1f"),
    Column("none", ("no_search",), "4.0%"),
    Column("bad", _by_role("malformed"), "4.0%"),
    Column("KL", _by_role("kl"), "6.0e"),
    Column("ratio", _by_role("log_ratio"), "6.3f"),
    Column("H", _by_role("entropy"), "4.2f"),
    Column("grad", ("grad_norm",), "6.2f"),
    Column("sampled/s", ("tokens_per_s/rollout",), "5.0f"),
    Column("trained/s", ("tokens_per_s/update",), "6.0f"),
)
"""The rest of `metrics.jsonl` is not shown."""


def step_line(phase: str, step: int, steps: int, metrics: Metrics) -> str:
    """Returns the line of a step, aligned with its neighbours; metrics that were not measured are left out.

    Args:
      phase: name of the phase.
      step: steps done.
      steps: steps of the phase.
      metrics: as written to `metrics.jsonl`; `seconds/remaining` comes last.
    """
    progress = f"{step:>{len(str(steps))}}/{steps}"
    parts = [f"{phase} {progress}" if phase else progress]
    parts += [text for column in COLUMNS if (text := _column(column, metrics))]
    if "seconds/remaining" in metrics:
        parts.append(f"{duration(metrics['seconds/remaining'])} left")
    return " | ".join(parts)


def duration(seconds: float | None) -> str:
    """Returns e.g. "45s", "12m05s", "3h20m"; "?" where unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def show_row(title: str, spans: Sequence[tuple[str, bool]], file: TextIO | None = None) -> None:
    """Prints one row as text: green what was generated and is trained, dim what the environment wrote.

    Args:
      title: role and question.
      spans: (text, generated) in order.
      file: stdout by default; colours only where it is a terminal.
    """
    text = rich.text.Text()
    for piece, generated in spans:
        text.append(piece, style="green" if generated else "dim")
    rich.console.Console(file=file or sys.stdout).print(rich.panel.Panel(text, title=rich.text.Text(title)))


def _column(column: Column, metrics: Metrics) -> str:
    shown = {name: metrics[name] for name in column.names if name in metrics}
    values = " ".join(f"{_initial(name)}{_number(value, column.format)}" for name, value in shown.items())
    return f"{column.label} {values}" if shown else ""


def _initial(name: str) -> str:
    group, _, role = name.rpartition("/")
    return role[0].upper() if group and role in ROLES else ""


def _number(value: float | None, spec: str) -> str:
    if value is None or not math.isfinite(value):
        return "-".rjust(int(spec.split(".")[0]))
    return format(float(value), spec)
