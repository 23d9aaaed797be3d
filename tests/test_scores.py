"""Metrics against the protocol's worked examples, the bootstrap against scipy and against plain loops."""

import dataclasses

import numpy as np
import pytest
from scipy.stats import bootstrap

from mopd_jax.refusal import Refusal
from mopd_jax.run import scores
from mopd_jax.run.results import Result
from mopd_jax.run.scores import Interval, resample, summarise
from tests.results import CONDITIONS, make_record, make_result


def test_the_worked_example_of_the_protocol():
    summary = summarise(make_result({"nq": [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]}))
    found = [summary["nq"][metric] for metric in ("avg", "pass", "all")]
    np.testing.assert_allclose(found, [0.5, 2 / 3, 1 / 3])
    assert summary[scores.MACRO] == summary["nq"]


def test_datasets_count_the_same_in_the_macro_mean_whatever_their_size():
    summary = summarise(make_result({"nq": [[1, 1]] * 8, "bamboogle": [[0, 1], [0, 0]]}))
    assert summary["nq"]["avg"] == 1.0
    assert summary["bamboogle"]["avg"] == 0.25
    assert summary[scores.MACRO]["avg"] == 0.625
    assert summary[scores.MACRO]["pass"] == 0.75


def test_costs_are_per_workflow_and_endings_per_conversation():
    records = (
        make_record(attempt=0, searches=0, input_tokens=50, rows={"leader": {"malformed": 1}}),
        make_record(attempt=1, searches=5, input_tokens=150, recall=None, em=1.0,
                    rows={"leader": {"finished": 1}, "searcher": {"truncated: length": 1, "finished": 3}}),
    )  # fmt: skip
    summary = summarise(Result("s", 0, CONDITIONS, records))["nq"]
    assert (summary["searches"], summary["no_search"], summary["input_tokens"]) == (2.5, 0.5, 100.0)
    assert (summary["malformed leader"], summary["truncated leader"]) == (0.5, 0.0)
    assert (summary["malformed searcher"], summary["truncated searcher"]) == (0.0, 0.25)


def test_recall_leaves_out_questions_that_cannot_be_asked():
    records = (
        make_record(id="0", recall=None),
        make_record(id="1", recall=1.0),
        make_record("yes_no", recall=None),
    )
    summary = summarise(Result("s", 0, CONDITIONS, records))
    assert summary["nq"]["recall"] == 1.0
    assert np.isnan(summary["yes_no"]["recall"])
    assert summary[scores.MACRO]["recall"] == 1.0


def test_a_missing_or_doubled_attempt_is_refused():
    whole = make_result({"nq": [[1, 0], [0, 1]]})
    for records in (whole.records[:-1], (*whole.records, whole.records[0])):
        with pytest.raises(Refusal, match=r"question \('nq', 'test', '\d'\) has the attempts .* expected"):
            summarise(dataclasses.replace(whole, records=records))
    with pytest.raises(Refusal, match="no record"):
        summarise(dataclasses.replace(whole, records=()))


def test_a_system_is_the_mean_of_its_runs():
    runs = [make_result({"nq": [[1, 0]], "popqa": [[0, 0]]}, seed=0),
            make_result({"nq": [[1, 1]], "popqa": [[0, 1]]}, seed=1)]  # fmt: skip
    summary = scores.summarise_runs(runs)
    assert [summary[d]["avg"] for d in ("nq", "popqa", "macro")] == [0.75, 0.25, 0.5]
    assert [summary[d]["pass"] for d in ("nq", "popqa", "macro")] == [1.0, 0.5, 0.75]


# ---------------------------------------------------------------- intervals


def drawn(rate: float, seed: int, questions: int = 60) -> list[list[float]]:
    """Four attempts at each question, right with a probability of `rate`."""
    return (np.random.default_rng(seed).random((questions, 4)) < rate).astype(float).tolist()


