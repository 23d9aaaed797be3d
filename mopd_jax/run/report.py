"""Results of an evaluation: their file, their metrics, and how sure a difference between two is.

Shape letters of this module: Q questions of a dataset, A attempts per question, R resamples.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from etils import epath

from mopd_jax.refusal import Refusal

MACRO = "macro"
"""Name of the unweighted mean over datasets."""

METRICS = {
    "avg": ("em", np.mean),
    "pass": ("em", np.max),
    "all": ("em", np.min),
    "f1": ("f1", np.mean),
    "containment": ("containment", np.mean),
    "recall": ("recall", np.mean),
    "searches": ("searches", np.mean),
    "no_search": ("no_search", np.mean),
    "calls": ("calls", np.mean),
    "input_tokens": ("input_tokens", np.mean),
    "output_tokens": ("output_tokens", np.mean),
}
"""Name of a metric → the record's field, and what makes one number of a question's attempts."""

SHARES = ("avg", "pass", "all", "f1", "containment", "recall", "no_search")
"""Metrics between 0 and 1, printed in percent."""


@dataclass(frozen=True)
class Record:
    """One attempt at one question."""

    dataset: str
    split: str
    id: str
    attempt: int
    """Number of the attempt, from 0."""
    answer: str
    """The team's answer, "" for none."""
    em: float
    """Normalised exact match, 0.0 or 1.0."""
    f1: float
    """Token F1."""
    containment: float
    """A gold answer lies within the answer, 0.0 or 1.0."""
    recall: float | None
    """A gold answer lies within the retrieved documents, 0.0 or 1.0; None where that cannot be asked."""
    searches: int
    calls: int
    """Model calls."""
    input_tokens: int
    """Sum of the prompt lengths over model calls, caches ignored."""
    output_tokens: int
    aborted: bool
    """A search failed for good; the attempt counts as wrong and is reported."""
    rows: dict[str, dict[str, int]]
    """Role → status → conversations of this workflow that ended so."""

    @property
    def no_search(self) -> float:
        """1.0 if the workflow never searched, else 0.0."""
        return float(self.searches == 0)


@dataclass(frozen=True)
class Conditions:
    """What has to agree for results to stand in one table."""

    questions: str
    """Fingerprint of the questions (the manifest's hash)."""
    retriever: str
    """The retriever's identity."""
    limits: dict[str, int]
    """Limits of the team and documents per search, by name."""


@dataclass(frozen=True)
class Result:
    """One system's attempts at all questions."""

    system: str
    conditions: Conditions
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Interval:
    """A difference and its 95 % interval."""

    difference: float
    low: float
    high: float


def write_result(result: Result, path: epath.PathLike) -> None:
    """Writes a JSONL file: system and conditions in the first line, then one record per line."""
    head = {"system": result.system, "conditions": dataclasses.asdict(result.conditions)}
    lines = [head, *map(dataclasses.asdict, result.records)]
    epath.Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_result(path: epath.PathLike) -> Result:
    """Returns what `write_result` wrote.

    Raises:
      TypeError: the file's fields are not those of `Record` and `Conditions`.
    """
    head, *lines = map(json.loads, epath.Path(path).read_text().splitlines())
    records = tuple(Record(**line) for line in lines)
    return Result(head["system"], Conditions(**head["conditions"]), records)


def summarise(result: Result) -> dict[str, dict[str, float]]:
    """Returns dataset → metric → mean over questions, and the unweighted mean over datasets as `MACRO`.

    Metrics are those of `METRICS`, shares as 0 … 1, costs per workflow, and "malformed ROLE" and
    "truncated ROLE", the share of that role's conversations that ended so. A mean over nothing is NaN.

    Raises:
      Refusal: questions differ in their attempts, or an attempt comes twice.
    """
    questions = _by_question(result)
    summary = {
        dataset: {metric: _mean(_values(attempts, metric)) for metric in METRICS} | _endings(attempts)
        for dataset, attempts in questions.items()
    }
    names = dict.fromkeys(itertools.chain.from_iterable(summary.values()))
    macro = {name: _mean([row.get(name, np.nan) for row in summary.values()]) for name in names}
    return summary | {MACRO: macro}


