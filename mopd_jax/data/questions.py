"""Questions from FlashRAG files and prepared sets, and the stateless order in which training draws them."""

import bisect
import functools
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Sequence

import numpy as np
from etils import epath

from mopd_jax.data.prepared import PreparedSet
from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.jsonl import id_field, read_jsonl, text_field
from mopd_jax.team.episode import Question

SEPARATOR = "|||"
"""Some published NQ-open files join several gold answers into one string with it."""

_SPLIT = re.compile(r"(train|dev|test)_")
_PREPARED = re.compile(r"(.+):(train|dev|test)")


def load_questions(source: str) -> Sequence[Question]:
    """Returns the questions of a FlashRAG JSONL file: `{"id", "question", "golden_answers", "metadata"?}`,
    or of a set that `tools/prepare_data` made, spelled FOLDER:SPLIT, which are read when they are asked for.

    In a file, `dataset` is `metadata.dataset`, or the file's stem; `split` is the id's prefix `train_`,
    `dev_` or `test_`, or "" [D]. Questions and answers are kept as published (doubled quotes too), except
    that white space around them is dropped and "|||"-joined answers are taken apart.

    Args:
      source: a file, may be a gs:// path; or a prepared set.

    Raises:
      Refusal: a line is no JSON object, a question or its answers are missing or empty, or an id
        comes twice in its dataset and split, with file, line and reason; or there is no such set.
    """
    if prepared_at := _PREPARED.fullmatch(source):
        return PreparedSet(*prepared_at.groups())
    questions, first_seen = [], {}
    for place, record in read_jsonl(source):
        question = from_flashrag(record, pathlib.PurePath(source).stem, place)
        check_unused(question, place, first_seen)
        questions.append(question)
    if not questions:
        raise Refusal(
            f'{source}: found no question, expected lines of {{"id", "question", "golden_answers"}}. '
            "tools/prepare_data reads other formats."
        )
    return questions


def check_unused(question: Question, place: str, first_seen: dict[tuple[str, str, str], str]) -> None:
    """Enters a question and its place into `first_seen`.

    Raises:
      Refusal: its (dataset, split, id) is there already.
    """
    key = key_of(question)
    if key in first_seen:
        raise Refusal(f"{place}: {key} was already used in {first_seen[key]}.")
    first_seen[key] = place


def open_sets(sources: Sequence[str]) -> list[Sequence[Question]]:
    """Returns the questions of each source; prepared sets are not read through.

    Raises:
      Refusal: as `load_questions`, or two sources hold the same (dataset, split, id): its rollouts
        would fall into one group. A prepared set must hold its dataset and split alone.
    """
    opened = [load_questions(source) for source in sources]
    first_seen: dict[tuple[str, ...], str] = {}
    pairs = zip(sources, opened, strict=True)
    for source, found in sorted(pairs, key=lambda pair: not _PREPARED.fullmatch(pair[0])):
        for name in _names(source, found):
            if other := first_seen.get(name) or first_seen.get(name[:2]):
                raise Refusal(
                    f"{source}: {name} is also in {other}. "
                    "Leave out one of the sources, or the question in one of them."
                )
            first_seen[name] = source
    return opened


def files_of(source: str) -> list[epath.Path]:
    """Returns the files in which the questions of a source lie, none for a prepared set that is not there."""
    if prepared_at := _PREPARED.fullmatch(source):
        folder, split = prepared_at.groups()
        return sorted(epath.Path(folder).glob(f"*/*-{split}.array_record*"))
    return [epath.Path(source)]


def fingerprint(questions: Sequence[Question]) -> str:
    """Returns the sha256 (hex) of the questions in their order: dataset, split, id, text and answers."""
    digest = hashlib.sha256()
    for q in questions:
        digest.update(json.dumps([q.dataset, q.split, q.id, q.text, q.answers]).encode() + b"\n")
    return digest.hexdigest()


def select(questions: Sequence[Question], count: int) -> list[Question]:
    """Returns `count` of the questions (all for 0), spread evenly over their datasets, in their order.

    A dataset with too few gives all it has and the others fill up; what cannot be split evenly goes
    to the datasets that come first. Inside a dataset the sha256 of (dataset, split, id) decides, so
    that the choice depends neither on a seed nor on the file's order. Where there are fewer than
    `count` questions in all, every one is returned.
    """
    members = {}
    for index, question in enumerate(questions):
        members.setdefault(question.dataset, []).append(index)
    rounds = [sorted(indices, key=lambda i: _digest(questions[i])) for indices in members.values()]
    taken = [i for i in itertools.chain(*itertools.zip_longest(*rounds)) if i is not None]
    return [questions[i] for i in sorted(taken[: count or None])]


