"""Metrics and intervals against worked examples and scipy, the result file, refused comparisons."""

import dataclasses

import numpy as np
import pytest

from mopd_jax.run import report
from mopd_jax.run.report import Conditions, Record, Result

CONDITIONS = Conditions("f00d", "bm25:7df1", {"k": 3, "session_searches": 4})


def record(dataset="nq", id="0", attempt=0, em=0.0, **fields) -> Record:
    defaults = {
        "split": "test", "answer": "x", "f1": em, "containment": em, "recall": em, "searches": 2,
        "calls": 4, "input_tokens": 100, "output_tokens": 10, "aborted": False,
        "rows": {"searcher": {"finished": 1}},
    }  # fmt: skip
    return Record(dataset=dataset, id=id, attempt=attempt, em=em, **defaults | fields)


def result(scores: dict[str, list[list[float]]], system="ours", **fields) -> Result:
    """A result from dataset → exact match per question and attempt."""
    records = [
        record(dataset, str(q), a, em, **fields)
        for dataset, questions in scores.items()
        for q, attempts in enumerate(questions)
        for a, em in enumerate(attempts)
    ]
    return Result(system, CONDITIONS, tuple(records))


def test_the_worked_example_of_the_protocol():
    summary = report.summarise(result({"nq": [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]}))
    found = [summary["nq"][metric] for metric in ("avg", "pass", "all")]
    np.testing.assert_allclose(found, [0.5, 2 / 3, 1 / 3])
    assert summary[report.MACRO] == summary["nq"]


def test_datasets_count_the_same_in_the_macro_mean_whatever_their_size():
    summary = report.summarise(result({"nq": [[1, 1]] * 8, "bamboogle": [[0, 1], [0, 0]]}))
    assert summary["nq"]["avg"] == 1.0
    assert summary["bamboogle"]["avg"] == 0.25
    assert summary[report.MACRO]["avg"] == 0.625
    assert summary[report.MACRO]["pass"] == 0.75


def test_costs_are_per_workflow_and_endings_per_conversation():
    records = (
        record(attempt=0, searches=0, input_tokens=50, rows={"leader": {"malformed": 1}}),
        record(attempt=1, searches=5, input_tokens=150, recall=None, em=1.0,
               rows={"leader": {"finished": 1}, "searcher": {"truncated: length": 1, "finished": 3}}),
    )  # fmt: skip
    summary = report.summarise(Result("s", CONDITIONS, records))["nq"]
    assert (summary["searches"], summary["no_search"], summary["input_tokens"]) == (2.5, 0.5, 100.0)
    assert (summary["malformed leader"], summary["truncated leader"]) == (0.5, 0.0)
    assert (summary["malformed searcher"], summary["truncated searcher"]) == (0.0, 0.25)


def test_recall_leaves_out_questions_that_cannot_be_asked():
    records = (record(id="0", recall=None), record(id="1", recall=1.0), record("yes_no", recall=None))
    summary = report.summarise(Result("s", CONDITIONS, records))
    assert summary["nq"]["recall"] == 1.0
    assert np.isnan(summary["yes_no"]["recall"])
    assert summary[report.MACRO]["recall"] == 1.0


def test_a_missing_or_doubled_attempt_is_refused():
    whole = result({"nq": [[1, 0], [0, 1]]})
    for records in (whole.records[:-1], (*whole.records, whole.records[0])):
        with pytest.raises(ValueError, match=r"question \('nq', 'test', '\d'\) has the attempts .* expected"):
            report.summarise(dataclasses.replace(whole, records=records))
    with pytest.raises(ValueError, match="no record"):
        report.summarise(dataclasses.replace(whole, records=()))


@pytest.fixture(scope="module")
def two_systems():
    rng = np.random.default_rng(1)
    ours = result({"nq": (rng.random((60, 4)) < 0.5).astype(float).tolist()}, "ours")
    theirs = result({"nq": (rng.random((60, 4)) < 0.3).astype(float).tolist()}, "theirs")
    return ours, theirs


@pytest.mark.parametrize("metric, reduce", [("avg", np.mean), ("pass", np.max), ("all", np.min)])
def test_the_bootstrap_agrees_with_scipy_on_the_same_resamples(two_systems, metric, reduce):
    from scipy.stats import bootstrap

    ours, theirs = two_systems
    em = [np.array([r.em for r in s.records]).reshape(60, 4) for s in two_systems]
    order = np.argsort([str(i) for i in range(60)])  # questions are sorted by their key
    difference = (reduce(em[0], axis=1) - reduce(em[1], axis=1))[order]
    expected = bootstrap(
        (difference,), np.mean, n_resamples=3000, batch=3000, method="percentile",
        rng=np.random.default_rng(7),
    ).confidence_interval  # fmt: skip
    found = report.paired_difference(ours, theirs, metric, draws=3000, seed=7)
    np.testing.assert_allclose(
        [found.difference, found.low, found.high],
        [difference.mean(), expected.low, expected.high],
        atol=1e-12,
    )


