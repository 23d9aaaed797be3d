"""Metrics of results, and how sure the difference between two systems is.

Shape letters of this module: Q questions of a dataset, A attempts per question, S training runs (seeds),
R resamples.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mopd_jax.refusal import Refusal
from mopd_jax.run.results import Record, Result, by_system, check_paired

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

DRAWS = 10_000
"""Resamples of an interval (evaluation protocol)."""


@dataclass(frozen=True)
class Interval:
    """A difference and its 95 % interval."""

    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class Resamples:
    """A metric's macro mean for every system, over the same resamples of questions and runs."""

    means: dict[str, float]
    """System → mean over its runs of what was measured."""
    resampled_R: dict[str, np.ndarray]
    """System → the same of every resample, float64 [R]."""

    def difference(self, ours: str, theirs: str) -> Interval:
        """Returns `ours − theirs` with percentiles 2.5 and 97.5 of the paired resamples."""
        low, high = np.percentile(self.resampled_R[ours] - self.resampled_R[theirs], [2.5, 97.5])
        return Interval(self.means[ours] - self.means[theirs], float(low), float(high))


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
    return summary | {MACRO: _mean_of_each(list(summary.values()))}


def summarise_runs(runs: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Returns the mean over a system's runs of what `summarise` says of each."""
    summaries = [summarise(run) for run in runs]
    return {dataset: _mean_of_each([summary[dataset] for summary in summaries]) for dataset in summaries[0]}


def resample(results: Sequence[Result], metric: str = "avg", draws: int = DRAWS, seed: int = 0) -> Resamples:
    """Resamples a metric's macro mean for the paired bootstrap (evaluation protocol).

    Questions are resampled with replacement inside each dataset, their attempts and all systems and runs
    kept together. A second level resamples training runs: systems with the same seeds get the same draws of
    them, since runs of one seed share their base and teacher; others are drawn independently [D]. With one
    run per system an interval covers questions and attempts only. A question for which the metric cannot
    be asked in any one run is left out everywhere. The same seed gives the same resamples.

    Raises:
      Refusal: the results hold other questions or attempts, or a run comes twice, see `check_paired`.
    """
    check_paired(results)
    runs = by_system(results)
    ordered = [run for found in runs.values() for run in found]
    rng = np.random.default_rng(seed)
    measured_S, resampled_SR = _macro_means(ordered, metric, draws, rng)
    ends = np.cumsum([len(found) for found in runs.values()])[:-1]
    chosen_RS: dict[tuple[int, ...], np.ndarray] = {}
    means, resampled_R = {}, {}
    for system, own_S, own_SR in zip(
        runs, np.split(measured_S, ends), np.split(resampled_SR, ends), strict=True
    ):
        seeds = tuple(run.seed for run in runs[system])
        if seeds not in chosen_RS:
            chosen_RS[seeds] = rng.integers(0, len(seeds), (draws, len(seeds)))
        means[system] = float(own_S.mean())
        resampled_R[system] = np.take_along_axis(own_SR.T, chosen_RS[seeds], axis=1).mean(axis=1)
    return Resamples(means, resampled_R)


def attempts_of(result: Result) -> int:
    """Returns A, the attempts per question.

    Raises:
      Refusal: there is no record.
    """
    if not result.records:
        raise Refusal(f"{result.system}: found no record.")
    return 1 + max(record.attempt for record in result.records)


def _macro_means(
    runs: Sequence[Result], metric: str, draws: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a metric's macro mean of every run: as measured [S], and of every resample [S, R]."""
    measured, resampled = [], []
    for attempts in zip(*(_by_question(run).values() for run in runs), strict=True):
        values_SQ = np.array([_values(questions, metric) for questions in attempts])
        known_SQ = values_SQ[:, ~np.isnan(values_SQ).any(axis=0)]
        if known_SQ.size:
            measured.append(known_SQ.mean(axis=1))
            resampled.append(_resampled_means(known_SQ, draws, rng))
    if not measured:
        return np.full(len(runs), np.nan), np.full((len(runs), draws), np.nan)
    return np.mean(measured, axis=0), np.mean(resampled, axis=0)


def _resampled_means(values_SQ: np.ndarray, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Returns means over Q of the same `draws` resamples for each run, [S, R], a bounded number at a time."""
    count = values_SQ.shape[1]
    block = max(1, 2**22 // count)
    sizes = [min(block, draws - start) for start in range(0, draws, block)]
    drawn = (rng.integers(0, count, (size, count)) for size in sizes)
    return np.hstack([[values[chosen].mean(axis=1) for values in values_SQ] for chosen in drawn])


def _by_question(result: Result) -> dict[str, list[list[Record]]]:
    """Returns dataset → questions in order of their key → attempts in order, all checked."""
    grouped = {}
    for record in sorted(result.records, key=lambda r: (r.dataset, r.split, r.id, r.attempt)):
        grouped.setdefault(record.dataset, {}).setdefault((record.split, record.id), []).append(record)
    expected = list(range(attempts_of(result)))
    for dataset, questions in grouped.items():
        for key, attempts in questions.items():
            found = [record.attempt for record in attempts]
            if found != expected:
                raise Refusal(
                    f"{result.system}: question {(dataset, *key)} has the attempts {found}, expected "
                    f"{expected}. Evaluate it again: each question counts with all its attempts."
                )
    return {dataset: list(questions.values()) for dataset, questions in grouped.items()}


def _values(questions: list[list[Record]], metric: str) -> np.ndarray:
    """Returns a metric per question, float64 [Q]; NaN where it cannot be asked."""
    field, reduce = METRICS[metric]
    values_QA = np.array([[getattr(r, field) for r in attempts] for attempts in questions], float)
    return reduce(values_QA, axis=1)


def _mean(values: Sequence[float]) -> float:
    known = np.asarray(values)[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def _mean_of_each(summaries: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(itertools.chain.from_iterable(summaries))
    return {name: _mean([summary.get(name, np.nan) for summary in summaries]) for name in names}


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