class Joined(Sequence):
    """Several sequences of questions as one, each question read when it is asked for."""

    def __init__(self, sets: Sequence[Sequence[Question]]):
        self._sets = sets
        self._ends = list(itertools.accumulate(map(len, sets), initial=0))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Question:
        which = bisect.bisect_right(self._ends, index) - 1
        return self._sets[which][index - self._ends[which]]


class QuestionSource:
    """Endless draws of training questions, a pure function of seed and position.

    Without weights the sets are one: draw number d of the run is question number d mod n of epoch
    d // n, and each epoch has its own permutation of all n questions. With weights each set is drawn
    from in this way on its own, and every sum(weights) draws of the run, a round, hold `weights[i]`
    draws from set i, mixed [D]. So the shares are exact, and any draw can be computed from its number.
    """

    def __init__(self, sets: Sequence[Sequence[Question]], seed: int, weights: Sequence[int] = ()):
        """Takes sets with distinct (dataset, split, id), as `open_sets` returns them; `weights` has one
        whole number above 0 per set, or none.

        Raises:
          Refusal: there are no questions.
        """
        if not sets or not all(map(len, sets)):
            raise Refusal("Found no training questions: name at least one file in data.train.")
        self._streams = sets if weights else [Joined(sets)]
        self._weights = weights or [1]
        self._starts = list(itertools.accumulate(self._weights, initial=0))
        self._seed = seed

    def batch(self, step: int, count: int) -> list[tuple[Question, int]]:
        """Returns the `count` draws of a step as (question, epoch).

        The epoch tells two draws of one question apart, in one batch and between batches. Any step
        can be asked for at any time; all steps of a run ask for the same `count`.
        """
        return [self._draw(number) for number in range(step * count, (step + 1) * count)]

    def _draw(self, number: int) -> tuple[Question, int]:
        round_, place = divmod(number, self._starts[-1])
        slot = self._order(len(self._streams), round_, self._starts[-1])[place]
        stream = bisect.bisect_right(self._starts, slot) - 1
        questions = self._streams[stream]
        nth = round_ * self._weights[stream] + int(slot) - self._starts[stream]
        epoch, index = divmod(nth, len(questions))
        return questions[int(self._order(stream, epoch, len(questions))[index])], epoch

    def _order(self, stream: int, epoch: int, count: int) -> np.ndarray:
        """The seed has 32 bits: above them stands what is permuted, a set or (the last) the rounds."""
        return _permutation(self._seed + (stream << 32), epoch, count)


@functools.lru_cache(maxsize=32)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """Sorts raw Philox words: NumPy keeps those the same in every version, `Generator.permutation` not."""
    return np.argsort(np.random.Philox(key=[seed, epoch]).random_raw(count), kind="stable")


def from_flashrag(record: dict, stem: str, place: str) -> Question:
    """Returns a FlashRAG record as a question; see `load_questions`. `stem` stands in for its dataset."""
    id_ = id_field(record, place)
    split = _SPLIT.match(id_)
    return Question(
        dataset=_dataset(record, place) or stem,
        split=split[1] if split else "",
        id=id_,
        text=text_field(record, "question", place).strip(),
        answers=_answers(record, place),
    )


def _dataset(record: dict, place: str) -> str:
    metadata = record.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise Refusal(f'{place}: field "metadata" is {metadata!r:.80}, expected an object.')
    return text_field(metadata, "dataset", place) if "dataset" in metadata else ""


def _answers(record: dict, place: str) -> tuple[str, ...]:
    joined = record.get("golden_answers")
    if not isinstance(joined, list) or not joined or not all(isinstance(a, str) for a in joined):
        raise Refusal(
            f'{place}: field "golden_answers" is {joined!r:.80}, expected a non-empty list of strings. '
            f"The record's fields are {sorted(record)}."
        )
    answers = [answer.strip() for text in joined for answer in text.split(SEPARATOR)]
    if not all(answers):
        raise Refusal(
            f'{place}: field "golden_answers" holds an empty answer, which an empty prediction equals.'
        )
    return tuple(dict.fromkeys(answers))


def key_of(question: Question) -> tuple[str, str, str]:
    """Returns what tells a question from all others: (dataset, split, id)."""
    return question.dataset, question.split, question.id


def _names(source: str, found: Sequence[Question]) -> list[tuple[str, ...]]:
    """Returns the keys of a file's questions; the (dataset, split) that those of a prepared set share."""
    if _PREPARED.fullmatch(source):
        return [key_of(found[0])[:2]]
    return [key_of(question) for question in found]


def _digest(question: Question) -> str:
    return hashlib.sha256(json.dumps(key_of(question)).encode()).hexdigest()