def difference(ours: Result, theirs: Result, **arguments) -> Interval:
    return resample([ours, theirs], **arguments).difference(ours.system, theirs.system)


def scipy_interval(data: tuple[np.ndarray, ...], statistic, draws: int, seed: int) -> tuple[float, float]:
    """The percentile interval of scipy, which draws its resamples of one dataset after the other."""
    rng = np.random.default_rng(seed)
    settings = {"n_resamples": draws, "batch": draws, "method": "percentile", "rng": rng}
    return tuple(bootstrap(data, statistic, vectorized=True, **settings).confidence_interval)


def mean_of_means(*data: np.ndarray, axis: int) -> np.ndarray:
    return np.mean([values.mean(axis=axis) for values in data], axis=0)


@pytest.mark.parametrize("metric, reduce", [("avg", np.mean), ("pass", np.max), ("all", np.min)])
def test_the_bootstrap_agrees_with_scipy_on_the_same_resamples(metric, reduce):
    em = {
        system: {"nq": drawn(rate, seed), "popqa": drawn(rate, seed + 1, 35)}
        for seed, (system, rate) in enumerate({"ours": 0.5, "theirs": 0.3}.items())
    }
    data = tuple(
        # Questions are sorted by their id, a text.
        (reduce(em["ours"][d], axis=1) - reduce(em["theirs"][d], axis=1))[np.argsort([*map(str, range(n))])]
        for d, n in (("nq", 60), ("popqa", 35))
    )
    found = difference(*(make_result(em[s], s) for s in em), metric=metric, draws=3000, seed=7)
    expected = scipy_interval(data, mean_of_means, 3000, 7)
    np.testing.assert_allclose((found.low, found.high), expected, atol=1e-12)
    assert found.difference == pytest.approx(np.mean([d.mean() for d in data]))


def test_the_level_of_runs_agrees_with_scipy_where_there_is_one_question():
    em = {"ours": [0.75, 0.5, 0.25, 1.0, 0.25], "theirs": [0.5, 0.25, 0.5, 0.25, 0.0]}
    runs = [
        make_result({"nq": [[1.0] * int(4 * x) + [0.0] * int(4 - 4 * x)]}, system, seed)
        for system, values in em.items()
        for seed, x in enumerate(values)
    ]
    found = resample(runs, draws=3000, seed=7).difference("ours", "theirs")
    gains = np.subtract(em["ours"], em["theirs"])
    expected = scipy_interval((gains,), np.mean, 3000, 7)
    np.testing.assert_allclose((found.low, found.high), expected, atol=1e-12)
    assert found.difference == pytest.approx(gains.mean()) and found.high - found.low > 0.3


def test_both_levels_agree_with_plain_loops():
    draws, sizes = 50, {"nq": 7, "popqa": 4}
    runs = [
        make_result(
            {d: drawn(0.5, 10 * seed + n, size) for n, (d, size) in enumerate(sizes.items())}, s, seed
        )
        for s, seeds in {"base": (0,), "ours": (0, 1, 2), "theirs": (0, 1, 2)}.items()
        for seed in seeds
    ]
    rng = np.random.default_rng(3)
    questions = {dataset: rng.integers(0, size, (draws, size)) for dataset, size in sizes.items()}
    alone, together = rng.integers(0, 1, (draws, 1)), rng.integers(0, 3, (draws, 3))
    chosen = {"base": alone, "ours": together, "theirs": together}

    def macro(system: str, draw: int) -> float:
        own = [run for run in runs if run.system == system]
        total = 0.0
        for run in (own[i] for i in chosen[system][draw]):
            for dataset, size in sizes.items():
                em = [np.mean([r.em for r in run.records if (r.dataset, r.id) == (dataset, str(q))])
                      for q in range(size)]  # fmt: skip
                total += np.mean([em[q] for q in questions[dataset][draw]])
        return total / len(chosen[system][draw]) / len(sizes)

    found = resample(runs, draws=draws, seed=3).resampled_R
    for system in chosen:
        expected = [macro(system, draw) for draw in range(draws)]
        np.testing.assert_allclose(found[system], expected, rtol=1e-12)


