"""The file of an evaluation, and which results may be compared."""

import dataclasses
import json

import pytest

from mopd_jax.refusal import Refusal
from mopd_jax.run import results
from mopd_jax.run.results import read_result, write_result
from tests.results import CONDITIONS, make_result


def test_a_result_file_is_read_back(tmp_path):
    written = make_result({"nq": [[1.0, 0.0]], "popqa": [[0.0, 1.0]]}, seed=3, recall=None, answer="é\u2028")
    write_result(written, tmp_path / "results.jsonl")
    assert read_result(tmp_path / "results.jsonl") == written
    head, *records = (tmp_path / "results.jsonl").read_text().splitlines()
    assert json.loads(head) == {"system": "ours", "seed": 3, "conditions": dataclasses.asdict(CONDITIONS)}
    assert len(records) == 4


@pytest.mark.parametrize(
    ("line", "change", "expected"),
    [
        (0, {"seed": None}, r"line 1: found the fields \['conditions', 'records', 'system'\], expected"),
        (0, {"conditions": {"k": 3}}, r"line 1: found the fields \['k'\], expected .* of a Conditions"),
        (1, {"speed": 1}, r"line 2: found the fields .*'speed'.* of a Record\. Evaluate again"),
    ],
)
def test_a_file_with_other_fields_is_refused_with_its_line(tmp_path, line, change, expected):
    path = tmp_path / "results.jsonl"
    write_result(make_result({"nq": [[1.0]]}), path)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    lines[line] = {name: value for name, value in (lines[line] | change).items() if value is not None}
    path.write_text("".join(json.dumps(fields) + "\n" for fields in lines))
    with pytest.raises(Refusal, match=expected):
        read_result(path)


def test_an_empty_or_absent_file_is_refused(tmp_path):
    (tmp_path / "results.jsonl").touch()
    with pytest.raises(Refusal, match=r"results\.jsonl is empty"):
        read_result(tmp_path / "results.jsonl")
    with pytest.raises(Refusal, match=r"Found no file .*absent"):
        read_result(tmp_path / "absent")


def test_runs_of_a_system_are_ordered_by_their_seeds():
    found = [make_result({"nq": [[1]]}, system, seed) for system, seed in (("b", 2), ("a", 0), ("b", 1))]
    assert results.by_system(found) == {"b": [found[2], found[0]], "a": [found[1]]}


@pytest.mark.parametrize(
    ("name", "condition", "other", "shown"),
    [
        ("questions", "questions", "beef", "f00d and beef"),
        ("retriever", "retriever", "http://x", "bm25:7df1 and http://x"),
        ("k", "limits", {"k": 5, "session_searches": 4}, "3 and 5"),
        ("budget", "limits", {"k": 3, "session_searches": 4, "budget": 9}, "None and 9"),
    ],
)
def test_results_of_other_conditions_do_not_stand_in_one_table(name, condition, other, shown):
    ours = make_result({"nq": [[1]]}, "ours")
    conditions = dataclasses.replace(CONDITIONS, **{condition: other})
    theirs = dataclasses.replace(make_result({"nq": [[1]]}, "theirs"), conditions=conditions)
    assert list(results.differing_conditions([ours, ours, theirs])) == [name]
    with pytest.raises(Refusal, match=f"ours and theirs differ in their {name}: {shown}"):
        results.check_same_conditions([ours, theirs])
    results.check_same_conditions([ours, ours])


def test_other_attempts_and_doubled_runs_are_refused():
    ours = make_result({"nq": [[1, 0], [0, 0]]}, "ours")
    with pytest.raises(Refusal, match=r"2 are in one of them only, \('nq', 'test', '0', 1\) first"):
        results.check_paired([ours, make_result({"nq": [[1], [0]]}, "theirs")])
    with pytest.raises(Refusal, match="Found ours with seed 0 2 times, expected each run once"):
        results.check_paired([ours, dataclasses.replace(ours, system="theirs"), ours])
    results.check_paired([ours, dataclasses.replace(ours, seed=1)])


def test_other_questions_under_the_same_ids_are_refused():
    ours = make_result({"nq": [[1]]}, "ours")
    conditions = dataclasses.replace(CONDITIONS, questions="beef")
    with pytest.raises(Refusal, match="ours and theirs were asked other questions or answers"):
        results.check_paired([ours, dataclasses.replace(ours, system="theirs", conditions=conditions)])
