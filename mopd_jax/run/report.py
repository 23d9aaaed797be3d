"""Tables of results, as Markdown that reads well as plain text too."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mopd_jax.run.results import Result, by_system, check_paired, differing_conditions
from mopd_jax.run.scores import (
    DRAWS,
    MACRO,
    METRICS,
    SHARES,
    Interval,
    Resamples,
    attempts_of,
    resample,
    summarise,
    summarise_runs,
)


def format_report(results: Sequence[Result], draws: int = DRAWS, seed: int = 0) -> str:
    """Returns the tables of all results; those with other questions, retriever or limits stand apart.

    Raises:
      Refusal: results of the same conditions are not comparable, see `check_paired`.
    """
    groups = by_conditions(results)
    if len(groups) == 1:
        return format_tables(results, resample(results, draws=draws, seed=seed))
    differing = differing_conditions([group[0] for group in groups])
    return "\n\n".join(
        f"With {', '.join(f'{name} = {values[n]}' for name, values in differing.items())}:\n\n"
        + format_tables(group, resample(group, draws=draws, seed=seed))
        for n, group in enumerate(groups)
    )


def by_conditions(results: Sequence[Result]) -> list[list[Result]]:
    """Returns the results in groups of equal conditions, in the order in which these come first."""
    groups: list[list[Result]] = []
    for result in results:
        same = [group for group in groups if group[0].conditions == result.conditions]
        if same:
            same[0].append(result)
        else:
            groups.append([result])
    return groups


def format_tables(results: Sequence[Result], resamples: Resamples, metric: str = "avg") -> str:
    """Returns tables: systems by macro metrics, by dataset and by seed; every difference with its interval.

    Args:
      results: all runs of all systems.
      resamples: of `metric` for the same results.
      metric: what the second and later tables show, a name of `METRICS`.

    Raises:
      Refusal: the results are not comparable, see `check_paired`.
    """
    check_paired(results)
    runs = by_system(results)
    title = metric_title(metric, attempts_of(results[0]))
    summaries = {system: summarise_runs(found) for system, found in runs.items()}
    tables = [_macro_table(runs, summaries), _dataset_table(summaries, metric, title)]
    if len(results) > len(runs):
        tables.append(_seed_table(runs, metric, title))
    if len(runs) > 1:
        tables += [_difference_table(resamples, metric, title), _what_intervals_cover(runs)]
    return "\n\n".join(tables)


def differences(resamples: Resamples) -> dict[tuple[str, str], Interval]:
    """Returns (later, earlier) → the difference later − earlier for every pair of systems."""
    pairs = itertools.combinations(resamples.means, 2)
    return {(ours, theirs): resamples.difference(ours, theirs) for theirs, ours in pairs}


def metric_title(metric: str, attempts: int) -> str:
    """Returns the head of a metric's column, e.g. "avg@4, %"."""
    name = f"{metric}@{attempts}" if metric in ("avg", "pass", "all") else metric.replace("_", " ")
    return f"{name}, %" if metric in SHARES else name


def format_value(value: float, metric: str) -> str:
    """Returns a metric as its column shows it, "–" for NaN."""
    if np.isnan(value):
        return "–"
    return f"{100 * value:.2f}" if metric in SHARES else f"{value:,.2f}"


def format_interval(interval: Interval, metric: str) -> tuple[str, str]:
    """Returns difference and interval as text, in points for a share."""
    scale = 100 if metric in SHARES else 1
    numbers = (interval.difference, interval.low, interval.high)
    point, low, high = (f"{round(scale * x, 2) + 0.0:+,.2f}" for x in numbers)  # + 0.0: no "-0.00"
    return point, f"[{low}, {high}]"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table whose first column stands left and whose others stand right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            f"{cells[0]:<{widths[0]}}",
            *(f"{c:>{w}}" for c, w in zip(cells[1:], widths[1:], strict=True)),
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(line(cells) for cells in (header, rule, *rows))


Runs = dict[str, list[Result]]
Summaries = dict[str, dict[str, dict[str, float]]]


def _macro_table(runs: Runs, summaries: Summaries) -> str:
    attempts = attempts_of(next(iter(runs.values()))[0])
    header = ["system", *(metric_title(m, attempts) for m in METRICS), "aborted"]
    rows = []
    for system, found in runs.items():
        macro = summaries[system][MACRO]
        aborted = sum(record.aborted for run in found for record in run.records)
        rows.append([system, *(format_value(macro[m], m) for m in METRICS), str(aborted)])
    return markdown(header, rows)


def _dataset_table(summaries: Summaries, metric: str, title: str) -> str:
    columns = list(next(iter(summaries.values())))
    rows = [[s, *(format_value(found[c][metric], metric) for c in columns)] for s, found in summaries.items()]
    return markdown([title, *columns], rows)


def _seed_table(runs: Runs, metric: str, title: str) -> str:
    """Macro means of every training run; "–" where a system lacks a seed."""
    seeds = sorted({run.seed for found in runs.values() for run in found})
    rows = []
    for system, found in runs.items():
        values = {run.seed: summarise(run)[MACRO][metric] for run in found}
        rows.append([system, *(format_value(values.get(seed, np.nan), metric) for seed in seeds)])
    return markdown([f"{title}, by seed", *map(str, seeds)], rows)


def _difference_table(resamples: Resamples, metric: str, title: str) -> str:
    unit = "points" if metric in SHARES else "difference"
    rows: list[list[Any]] = [
        [f"{ours} − {theirs}", *format_interval(interval, metric)]
        for (ours, theirs), interval in differences(resamples).items()
    ]
    return markdown([f"difference in macro {title.removesuffix(', %')}", unit, "95 % interval"], rows)


def _what_intervals_cover(runs: Runs) -> str:
    counts = {len(found) for found in runs.values()}
    if counts == {1}:
        covered = ", of one training run per system"
    else:
        number = "–".join(str(count) for count in sorted({min(counts), max(counts)}))
        covered = f" and over {number} training runs per system (over a handful they come out too narrow)"
    return (
        f"Intervals are over questions with their attempts{covered}; they are not corrected for the number "
        "of pairs."
    )
