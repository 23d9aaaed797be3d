"""The report of a replication, from results and metrics written by hand."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from matplotlib.image import imread

from configs import mini_systems
from mopd_jax.config import Chain, Kind, RunConfig, phases
from mopd_jax.published import PAPER
from mopd_jax.run import replication
from mopd_jax.run.plots import smoothed
from mopd_jax.run.results import Result, write_result
from mopd_jax.run.scores import Interval
from tests.results import CONDITIONS, make_result
from tests.tiny_replication import TinyReplication


def table(text: str) -> list[list[str]]:
    """The cells of a Markdown table's body; what follows an empty line is left out."""
    lines = text.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def run(system: str, seed: int, *em: float, **fields) -> Result:
    """A result with one attempt at each question."""
    return make_result({"miniature": [[value] for value in em]}, system, seed, **fields)


def test_the_papers_figures_stand_beside_ours():
    results = [
        run("c_mas", 0, 0, 0, 1, 0),
        run("stage1_c_mas", 0, 1, 1, 1, 1, searches=0),
        run("extra", 0, 1, 0, 0, 1),
        run("c_mas", 1, 0, 1, 1, 0),
        run("stage1_c_mas", 1, 1, 0, 0, 1, searches=4),
    ]
    text = replication.paper_table(results)
    assert table(text) == [
        ["c_mas", "25.09", "37.50", "25.00 / 50.00", "2.00", "0.00"],
        ["stage1_c_mas", "36.07", "75.00", "100.00 / 50.00", "2.00", "50.00"],
        ["extra", "–", "50.00", "50.00", "2.00", "0.00"],
    ]
    missing = text.rpartition("not here: ")[2].rstrip(".").split(", ")
    assert set(missing) == PAPER.keys() - {"c_mas", "stage1_c_mas"}


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.01, 0.2, "kept"), (-0.2, -0.01, "reversed"), (-0.1, 0.1, "open"), (0.0, 0.1, "open")],
)
def test_an_order_is_kept_where_the_interval_is_clear_of_nothing(low, high, verdict):
    assert replication.order(Interval(0.0, low, high)) == verdict


def test_every_pair_of_the_paper_says_whether_its_order_was_kept():
    results = [
        run("searcher_grpo_h_mas", 0, 1, 1, 1, 1),
        run("c_mas", 0, 0, 0, 0, 0),
        run("stage2_h_mas", 0, 1, 1, 1, 0),
        run("extra", 0, 1, 1, 1, 1),
    ]
    text = replication.order_table(results)
    assert table(text)[1:] == [
        ["stage2_h_mas − searcher_grpo_h_mas", "+20.90", "-25.00", "[-75.00, +0.00]", "open"],
        ["c_mas − searcher_grpo_h_mas", "+7.31", "-100.00", "[-100.00, -100.00]", "reversed"],
    ]
    first = table(text)[0]
    assert (first[:3], first[4]) == (["stage2_h_mas − c_mas", "+13.59", "+75.00"], "kept")
    assert text.endswith("Pairs: 3, 1 kept, 1 reversed, 1 open (the interval holds 0).")


def test_systems_under_other_conditions_are_no_pair():
    conditions = dataclasses.replace(CONDITIONS, retriever="another")
    other = dataclasses.replace(run("stage1_c_mas", 0, 1, 1), conditions=conditions)
    text = replication.order_table([run("c_mas", 0, 0, 0), other, run("h_mas", 0, 0, 0)])
    assert [row[0] for row in table(text)] == ["h_mas − c_mas"]


def test_the_papers_systems_are_evaluations_of_the_embedded_world_by_the_same_names():
    chain = phases(mini_systems.get_config())
    evaluations = {name for name, phase in chain.items() if phase.train.kind is Kind.EVALUATE}
    assert evaluations >= PAPER.keys()


def test_one_seed_is_marked_and_several_are_not():
    chain = TinyReplication()
    one = [run("c_mas", 3, 0, 1), run("h_mas", 3, 1, 1)]
    several = [*one, run("c_mas", 0, 0, 1), run("h_mas", 0, 1, 1)]
    made_by = {"commit": "f00d", "command": "python"}
    text = replication.format_replication(one, chain, made_by)
    assert "Training seeds: 3. **One seed: no claim about order.**\n" in text
    assert text.endswith("## Made by\n\n- commit: f00d\n- command: python")
    assert "Training seeds: 0, 3.\n" in replication.format_replication(several, chain, made_by)


def seeds_at(folder: pathlib.Path, *lengths: int) -> list[Chain]:
    """Chains whose stage 1 took so many steps each; outcome = step + seed, no_search unknown in step 1."""
    chains = []
    for seed, steps in enumerate(lengths):
        chain = TinyReplication(run=RunConfig(dir=str(folder / f"seed_{seed}"), seed=seed))
        lines = [
            {"step": n, "outcome": n + seed, "searches": 1.5, "no_search": 0.25 if n > 1 else None}
            for n in range(1, steps + 1)
        ]
        (folder / f"seed_{seed}" / "stage1").mkdir(parents=True)
        metrics = folder / f"seed_{seed}" / "stage1" / "metrics.jsonl"
        metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for number, name in enumerate(("c_mas", "stage1_c_mas", "capped")):
            (folder / f"seed_{seed}" / name).mkdir()
            result = run(name, seed, number > 0, number > 1)
            write_result(result, folder / f"seed_{seed}" / name / "results.jsonl")
        chains.append(chain)
    return chains


def test_curves_are_those_of_phases_that_learn_from_episodes(tmp_path):
    chains = seeds_at(tmp_path, 3, 3)
    found = replication.curves(chains, "outcome")
    assert found.keys() == {"stage1"}
    np.testing.assert_array_equal(found["stage1"], [[1, 2, 3], [2, 3, 4]])
    np.testing.assert_array_equal(
        replication.curves(chains, "no_search")["stage1"], [[np.nan, 0.25, 0.25]] * 2
    )


def test_a_smoothed_curve_is_a_mean_of_five_steps_and_of_fewer_at_its_ends():
    np.testing.assert_allclose(smoothed(np.array([0.0, 3, 6, 9, 12, 15])), [3, 4.5, 6, 9, 10.5, 12])
    np.testing.assert_allclose(smoothed(np.array([2.0, 4.0])), [3, 3])


def test_the_report_and_its_figures_are_the_same_each_time(tmp_path):
    chains = seeds_at(tmp_path, 4, 4)
    for folder in ("one", "two"):
        path = replication.write_report(tmp_path / folder, chains, {"commit": "f00d"})
        assert path == str(tmp_path / folder / "report.md")
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {"report.md", "learning.png", "no_search.png"}
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert all(imread(tmp_path / "one" / f"{name}.png").std() > 0.05 for name in ("learning", "no_search"))
    text = (tmp_path / "one" / "report.md").read_text()
    assert "| stage1_c_mas | " in text and "![Learning curves](learning.png)" in text
    assert "| capped − c_mas" in text and "- learn.clip = 0.2" in text
