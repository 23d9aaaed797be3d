"""Questions from FlashRAG files, and the stateless order in which training draws them."""

import functools
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.jsonl import id_field, read_jsonl, text_field
from mopd_jax.team.episode import Question

SEPARATOR = "|||"
"""Some published NQ-open files join several gold answers into one string with it."""

_SPLIT = re.compile(r"(train|dev|test)_")


def load_questions(path: str) -> list[Question]:
    """Returns the questions of a FlashRAG JSONL file: `{"id", "question", "golden_answers", "metadata"?}`.

    `dataset` is `metadata.dataset`, or the file's stem; `split` is the id's prefix `train_`, `dev_` or
    `test_`, or "" [D]. Questions and answers are kept as published (doubled quotes too), except that
    white space around them is dropped and "|||"-joined answers are taken apart.

    Args:
      path: the file; may be a gs:// path.

    Raises:
      Refusal: a line is no JSON object, a question or its answers are missing or empty, or an id
        comes twice in its dataset and split; the message names file, line and reason.
    """
    questions, first_seen = [], {}
    for place, record in read_jsonl(path):
        question = _question(record, pathlib.PurePath(path).stem, place)
        if _key(question) in first_seen:
            raise Refusal(f"{place}: {_key(question)} was already used in {first_seen[_key(question)]}.")
        first_seen[_key(question)] = place
        questions.append(question)
    if not questions:
        raise Refusal(f'{path}: found no question, expected lines of {{"id", "question", "golden_answers"}}.')
    return questions


def load_sets(paths: Sequence[str]) -> list[Question]:
    """Returns the questions of several files one after the other.

    Raises:
      Refusal: as `load_questions`, or two files hold the same (dataset, split, id): its rollouts
        would fall into one group.
    """
    questions, first_seen = [], {}
    for path in paths:
        for question in load_questions(path):
            if _key(question) in first_seen:
                raise Refusal(
                    f"{path}: {_key(question)} is also in {first_seen[_key(question)]}. "
                    "Leave out one of the files, or the question in one of them."
                )
            first_seen[_key(question)] = path
            questions.append(question)
    return questions


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


class QuestionSource:
    """Endless draws of training questions, a pure function of seed and position.

    Draw number d of the run is question number d mod n of epoch d // n; each epoch has its own
    permutation of all n questions.
    """

    def __init__(self, questions: Sequence[Question], seed: int):
        """Takes questions with distinct (dataset, split, id), as `load_sets` returns them.

        Raises:
          Refusal: there are no questions.
        """
        if not questions:
            raise Refusal("Found no training questions: name at least one file in data.train.")
        self._questions = tuple(questions)
        self._seed = seed

    def batch(self, step: int, count: int) -> list[tuple[Question, int]]:
        """Returns the `count` draws of a step as (question, epoch).

        The epoch tells two draws of one question apart, in one batch and between batches. Any step
        can be asked for at any time; all steps of a run ask for the same `count`.
        """
        size = len(self._questions)
        draws = (divmod(number, size) for number in range(step * count, (step + 1) * count))
        return [(self._questions[_permutation(self._seed, epoch, size)[i]], epoch) for epoch, i in draws]


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """Sorts raw Philox words: NumPy keeps those the same in every version, `Generator.permutation` not."""
    return np.argsort(np.random.Philox(key=[seed, epoch]).random_raw(count), kind="stable")


def _question(record: dict, stem: str, place: str) -> Question:
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


def _key(question: Question) -> tuple[str, str, str]:
    return question.dataset, question.split, question.id


def _digest(question: Question) -> str:
    return hashlib.sha256(json.dumps(_key(question)).encode()).hexdigest()
