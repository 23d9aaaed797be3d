"""Results of evaluations: what they hold, their file, and which of them may stand in one table."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etils import epath

from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.jsonl import read_jsonl


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
    """One run of a system: its attempts at all questions."""

    system: str
    seed: int
    """`run.seed`: runs of one system differ in it, runs of two systems that share it belong together."""
    conditions: Conditions
    records: tuple[Record, ...]


def write_result(result: Result, path: epath.PathLike) -> None:
    """Writes a JSONL file: system, seed and conditions in the first line, then one record per line."""
    head = dataclasses.asdict(dataclasses.replace(result, records=()))
    del head["records"]
    lines = [head, *map(dataclasses.asdict, result.records)]
    epath.Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_result(path: epath.PathLike) -> Result:
    """Returns what `write_result` wrote.

    Raises:
      Refusal: there is no such file, or a line has other fields; the message names the line.
    """
    lines = list(read_jsonl(path))
    if not lines:
        raise Refusal(f"{path} is empty, expected the results of an evaluation.")
    (place, head), *records = lines
    result = _made(Result, place, head | {"records": tuple(_made(Record, *line) for line in records)})
    return dataclasses.replace(result, conditions=_made(Conditions, place, result.conditions))


def _made(kind: type, place: str, fields: dict[str, Any]) -> Any:
    expected = {f.name for f in dataclasses.fields(kind)}
    if fields.keys() != expected:
        raise Refusal(
            f"{place}: found the fields {sorted(fields)}, expected {sorted(expected)} of a "
            f"{kind.__name__}. Evaluate again if another version wrote the file."
        )
    return kind(**fields)


def by_system(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Returns system → its runs in the order of their seeds."""
    runs = {}
    for result in results:
        runs.setdefault(result.system, []).append(result)
    return {system: sorted(found, key=lambda run: run.seed) for system, found in runs.items()}


# ---------------------------------------------------------------- what may be compared


def differing_conditions(results: Sequence[Result]) -> dict[str, list[Any]]:
    """Returns each condition in which results differ, by name, with its value for every result."""
    flat = [_flat(result.conditions) for result in results]
    names = dict.fromkeys(name for conditions in flat for name in conditions)
    values = {name: [conditions.get(name) for conditions in flat] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def check_same_conditions(results: Sequence[Result]) -> None:
    """Checks that results may stand in one table.

    Raises:
      Refusal: two differ in their questions, retriever or limits.
    """
    for other in results[1:]:
        for name, (ours, theirs) in differing_conditions([results[0], other]).items():
            raise Refusal(
                f"{results[0].system} and {other.system} differ in their {name}: {ours} and {theirs}. "
                "Only results with the same questions, retriever and limits can be compared: "
                "evaluate one of them again."
            )


def check_paired(results: Sequence[Result]) -> None:
    """Checks that results can be compared question by question.

    Raises:
      Refusal: two hold different questions or attempts, or are the same run of a system.
    """
    first = results[0]
    for other in results[1:]:
        one_sided = _keys(first) ^ _keys(other)
        if first.conditions.questions != other.conditions.questions and not one_sided:
            raise Refusal(
                f"{first.system} and {other.system} were asked other questions or answers under the same "
                "ids. Evaluate one of them again."
            )
        if one_sided:
            raise Refusal(
                f"{first.system} and {other.system} do not hold the same attempts: {len(one_sided)} are in "
                f"one of them only, {min(one_sided)} first. Evaluate one of them again."
            )
    runs = [(result.system, result.seed) for result in results]
    if doubled := [run for run in dict.fromkeys(runs) if runs.count(run) > 1]:
        system, seed = doubled[0]
        raise Refusal(
            f"Found {system} with seed {seed} {runs.count(doubled[0])} times, expected each run once: "
            "evaluate each run with the seed it was trained with (run.seed), or give systems names of "
            "their own."
        )


def _flat(conditions: Conditions) -> dict[str, Any]:
    return {"questions": conditions.questions, "retriever": conditions.retriever} | conditions.limits


def _keys(result: Result) -> set[tuple[str, str, str, int]]:
    return {(r.dataset, r.split, r.id, r.attempt) for r in result.records}
