"""The report of a replication: the paper's table beside ours, the order of its pairs, how training went."""

import itertools
import json
from collections.abc import Mapping, Sequence

import numpy as np
from etils import epath

from mopd_jax.config import Chain, Kind, phases
from mopd_jax.published import PAPER
from mopd_jax.run.decisions import describe_decisions
from mopd_jax.run.plots import Curves, plot_curves
from mopd_jax.run.report import (
    by_conditions,
    format_interval,
    format_report,
    format_value,
    markdown,
    metric_title,
)
from mopd_jax.run.results import Result, by_system, read_result
from mopd_jax.run.scores import MACRO, Interval, Resamples, attempts_of, resample, summarise, summarise_runs

LEARNING = {
    "outcome": "share of workflows with a right candidate",
    "searches": "searches per workflow",
}
NO_SEARCH = {"no_search": "share of workflows that never search"}
"""Metric of a training step → what its panel is called."""

ONE_SEED = "**One seed: no claim about order.**"


def write_report(folder: epath.PathLike, chains: Sequence[Chain], made_by: Mapping[str, str]) -> str:
    """Writes `report.md`, `learning.png` and `no_search.png`; returns the path of the first.

    Args:
      folder: made if absent.
      chains: one for each seed, all their phases finished.
      made_by: what made the figures, e.g. commit and command, by name.

    Raises:
      Refusal: the evaluations cannot be compared, see `check_paired`.
    """
    folder = epath.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plot_curves(folder / "learning.png", {label: curves(chains, name) for name, label in LEARNING.items()})
    plot_curves(folder / "no_search.png", {label: curves(chains, name) for name, label in NO_SEARCH.items()})
    results = [
        read_result(epath.Path(phase.run.dir) / "results.jsonl")
        for chain in chains
        for phase in phases(chain).values()
        if phase.train.kind is Kind.EVALUATE
    ]
    path = folder / "report.md"
    path.write_text(format_replication(results, chains[0], made_by) + "\n")
    return str(path)


def format_replication(results: Sequence[Result], chain: Chain, made_by: Mapping[str, str]) -> str:
    """Returns the report as Markdown; its two figures lie beside it.

    Args:
      results: every evaluation of every seed.
      chain: of any one seed: its settings are told.
      made_by: see `write_report`.
    """
    seeds = sorted({result.seed for result in results})
    parts = [
        "# The paper's systems in the embedded world",
        f"Training seeds: {', '.join(map(str, seeds))}. {ONE_SEED if len(seeds) == 1 else ''}".strip(),
        "## The paper's table beside ours",
        paper_table(results),
        "## The order of the paper's pairs",
        order_table(results),
        "## All evaluations",
        format_report(results),
        "## Training",
        "![Learning curves](learning.png)",
        "![Workflows that never search](no_search.png)",
        describe_decisions(chain),
        "## Made by",
        "\n".join(f"- {name}: {value}" for name, value in made_by.items()),
    ]
    return "\n\n".join(parts)


def paper_table(results: Sequence[Result]) -> str:
    """Returns every system with the paper's macro avg@k and ours, and which of the paper's are missing."""
    rows = []
    for system, runs in by_system(results).items():
        macro = summarise_runs(runs)[MACRO]
        ours = [format_value(macro[metric], metric) for metric in ("avg", "searches", "no_search")]
        by_seed = [format_value(summarise(run)[MACRO]["avg"], "avg") for run in runs]
        rows.append([system, _quoted(system), ours[0], " / ".join(by_seed), *ours[1:]])
    title = metric_title("avg", attempts_of(results[0]))
    header = ["system", "paper, avg@4, %", f"ours, {title}", "by seed", "searches", "no search, %"]
    missing = [system for system in PAPER if system not in by_system(results)]
    note = f"\n\nIn the paper's table and not here: {', '.join(missing)}." if missing else ""
    return markdown(header, rows) + note


def order_table(results: Sequence[Result]) -> str:
    """Returns every pair of the paper's systems under equal conditions: its difference there and here, and
    whether our interval keeps the order, reverses it or holds 0."""
    rows, verdicts = [], {"kept": 0, "reversed": 0, "open": 0}
    for group in by_conditions(results):
        known = [result for result in group if result.system in PAPER]
        for better, worse, interval in _paper_pairs(resample(known)) if known else ():
            verdict = order(interval)
            verdicts[verdict] += 1
            theirs = f"{PAPER[better] - PAPER[worse]:+.2f}"
            rows.append([f"{better} − {worse}", theirs, *format_interval(interval, "avg"), verdict])
    counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    header = ["better − worse in the paper", "paper", "ours", "95 % interval", "order"]
    return f"{markdown(header, rows)}\n\nPairs: {len(rows)}, {counted} (the interval holds 0)."


def order(interval: Interval) -> str:
    """Returns what an interval of (better − worse in the paper) says: "kept", "reversed" or "open"."""
    if interval.low > 0:
        return "kept"
    return "reversed" if interval.high < 0 else "open"


def curves(chains: Sequence[Chain], metric: str) -> Curves:
    """Returns a metric of every training step of the phases that learn from their own episodes.

    Args:
      chains: one for each seed.
      metric: a name in `metrics.jsonl`; a step without a finite value gives NaN.
    """
    named = [phases(chain) for chain in chains]
    return {
        name: [_curve(seed[name].run.dir, metric) for seed in named]
        for name, phase in named[0].items()
        if phase.train.kind is Kind.REINFORCE
    }


def _curve(folder: str, metric: str) -> np.ndarray:
    lines = (epath.Path(folder) / "metrics.jsonl").read_text().splitlines()
    return np.array([json.loads(line)[metric] for line in lines], float)


def _paper_pairs(resamples: Resamples) -> list[tuple[str, str, Interval]]:
    """Returns (better, worse, better − worse) of every pair, the paper's best first."""
    ranked = sorted(resamples.means, key=lambda system: -PAPER[system])
    pairs = itertools.combinations(ranked, 2)
    return [(better, worse, resamples.difference(better, worse)) for better, worse in pairs]


def _quoted(system: str) -> str:
    return f"{PAPER[system]:.2f}" if system in PAPER else "–"
