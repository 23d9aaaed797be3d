"""tools/compare on written results: which runs it finds, what it refuses, what it writes."""

import csv
import dataclasses
import json
import pathlib

import pytest
from matplotlib.image import imread

from mopd_jax.refusal import Refusal
from mopd_jax.run.results import Result, write_result
from tests.results import CONDITIONS, make_result
from tools import compare

BASE = make_result({"nq": [[0, 0], [0, 1]], "popqa": [[0, 0]]}, "base", recall=None)
OURS = make_result({"nq": [[1, 0], [1, 1]], "popqa": [[1, 1]]}, "ours")


def write(folder: pathlib.Path, result: Result) -> str:
    folder.mkdir(parents=True)
    write_result(result, folder / "results.jsonl")
    return str(folder)


def test_a_chain_stands_for_its_evaluations_and_a_name_for_one(tmp_path):
    write(tmp_path / "chain" / "b", OURS)
    write(tmp_path / "chain" / "a", BASE)
    (tmp_path / "chain" / "training").mkdir()
    single = write(tmp_path / "single", OURS)
    found = compare.collect([str(tmp_path / "chain"), f"again={single}", single])
    assert found == [BASE, OURS, dataclasses.replace(OURS, system="again"), OURS]


def test_folders_without_or_with_too_many_results_are_refused(tmp_path):
    with pytest.raises(Refusal, match=r"Found no results\.jsonl in .*absent"):
        compare.collect([str(tmp_path / "absent")])
    write(tmp_path / "a", BASE)
    write(tmp_path / "b", OURS)
    with pytest.raises(Refusal, match=r"gives one name to several evaluations: .* of one, a, b\."):
        compare.collect([f"ours={tmp_path}"])


def test_other_limits_are_compared_only_where_that_is_asked_for(tmp_path, capsys):
    conditions = dataclasses.replace(CONDITIONS, limits=CONDITIONS.limits | {"session_searches": 1})
    runs = [
        write(tmp_path / "a", BASE),
        write(tmp_path / "b", dataclasses.replace(OURS, conditions=conditions)),
    ]
    with pytest.raises(Refusal, match="base and ours differ in their session_searches: 4 and 1"):
        compare.main(runs)
    compare.main([*runs, "--mixed"])
    output = capsys.readouterr().out
    assert output.startswith("Not the same for all: session_searches = 4 (base), 1 (ours)\n\n| system")
    assert "| ours − base" in output


def test_other_questions_are_never_compared(tmp_path):
    conditions = dataclasses.replace(CONDITIONS, questions="beef")
    runs = [
        write(tmp_path / "a", BASE),
        write(tmp_path / "b", dataclasses.replace(OURS, conditions=conditions)),
    ]
    with pytest.raises(Refusal, match="base and ours were asked other questions"):
        compare.main([*runs, "--mixed"])


def test_runs_of_one_system_are_one_line(tmp_path, capsys):
    second = dataclasses.replace(BASE, system="ours", seed=1)
    runs = [write(tmp_path / str(n), result) for n, result in enumerate((BASE, OURS, second))]
    compare.main(runs)
    output = capsys.readouterr().out
    assert "avg@2, %, by seed |     0 |     1 |" in output
    (difference,) = [line for line in output.splitlines() if line.startswith("| ours − base")]
    assert difference.split("|")[2].strip() == "+37.50"  # of 75 points and none
    assert "over 1–2 training runs per system" in output


def test_everything_is_written(tmp_path, capsys):
    runs = [write(tmp_path / "a", BASE), write(tmp_path / "b", OURS)]
    out = tmp_path / "out"
    compare.main([*runs, "--metric", "pass", "--out", str(out)])
    assert (out / "compare.md").read_text() == capsys.readouterr().out

    with (out / "metrics.csv").open() as file:
        metrics = {(m["system"], m["dataset"], m["metric"]): m["value"] for m in csv.DictReader(file)}
    assert metrics["ours", "macro", "avg"] == "0.875" and metrics["base", "nq", "pass"] == "0.5"
    assert metrics["base", "macro", "recall"] == "" and metrics["ours", "nq", "malformed searcher"] == "0.0"
    # pass: both questions of nq against one, popqa's one against none.
    expected = {"ours": "ours", "theirs": "base", "metric": "pass", "difference": 0.75}
    with (out / "differences.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert {name: row[name] for name in expected} == {name: str(value) for name, value in expected.items()}
    assert (float(row["low"]), float(row["high"])) == (0.5, 1.0)

    whole = json.loads((out / "compare.json").read_text())
    assert whole["differences"] == [expected | {"low": 0.5, "high": 1.0}]
    assert whole["conditions"][1] == {"system": "ours", "seed": 0} | dataclasses.asdict(CONDITIONS)
    assert len(whole["metrics"]) == len(metrics)
    nothing = {"system": "base", "seed": 0, "dataset": "macro", "metric": "recall", "value": None}
    assert nothing in whole["metrics"]
    assert imread(out / "differences.png").std() > 0.05, "a figure that shows something"


def test_a_single_system_has_no_differences(tmp_path, capsys):
    compare.main([write(tmp_path / "a", OURS), "--out", str(tmp_path / "out")])
    assert "difference" not in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"compare.md", "compare.json", "metrics.csv"}
