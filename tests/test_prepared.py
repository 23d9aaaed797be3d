"""Question sets as array_record files: written once, read at random, told apart by their bytes."""

import json

import pytest

from mopd_jax.data.prepared import PreparedSet, write_set
from mopd_jax.data.questions import (
    QuestionSource,
    files_of,
    fingerprint,
    load_questions,
    open_sets,
)
from mopd_jax.refusal import Refusal
from mopd_jax.team.episode import Question


def make(split: str, count: int) -> list[Question]:
    """Real trouble inside: quotes, a line separator, an emoji, an answer that normalises to nothing."""
    return [
        Question("nq", split, f"{split}_{i}", f'""Who"" is\u2028number {i}?', (f"🇮🇷 {i}", "*"))
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_set(
        "nq", {"train": make("train", 7), "test": make("test", 2)}, tmp_path_factory.mktemp("data")
    )


def test_a_set_is_read_as_it_was_written_from_any_position(folder):
    train = load_questions(f"{folder}:train")
    assert (len(train), train[6], train[0]) == (7, make("train", 7)[6], make("train", 7)[0])
    assert list(train) == make("train", 7)
    assert list(map(list, open_sets([f"{folder}:test", f"{folder}:train"]))) == [
        make("test", 2),
        make("train", 7),
    ]
    assert fingerprint(train) == fingerprint(make("train", 7))
    with pytest.raises(IndexError):
        train[7]


def test_training_draws_from_a_set_what_it_draws_from_the_same_list(folder):
    prepared = QuestionSource(open_sets([f"{folder}:train"]), seed=5)
    listed = QuestionSource([make("train", 7)], seed=5)
    assert [prepared.batch(step, 4) for step in (3, 0)] == [listed.batch(step, 4) for step in (3, 0)]


def test_a_split_has_files_of_its_own_with_the_same_bytes_wherever_it_is_written(folder, tmp_path):
    def contents(source: str) -> list[bytes]:
        return [file.read_bytes() for file in files_of(source)]

    again = write_set("nq", {"train": make("train", 7), "test": make("test", 2)[::-1]}, tmp_path)
    assert len(contents(f"{folder}:train")) == 1
    assert contents(f"{again}:train") == contents(f"{folder}:train")
    assert contents(f"{again}:test") != contents(f"{folder}:test")
    assert files_of(f"{folder}:dev") == files_of(f"{tmp_path}/nothing:train") == []


def test_what_is_no_prepared_set_is_refused(folder, tmp_path):
    with pytest.raises(Refusal, match=r"nothing:dev: found no 1.0.0/dataset_info.json .*prepare_data"):
        load_questions(f"{tmp_path}/nothing:dev")
    with pytest.raises(Refusal, match=r"nq:dev: the set has the splits \['test', 'train'\]"):
        PreparedSet(str(folder), "dev")


def test_a_set_and_a_file_of_the_same_dataset_and_split_do_not_mix(folder, tmp_path):
    record = {"id": "train_99", "question": "q", "golden_answers": ["a"], "metadata": {"dataset": "nq"}}
    file = tmp_path / "more.jsonl"
    file.write_text(json.dumps(record) + "\n")
    for sources in ([f"{folder}:train", str(file)], [str(file), f"{folder}:train"]):
        with pytest.raises(
            ValueError, match=r"more.jsonl: \('nq', 'train', 'train_99'\) is also in .*nq:train"
        ):
            open_sets(sources)
    with pytest.raises(Refusal, match=r"nq:train: \('nq', 'train'\) is also in"):
        open_sets([f"{folder}:train"] * 2)
    assert [len(found) for found in open_sets([f"{folder}:test", str(file)])] == [2, 1]