def test_resamples_do_not_depend_on_how_many_are_held_at_once():
    values = np.random.default_rng(0).random(1000)
    whole = report._resampled_means(values, 500, np.random.default_rng(3))
    in_blocks = report._resampled_means(np.tile(values, 50), 90, np.random.default_rng(3))
    expected = np.tile(values, 50)[np.random.default_rng(3).integers(0, 50_000, (90, 50_000))].mean(1)
    np.testing.assert_allclose(in_blocks, expected, rtol=1e-12)
    np.testing.assert_allclose(
        whole, values[np.random.default_rng(3).integers(0, 1000, (500, 1000))].mean(1), rtol=1e-12
    )


def test_the_interval_is_paired_inside_datasets_and_repeats_with_its_seed(two_systems):
    ours, theirs = two_systems
    assert report.paired_difference(ours, theirs, seed=5) == report.paired_difference(ours, theirs, seed=5)
    assert report.paired_difference(ours, theirs, seed=5) != report.paired_difference(ours, theirs, seed=6)
    # The same gain on every question of a dataset leaves nothing to resample, however much they differ.
    a = result({"nq": [[1, 1], [1, 0]], "popqa": [[1, 0], [0, 0], [1, 0]]}, "a")
    b = result({"nq": [[1, 0], [0, 0]], "popqa": [[1, 0], [0, 0], [0, 1]]}, "b")
    assert report.paired_difference(a, b) == report.Interval(0.25, 0.25, 0.25)
    # Datasets weigh the same: half the interval of the dataset that varies.
    varying = {"nq": [[1.0], [0.0]] * 200}
    alone = report.paired_difference(result(varying, "a"), result({"nq": [[0.0]] * 400}, "b"))
    steady = {"popqa": [[0.0]]}
    both = report.paired_difference(
        result(varying | steady, "a"), result({"nq": [[0.0]] * 400} | steady, "b")
    )
    assert both.difference == alone.difference / 2 == 0.25
    assert both.high - both.low == pytest.approx((alone.high - alone.low) / 2, rel=0.01)
    # 95 % of the normal approximation: 2 × 1.96 × 0.5 / √400.
    assert alone.high - alone.low == pytest.approx(0.098, rel=0.05)


def test_a_result_file_is_read_back(tmp_path):
    written = result({"nq": [[1.0, 0.0]], "popqa": [[0.0, 1.0]]}, recall=None, answer="é\u2028")
    path = str(tmp_path / "result.jsonl")
    report.write_result(written, path)
    assert report.read_result(path) == written


@pytest.mark.parametrize(
    "name, other",
    [("questions", "beef"), ("retriever", "http://x"), ("limits", {"k": 5, "session_searches": 4})],
)
def test_results_of_other_conditions_do_not_stand_in_one_table(name, other):
    ours = result({"nq": [[1]]}, "ours")
    theirs = dataclasses.replace(
        result({"nq": [[1]]}, "theirs"), conditions=dataclasses.replace(CONDITIONS, **{name: other})
    )
    with pytest.raises(ValueError, match=f"ours and theirs differ in their {name}"):
        report.format_report([ours, theirs])
    with pytest.raises(ValueError, match=name):
        report.paired_difference(ours, theirs)


def test_other_attempts_and_equal_names_are_refused():
    ours = result({"nq": [[1, 0], [0, 0]]}, "ours")
    with pytest.raises(ValueError, match=r"2 are in one of them only, \('nq', 'test', '0', 1\) first"):
        report.format_report([ours, result({"nq": [[1], [0]]}, "theirs")])
    with pytest.raises(ValueError, match="a name of its own"):
        report.format_report([ours, ours])


def test_the_report_prints_systems_datasets_and_differences():
    base = result({"nq": [[0, 0], [0, 1]], "popqa": [[0, 0]]}, "h_mas", searches=0, recall=None)
    ours = result({"nq": [[1, 0], [1, 1]], "popqa": [[1, 1]]}, "stage2", input_tokens=6786, aborted=True)
    systems, datasets, differences = report.format_report([base, ours], draws=200).split("\n\n")
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


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