def paired_difference(
    ours: Result, theirs: Result, metric: str = "avg", draws: int = 10_000, seed: int = 0
) -> Interval:
    """Returns the macro difference `ours − theirs` of a metric with its paired bootstrap interval.

    Questions are resampled with replacement inside each dataset, their attempts and both systems kept
    together, and the macro difference is computed again for each of `draws` resamples; the interval
    holds its percentiles 2.5 to 97.5 (evaluation protocol). The same seed gives the same interval.

    Raises:
      Refusal: the two are not comparable, see `check_comparable`.
    """
    check_comparable([ours, theirs])
    pairs = zip(_by_question(ours).values(), _by_question(theirs).values(), strict=True)
    differences = [_known(_values(a, metric) - _values(b, metric)) for a, b in pairs]
    rng = np.random.default_rng(seed)
    macro_R = np.mean([_resampled_means(d, draws, rng) for d in differences if d.size], axis=0)
    low, high = np.percentile(macro_R, [2.5, 97.5])
    return Interval(_mean([_mean(d) for d in differences]), float(low), float(high))


def check_comparable(results: Sequence[Result]) -> None:
    """Checks that results may stand in one table.

    Raises:
      Refusal: two differ in their questions, retriever, limits or attempts, or share their name.
    """
    first = results[0]
    for other in results[1:]:
        for name, ours in dataclasses.asdict(first.conditions).items():
            theirs = getattr(other.conditions, name)
            if ours != theirs:
                raise Refusal(
                    f"{first.system} and {other.system} differ in their {name}: {ours} and {theirs}. "
                    "Only results with the same questions, retriever and limits can be compared: "
                    "evaluate one of them again."
                )
        if one_sided := _keys(first) ^ _keys(other):
            raise Refusal(
                f"{first.system} and {other.system} do not hold the same attempts: {len(one_sided)} are in "
                f"one of them only, {min(one_sided)} first. Evaluate one of them again."
            )
    names = [result.system for result in results]
    if len(set(names)) < len(names):
        raise Refusal(f"Found the systems {names}, expected a name of its own for each.")


def format_report(results: Sequence[Result], draws: int = 10_000, seed: int = 0) -> str:
    """Returns Markdown tables: systems by macro metrics, by dataset, and every difference with its interval.

    Raises:
      Refusal: the results are not comparable, see `check_comparable`.
    """
    check_comparable(results)
    summaries = {result.system: summarise(result) for result in results}
    tables = [_macro_table(results, summaries), _dataset_table(results, summaries)]
    if len(results) > 1:
        tables.append(_difference_table(results, draws, seed))
    return "\n\n".join(tables)


def _keys(result: Result) -> set[tuple[str, str, str, int]]:
    return {(r.dataset, r.split, r.id, r.attempt) for r in result.records}


def _by_question(result: Result) -> dict[str, list[list[Record]]]:
    """Returns dataset → questions in order of their key → attempts in order, all checked."""
    grouped = {}
    for record in sorted(result.records, key=lambda r: (r.dataset, r.split, r.id, r.attempt)):
        grouped.setdefault(record.dataset, {}).setdefault((record.split, record.id), []).append(record)
    expected = list(range(_attempts(result)))
    for dataset, questions in grouped.items():
        for key, attempts in questions.items():
            found = [record.attempt for record in attempts]
            if found != expected:
                raise Refusal(
                    f"{result.system}: question {(dataset, *key)} has the attempts {found}, expected "
                    f"{expected}. Evaluate it again: each question counts with all its attempts."
                )
    return {dataset: list(questions.values()) for dataset, questions in grouped.items()}


