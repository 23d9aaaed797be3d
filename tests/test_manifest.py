"""The fixed questions of an evaluation: named by a file, checked when they are loaded."""

import dataclasses
import hashlib
import json

import pytest

from mopd_jax.data.manifest import pick, write_manifest
from mopd_jax.data.questions import fingerprint
from mopd_jax.refusal import Refusal
from mopd_jax.team.episode import Question

QUESTIONS = [
    Question(dataset, "test", f"test_{i}", f"{dataset} {i}?", ("a", str(i)))
    for dataset in ("nq", "popqa")
    for i in range(3)
]
FIXED = [QUESTIONS[4], QUESTIONS[0], QUESTIONS[2]]


def test_a_manifest_holds_the_hash_that_results_carry_and_that_of_each_question(tmp_path):
    path = tmp_path / "manifest.jsonl"
    assert write_manifest(FIXED, path) == fingerprint(FIXED)
    head, *lines = map(json.loads, path.read_text().splitlines())
    assert head == {"questions": 3, "fingerprint": fingerprint(FIXED)}
    text = hashlib.sha256(b"popqa 1?").hexdigest()
    assert lines[0] == {"dataset": "popqa", "split": "test", "id": "test_1", "sha256": text}


def test_its_questions_are_found_wherever_they_stand(tmp_path):
    write_manifest(FIXED, tmp_path / "m")
    assert pick(QUESTIONS, tmp_path / "m") == pick(QUESTIONS[::-1], tmp_path / "m") == FIXED


@pytest.mark.parametrize(
    "change, reason",
    [
        (
            {"id": "test_9"},
            r"m, line 3: \('nq', 'test', 'test_0'\) is not among the 6 questions of data.test",
        ),
        ({"text": "nq 0??"}, r"m, line 3: \('nq', 'test', 'test_0'\) is 'nq 0\?\?' in data.test"),
        ({"answers": ("b",)}, "m: the questions it names have the fingerprint .* answers"),
    ],
)
def test_a_missing_or_changed_question_is_refused(tmp_path, change, reason):
    write_manifest(FIXED, tmp_path / "m")
    changed = [dataclasses.replace(QUESTIONS[0], **change), *QUESTIONS[1:]]
    with pytest.raises(Refusal, match=reason):
        pick(changed, tmp_path / "m")


@pytest.mark.parametrize(
    "edit, reason",
    [
        (lambda lines: [], r"m: found {} and 0 lines below it, expected a manifest"),
        (lambda lines: lines[1:], r'm, line 1: found {"dataset": "popqa".* and 2 lines below it'),
        (lambda lines: lines[:-1], r'm, line 1: found {"questions": 3.* and 2 lines below it'),
        (lambda lines: [*lines[:-1], '{"id": 1}'], r"m, line 4: found the fields \['id'\], expected"),
        (lambda lines: [lines[0], lines[2], lines[1], lines[3]], "m: the questions .* their order"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path, edit, reason):
    path = tmp_path / "m"
    write_manifest(FIXED, path)
    path.write_text("\n".join(edit(path.read_text().splitlines())))
    with pytest.raises(Refusal, match=reason):
        pick(QUESTIONS, path)