def test_training_runs_of_a_seed_are_drawn_together_and_others_apart():
    level = {0: [[1, 1, 0, 0]], 1: [[1, 1, 1, 1]]}
    worse = {0: [[1, 0, 0, 0]], 1: [[1, 1, 1, 0]]}
    ours = [make_result({"nq": em}, "ours", seed) for seed, em in level.items()]
    theirs = [make_result({"nq": em}, "theirs", seed) for seed, em in worse.items()]
    # Each seed gains 1/4, so nothing is left to resample: the seed's luck is common to both.
    together = resample([*ours, *theirs]).difference("ours", "theirs")
    assert together == Interval(0.25, pytest.approx(0.25), pytest.approx(0.25))
    # Other seeds have nothing in common: mean 0.5, 0.75 or 1 against 0.25, 0.5 or 0.75.
    strangers = [dataclasses.replace(run, seed=run.seed + 5) for run in theirs]
    apart = resample([*ours, *strangers]).difference("ours", "theirs")
    assert apart == Interval(0.25, pytest.approx(-0.25), pytest.approx(0.75))


def test_resamples_do_not_depend_on_how_many_are_held_at_once():
    values = np.random.default_rng(0).random((2, 50_000))
    in_blocks = scores._resampled_means(values, 90, np.random.default_rng(3))
    chosen = np.random.default_rng(3).integers(0, 50_000, (90, 50_000))
    np.testing.assert_allclose(in_blocks, values[:, chosen].mean(axis=2), rtol=1e-12)


def test_the_interval_repeats_with_its_seed():
    ours, theirs = make_result({"nq": drawn(0.5, 1)}), make_result({"nq": drawn(0.3, 2)}, "theirs")
    assert difference(ours, theirs, seed=5) == difference(ours, theirs, seed=5)
    assert difference(ours, theirs, seed=5) != difference(ours, theirs, seed=6)


def test_the_interval_is_paired_inside_datasets():
    # The same gain on every question of a dataset leaves nothing to resample, however much they differ.
    a = make_result({"nq": [[1, 1], [1, 0]], "popqa": [[1, 0], [0, 0], [1, 0]]}, "a")
    b = make_result({"nq": [[1, 0], [0, 0]], "popqa": [[1, 0], [0, 0], [0, 1]]}, "b")
    assert difference(a, b) == Interval(*(pytest.approx(0.25),) * 3)


def test_datasets_weigh_the_same_in_an_interval():
    varying, steady = {"nq": [[1.0], [0.0]] * 200}, {"popqa": [[0.0]]}
    zeros = {"nq": [[0.0]] * 400}
    alone = difference(make_result(varying, "a"), make_result(zeros, "b"))
    both = difference(make_result(varying | steady, "a"), make_result(zeros | steady, "b"))
    assert both.difference == alone.difference / 2 == 0.25
    assert both.high - both.low == pytest.approx((alone.high - alone.low) / 2, rel=0.01)
    # 95 % of the normal approximation: 2 × 1.96 × 0.5 / √400.
    assert alone.high - alone.low == pytest.approx(0.098, rel=0.05)


def test_questions_that_cannot_be_asked_are_left_out_of_a_difference():
    def run(system: str, *recalls: float | None) -> Result:
        records = [make_record(id=str(q), recall=r) for q, r in enumerate(recalls)]
        return Result(system, 0, CONDITIONS, tuple(records))

    assert difference(run("a", 1.0, None), run("b", 0.0, None), metric="recall") == Interval(1.0, 1.0, 1.0)
    nothing = difference(run("a", None), run("b", None), metric="recall")
    assert np.isnan([nothing.difference, nothing.low, nothing.high]).all()