def _attempts(result: Result) -> int:
    if not result.records:
        raise Refusal(f"{result.system}: found no record.")
    return 1 + max(record.attempt for record in result.records)


def _values(questions: list[list[Record]], metric: str) -> np.ndarray:
    """Returns a metric per question, float64 [Q]; NaN where it cannot be asked."""
    field, reduce = METRICS[metric]
    values_QA = np.array([[getattr(r, field) for r in attempts] for attempts in questions], float)
    return reduce(values_QA, axis=1)


def _known(values: Sequence[float]) -> np.ndarray:
    return np.asarray(values)[~np.isnan(values)]


def _mean(values: Sequence[float]) -> float:
    known = _known(values)
    return float(known.mean()) if known.size else float("nan")


def _endings(questions: list[list[Record]]) -> dict[str, float]:
    """Returns "malformed ROLE" and "truncated ROLE": shares of the role's conversations."""
    counts = {}
    for record in itertools.chain.from_iterable(questions):
        for role, statuses in record.rows.items():
            for status, count in statuses.items():
                ended = counts.setdefault(role, {"malformed": 0, "truncated": 0, "all": 0})
                ended["all"] += count
                if (kind := status.split(":")[0]) in ended:
                    ended[kind] += count
    return {
        f"{kind} {role}": ended[kind] / ended["all"]
        for role, ended in counts.items()
        for kind in ("malformed", "truncated")
    }


def _resampled_means(values: np.ndarray, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the means of `draws` resamples of [Q] values, float64 [R], a bounded number at a time."""
    count = len(values)
    block = max(1, 2**22 // count)
    sizes = [min(block, draws - start) for start in range(0, draws, block)]
    return np.concatenate([values[rng.integers(0, count, (size, count))].mean(axis=1) for size in sizes])


def _macro_table(results: Sequence[Result], summaries: dict) -> str:
    attempts = _attempts(results[0])
    titles = {"avg": f"avg@{attempts}", "pass": f"pass@{attempts}", "all": f"all@{attempts}"}
    header = ["system", *(_title(titles.get(m, m), m) for m in METRICS), "aborted"]
    rows = [
        [
            result.system,
            *(_number(summaries[result.system][MACRO][m], m) for m in METRICS),
            str(sum(record.aborted for record in result.records)),
        ]
        for result in results
    ]
    return _markdown(header, rows)


def _dataset_table(results: Sequence[Result], summaries: dict) -> str:
    columns = list(summaries[results[0].system])
    rows = [[r.system, *(_number(summaries[r.system][c]["avg"], "avg") for c in columns)] for r in results]
    return _markdown([f"avg@{_attempts(results[0])}, %", *columns], rows)


def _difference_table(results: Sequence[Result], draws: int, seed: int) -> str:
    rows = []
    for theirs, ours in itertools.combinations(results, 2):
        found = paired_difference(ours, theirs, "avg", draws, seed)
        interval = f"[{100 * found.low:+.2f}, {100 * found.high:+.2f}]"
        rows.append([f"{ours.system} − {theirs.system}", f"{100 * found.difference:+.2f}", interval])
    return _markdown([f"difference in macro avg@{_attempts(results[0])}", "points", "95 % interval"], rows)


def _title(title: str, metric: str) -> str:
    return f"{title.replace('_', ' ')}, %" if metric in SHARES else title.replace("_", " ")


def _number(value: float, metric: str) -> str:
    if np.isnan(value):
        return "–"
    return f"{100 * value:.2f}" if metric in SHARES else f"{value:,.2f}"


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    """Returns a table that reads well as plain text too: first column left, numbers right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        padded = [
            f"{cells[0]:<{widths[0]}}",
            *(f"{c:>{w}}" for c, w in zip(cells[1:], widths[1:], strict=True)),
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(line(cells) for cells in (header, rule, *rows))
