"""Compares evaluations: one table, and every difference with its interval.

    python -m tools.compare runs/mini --out runs/comparison
    python -m tools.compare base=runs/eval_base ours=runs/eval_seed0 ours=runs/eval_seed1 --metric pass

A folder is that of an evaluation, or of a chain, whose evaluations are taken then. Runs of one system with
several seeds become one line, and intervals cover the seeds too; NAME=FOLDER names the system of a folder
anew. Only results with the same questions, retriever and limits are compared; `--mixed` allows other
retrievers and limits, and the text says which.
"""

import argparse
import csv
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from etils import epath

from mopd_jax.refusal import Refusal, in_words
from mopd_jax.run.checkpoint import write_json
from mopd_jax.run.plots import plot_differences
from mopd_jax.run.report import differences, format_tables, metric_title
from mopd_jax.run.results import Result, check_same_conditions, differing_conditions, read_result
from mopd_jax.run.scores import METRICS, Resamples, attempts_of, resample, summarise

RESULTS = "results.jsonl"
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` defaults to the process' own arguments."""
    args = _parse(argv)
    results = collect(args.runs)
    if not args.mixed:
        check_same_conditions(results)
    resamples = resample(results, args.metric)
    text = "\n\n".join([*what_differs(results), format_tables(results, resamples, args.metric)])
    print(text)
    if args.out:
        write_comparison(epath.Path(args.out), text, results, resamples, args.metric)


def collect(runs: Iterable[str]) -> list[Result]:
    """Returns the results of all folders, in their order.

    Args:
      runs: FOLDER or NAME=FOLDER; the folder of an evaluation or of a chain.

    Raises:
      Refusal: a folder holds no evaluation, or a name is given to several.
    """
    results = []
    for run in runs:
        name, equals, named = run.partition("=")
        folder = epath.Path(named if equals else run)
        files = [folder / RESULTS] if (folder / RESULTS).exists() else sorted(folder.glob(f"*/{RESULTS}"))
        if not files:
            raise Refusal(f"Found no {RESULTS} in {folder} or a folder in it: name what an evaluation wrote.")
        if equals and len(files) > 1:
            several = ", ".join(file.parent.name for file in files)
            raise Refusal(f"{run} gives one name to several evaluations: name the folder of one, {several}.")
        found = map(read_result, files)
        results += [dataclasses.replace(result, system=name) for result in found] if equals else found
    return results


def what_differs(results: Sequence[Result]) -> list[str]:
    """Returns a line for each condition in which the systems differ."""
    return [
        f"Not the same for all: {name} = "
        + ", ".join(f"{value} ({r.system})" for r, value in zip(results, values, strict=True))
        for name, values in differing_conditions(results).items()
    ]


def write_comparison(
    folder: epath.Path, text: str, results: Sequence[Result], resamples: Resamples, metric: str
) -> None:
    """Writes `compare.md`, `compare.json`, `metrics.csv`, `differences.csv` and `differences.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.md").write_text(text + "\n")
    conditions = [
        {"system": run.system, "seed": run.seed, **dataclasses.asdict(run.conditions)} for run in results
    ]
    measured, differing = metric_rows(results), difference_rows(resamples, metric)
    whole = {"conditions": conditions, "metrics": measured, "differences": differing}
    write_json(folder / "compare.json", whole)
    _write_csv(folder / "metrics.csv", measured)
    if differing:
        _write_csv(folder / "differences.csv", differing)
        title = metric_title(metric, attempts_of(results[0]))
        plot_differences(folder / "differences.png", differences(resamples), metric, title)


def metric_rows(results: Sequence[Result]) -> list[Row]:
    """Returns every metric of every run by dataset and macro; None for what cannot be asked."""
    return [
        {"system": run.system, "seed": run.seed, "dataset": dataset, "metric": metric, "value": _known(value)}
        for run in results
        for dataset, metrics in summarise(run).items()
        for metric, value in metrics.items()
    ]


def difference_rows(resamples: Resamples, metric: str) -> list[Row]:
    """Returns the macro difference ours − theirs of every pair of systems, shares as −1 … 1."""
    return [
        {"ours": ours, "theirs": theirs, "metric": metric}
        | {name: _known(value) for name, value in dataclasses.asdict(interval).items()}
        for (ours, theirs), interval in differences(resamples).items()
    ]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _write_csv(path: epath.Path, rows: Sequence[Row]) -> None:
    with path.open("w") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="[NAME=]FOLDER", help="of an evaluation, or of a chain with several")
    add("--metric", choices=METRICS, default="avg", help="what the differences are of")
    add("--mixed", action="store_true", help="compare in spite of other retrievers or limits")
    add("--out", help="folder for text, CSV, JSON and plot")
    return parser.parse_args(argv)


if __name__ == "__main__":
    with in_words():
        main()
