"""How programs fit a chip, in words: verdicts, advice, tables."""

import dataclasses

import pytest

from mopd_jax.config import Attention, Precision, Remat
from mopd_jax.published import CHIPS
from mopd_jax.run import plan
from mopd_jax.run.estimate import Lane, Work
from mopd_jax.run.fit import Fit, advice, format_fits, format_sampling, verdict
from tests import test_plan

V5E = CHIPS["v5e"]


def fit(name: str, peak: float, beside: float = 0.0, lane: Lane | None = None, **found) -> Fit:
    """A result in GB."""
    model = test_plan.SIZES.model if lane else None
    program = plan.Program(name, None, 8, Work(6e15, 8e15), int(beside * 1e9), lane, model)
    return Fit(program, int(peak * 1e9), 61.4, **found)


@pytest.fixture
def config():
    return test_plan.make_config()


# ---------------------------------------------------------------- verdicts


def test_the_verdict_names_program_excess_and_what_to_change(config):
    config.learn.micro_batch_tokens = 12 * 208
    fits = [fit("score", 3), fit("update: accumulate", 20.3)]
    excess, _, change = verdict(fits, test_plan.make_plan(config), V5E)
    assert excess == (
        "update: accumulate does not fit: 20.30 GB on a device, the limit is 16.91 GB, 3.39 GB too much."
    )
    program, changes = change.removeprefix("For ").removesuffix(".").rsplit(": ", 1)
    assert program == "update: accumulate"
    assert changes.split("; ") == [
        "model.attention = splash",
        "model.remat = full",
        "model.compute = bfloat16",
        "learn.micro_batch_tokens = 832, one row on a device (now 3)",
        "shorter rows (team.row_tokens, learn.row_buckets)",
        "a larger fsdp axis (mesh.shape is (1, 4, 2))",
        "more devices (now 8)",
    ]


def test_only_changes_that_are_left_are_advised(config):
    config.model.attention, config.model.remat = Attention.SPLASH, Remat.FULL
    config.model.compute = Precision.BFLOAT16
    found = advice(fit("score", 20), test_plan.make_plan(config), V5E)
    assert [change.split(" (")[0] for change in found] == [
        "shorter rows",
        "a larger fsdp axis",
        "more devices",
    ]
    config.model.frozen = Precision.FLOAT32
    assert "model.frozen = bfloat16" in advice(fit("score", 20), test_plan.make_plan(config), V5E)


def test_fewer_tokens_do_not_help_a_program_without_tokens(config):
    program = dataclasses.replace(fit("update: apply", 20).program, work=Work(0, 0))
    found = advice(Fit(program, int(20e9), 1.0), test_plan.make_plan(config), V5E)
    assert [change.split(" (")[0] for change in found] == ["a larger fsdp axis", "more devices"]


def test_what_stays_beside_a_program_counts(config):
    found = fit("decode, 8 × 1", 12, beside=6, lane=Lane(8, 1, 208, 8))
    text = "\n".join(verdict([found], test_plan.make_plan(config), V5E))
    assert "12.00 GB on a device beside 6.00 GB that stay allocated" in text
    assert "1.09 GB too much" in text and "fewer rollout.conversations (now 8)" in text
    assert "rollout.parked" not in text
    parking = fit("decode, 8 × 1", 20, lane=Lane(8, 1, 208, 8, parked=4))
    assert "fewer rollout.parked (now 4)" in advice(parking, test_plan.make_plan(config), V5E)
    assert "bfloat16" not in text, "the engine samples in bfloat16 already"
    assert "more devices (now" not in text
    crowded = fit("decode, 8 × 1", 9, beside=9, lane=Lane(8, 1, 208, 8))
    assert "more devices (now 8)" in verdict([crowded], test_plan.make_plan(config), V5E)[-1]


def test_programs_that_the_same_changes_help_share_a_line(config):
    lane = Lane(2, 5, 208, 6)
    fits = [fit("prefill, 2 × 5", 20, lane=lane), fit("decode, 2 × 5", 18, lane=lane), fit("score", 30)]
    first, second, third, title, sampling, learning = verdict(fits, test_plan.make_plan(config), V5E)
    assert [line.split(" does")[0] for line in (first, second, third)] == [f.program.name for f in fits]
    assert title == "What would help:" and sampling.startswith("For prefill, 2 × 5; decode, 2 × 5: fewer")
    assert learning.startswith("For score: ")


def test_what_fits_needs_no_words(config):
    assert verdict([fit("score", 16.9)], test_plan.make_plan(config), V5E) == []


# ---------------------------------------------------------------- tables


def test_the_table_of_fits():
    fits = [
        fit("score", 2.64, beside=0.5, arguments=10**9, kernels=3),
        fit("update: accumulate", 20.3, refused=True),
    ]
    head, rule, *rows = format_fits(fits, V5E).splitlines()
    assert len({len(line) for line in (head, rule, *rows)}) == 1, "columns are aligned"
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    # 6e15 FLOPs on 8 devices of 197 TFLOP/s take 3.81 s, three quarters of all it computes
    assert cells[0] == ["score", "1.00", "2.64", "3.14", "fits", "6e+03", "3.81", "75%", "3", "61"]
    assert cells[1][:5] == ["update: accumulate", "–", "20.30", "20.30", "refused"]


def test_decode_programs_are_measured_against_their_cache(config):
    lane = Lane(2, 5, 208, 6)
    found = fit("decode, 2 × 5", 1, lane=lane, temporaries=100)
    decode, shared = format_sampling([found], test_plan.make_plan(config), V5E)
    token = 2 * 3 * 4 * 6 * 2  # keys and values, 3 layers, 4 heads of 6, bfloat16
    cache = token * 2 * (208 + 5 * 6) / 8
    assert f"({100 / cache:.2%})" in decode
    assert shared.startswith("5 candidates share their prefix") and "with a copy for each" in shared
