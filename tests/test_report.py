"""The tables that a report prints."""

import dataclasses

import numpy as np

from mopd_jax.run import report
from mopd_jax.run.scores import Interval, resample
from tests.results import CONDITIONS, make_result


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_report_prints_systems_datasets_and_differences():
    base = make_result({"nq": [[0, 0], [0, 1]], "popqa": [[0, 0]]}, "h_mas", searches=0, recall=None)
    ours = make_result({"nq": [[1, 0], [1, 1]], "popqa": [[1, 1]]}, "stage2", input_tokens=6786, aborted=True)
    systems, datasets, differences, note = report.format_report([base, ours], draws=200).split("\n\n")
    assert [cells(line) for line in systems.splitlines()] == [
        ["system", "avg@2, %", "pass@2, %", "all@2, %", "f1, %", "containment, %", "recall, %", "searches",
         "no search, %", "calls", "input tokens", "output tokens", "aborted"],
        ["-" * 6, *["-" * (n - 1) + ":" for n in (8, 9, 8, 5, 14, 9, 8, 12, 5, 12, 13, 7)]],
        ["h_mas", "12.50", "25.00", "0.00", "12.50", "12.50", "–", "0.00", "100.00", "4.00", "100.00",
         "10.00", "0"],
        ["stage2", "87.50", "100.00", "75.00", "87.50", "87.50", "87.50", "2.00", "0.00", "4.00", "6,786.00",
         "10.00", "6"],
    ]  # fmt: skip
    assert [cells(line) for line in datasets.splitlines()[2:]] == [
        ["h_mas", "25.00", "0.00", "12.50"],
        ["stage2", "75.00", "100.00", "87.50"],
    ]
    # nq's two questions gain 1/2 each, popqa's one question 1: nothing to resample.
    assert cells(differences.splitlines()[2]) == ["stage2 − h_mas", "+75.00", "[+75.00, +75.00]"]
    assert len({len(line) for line in systems.splitlines()}) == 1
    assert note == (
        "Intervals are over questions with their attempts, of one training run per system; they are not "
        "corrected for the number of pairs."
    )


def test_runs_of_a_system_are_one_line_and_stand_apart_by_seed():
    base = make_result({"nq": [[0, 1]]}, "base", 4)
    runs = [make_result({"nq": [em]}, "ours", seed) for seed, em in ((4, [1, 1]), (2, [0, 0]), (7, [1, 0]))]
    systems, datasets, seeds, differences, note = report.format_report([base, *runs], draws=50).split("\n\n")
    assert [cells(line)[:4] for line in systems.splitlines()[2:]] == [
        ["base", "50.00", "100.00", "0.00"],
        ["ours", "50.00", "66.67", "33.33"],
    ]
    assert cells(datasets.splitlines()[3]) == ["ours", "50.00", "50.00"]
    assert [cells(line) for line in seeds.splitlines()] == [
        ["avg@2, %, by seed", "2", "4", "7"],
        ["-" * 17, "---:", "-----:", "----:"],
        ["base", "–", "50.00", "–"],
        ["ours", "0.00", "100.00", "50.00"],
    ]
    assert cells(differences.splitlines()[2])[:2] == ["ours − base", "+0.00"]
    assert " and over 1–3 training runs per system (over a handful they come out too narrow);" in note


def test_results_of_other_conditions_stand_in_a_table_of_their_own():
    ours, theirs = make_result({"nq": [[1]]}, "ours"), make_result({"nq": [[0]]}, "theirs")
    conditions = dataclasses.replace(CONDITIONS, limits={"k": 3, "session_searches": 1})
    capped = dataclasses.replace(make_result({"nq": [[0]]}, "capped"), conditions=conditions)
    first, second = report.format_report([ours, capped, theirs], draws=20).split("\n\nWith ")
    assert first.startswith("With session_searches = 4:\n\n| system")
    assert "| theirs − ours" in first and "capped" not in first
    assert second.startswith("session_searches = 1:\n\n| system")
    assert "| capped" in second and "ours" not in second


def test_tables_of_a_cost_show_it_as_a_number():
    results = [make_result({"nq": [[1]]}, name, searches=n) for name, n in (("base", 1), ("ours", 1500))]
    tables = report.format_tables(results, resample(results, "searches", draws=20), "searches")
    _, datasets, differences, _ = tables.split("\n\n")
    assert [cells(line) for line in datasets.splitlines()[2:]] == [
        ["base", "1.00", "1.00"],
        ["ours", "1,500.00", "1,500.00"],
    ]
    assert cells(differences.splitlines()[0]) == [
        "difference in macro searches",
        "difference",
        "95 % interval",
    ]
    assert cells(differences.splitlines()[2]) == ["ours − base", "+1,499.00", "[+1,499.00, +1,499.00]"]


def test_a_difference_that_rounds_to_nothing_has_a_plus():
    nothing = Interval(-1e-17, -4e-5, 0.0)
    assert report.format_interval(nothing, "avg") == ("+0.00", "[+0.00, +0.00]")
    assert report.format_interval(Interval(0.1, -0.125, 1), "avg") == ("+10.00", "[-12.50, +100.00]")
    assert report.format_value(np.nan, "avg") == "–"
