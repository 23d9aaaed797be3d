"""The formulas against sums done by hand, and against the parameters and arrays that there really are."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from mopd_jax.config import Attention, Remat, TeamConfig, Workflow
from mopd_jax.model.qwen3 import Qwen3, Qwen3Config, init_cache
from mopd_jax.model.sharding import abstract_params
from mopd_jax.published import CHIPS, QWEN3
from mopd_jax.run import estimate
from mopd_jax.run.estimate import Lane, Rows, Work
from tests.fixtures import tiny_config

TINY = Qwen3Config(
    vocab_size=10,
    hidden_size=4,
    intermediate_size=6,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rope_theta=1e4,
    tie_word_embeddings=True,
    max_position_embeddings=64,
)
LAYERS = 2 * (4 * 4 * (2 + 1 + 1 + 2) + 3 * 4 * 6)
"""q, k, v, o and the three matrices of the MLP: 336."""
HEAD = 4 * 10
LANE = Lane(groups=2, candidates=5, history=8, turn=3)


# ---------------------------------------------------------------- weights


def test_weights_by_hand():
    assert (estimate.layer_weights(TINY), estimate.head_weights(TINY)) == (LAYERS, HEAD) == (336, 40)
    norms = 2 * (4 + 4 + 4 + 4) + 4
    assert estimate.parameters(TINY) == 336 + 40 + norms
    untied = dataclasses.replace(TINY, tie_word_embeddings=False)
    assert estimate.parameters(untied) == 336 + 2 * 40 + norms


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_network(tied):
    config = tiny_config(tie_word_embeddings=tied)
    tree = abstract_params(Qwen3(config))
    assert estimate.parameters(config) == sum(x.size for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_published_sizes_have_the_published_number_of_parameters(name, count):
    assert estimate.parameters(Qwen3Config(**QWEN3[name])) == count


# ---------------------------------------------------------------- learning

ROWS = Rows(count=3, length=5, generated=2)
PRODUCTS = 2 * 336 * 15
SCORES = 2 * 2 * (2 * 4) * 3 * 25
"""2 products × 2 FLOPs × half the square, for 2 layers of 2 heads of 4."""
LOGITS = 2 * 40 * 6


@pytest.mark.parametrize(
    ("changes", "executed"),
    [
        ({}, 3 * PRODUCTS + 2 * SCORES * 4 + 4 * LOGITS),
        ({"remat": Remat.FULL}, 4 * PRODUCTS + 2 * SCORES * 4 + 4 * LOGITS),
        ({"attention": Attention.SPLASH}, 3 * PRODUCTS + SCORES * 5.5 + 4 * LOGITS),
        ({"remat": Remat.FULL, "attention": Attention.SPLASH}, 4 * PRODUCTS + SCORES * 5.5 + 4 * LOGITS),
    ],
)
def test_work_of_an_update(changes, executed):
    work = estimate.update_work(dataclasses.replace(TINY, **changes), ROWS)
    assert work == Work(3 * (PRODUCTS + SCORES + LOGITS), executed) and work.model == 3 * (10080 + 2400 + 480)
    assert work.ceiling == pytest.approx(work.model / executed)


def test_work_of_a_score_adds_up_over_models():
    one = estimate.score_work([TINY], ROWS)
    assert one == Work(PRODUCTS + SCORES + LOGITS, PRODUCTS + 2 * SCORES + LOGITS)
    wide = dataclasses.replace(TINY, intermediate_size=16)
    more = 2 * 2 * 3 * 4 * 10 * 15
    assert estimate.score_work([TINY, wide], ROWS) == one + Work(one.model + more, one.executed + more)


def test_seconds_of_qwen3_4b_on_a_v5e_64():
    """An update on 64 rows of 8,192 tokens at 100 % of peak: 1.31 s, and the products × 8/6 with remat."""
    config = Qwen3Config(**QWEN3["qwen3-4b"], remat=Remat.FULL, attention=Attention.SPLASH)
    work = estimate.update_work(config, Rows(64, 8192, 8192))
    assert work.model == pytest.approx(64 * 8192 * (6 * 4.0223e9 + 6 * 36 * 4096 * 8192), rel=1e-4)
    assert work.model / (64 * CHIPS["v5e"].flops) == pytest.approx(1.305, abs=0.001)
    assert work.ceiling == pytest.approx(0.690, abs=0.001), "6/8, less what the kernel computes again"


# ---------------------------------------------------------------- sampling


def test_work_of_a_prefill_call():
    products, scores = 2 * 336 * 8, 4 * 2 * (2 * 4) * 8 * 16
    found = estimate.prefill_work(TINY, rows=2, tokens=4, history=16)
    assert found == Work(products + scores / 2, products + scores)


def test_work_of_a_decode_step():
    flops = 2 * (336 + 40) * 10 + 4 * 2 * (2 * 4) * 10 * 11
    assert estimate.decode_work(TINY, LANE) == Work(flops, flops)


def test_bytes_of_a_cache_and_of_a_decode_step():
    token = 2 * 2 * 1 * 4 * 2  # keys and values, 2 layers, 1 head of 4, bfloat16
    assert estimate.cache_bytes(TINY, LANE, 2) == token * 2 * (8 + 5 * 3)
    assert estimate.copied_cache_bytes(TINY, LANE, 2) == token * 2 * 5 * (8 + 3)
    assert estimate.decode_bytes(TINY, LANE, 2) == 2 * (336 + 40) + token * 2 * (8 + 5 * 3)


def test_parking_places_take_room_and_are_not_read():
    token = 2 * 2 * 1 * 4 * 2
    parking = dataclasses.replace(LANE, parked=3)
    assert estimate.cache_bytes(TINY, parking, 2) == token * (2 * (8 + 5 * 3) + 3 * 8)
    assert estimate.decode_bytes(TINY, parking, 2) == estimate.decode_bytes(TINY, LANE, 2)


def test_a_token_of_qwen3_4b_takes_144_kib_of_cache():
    config = Qwen3Config(**QWEN3["qwen3-4b"])
    assert estimate.cache_bytes(config, Lane(1, 1, 1, 0), 2) == 144 * 1024


@pytest.mark.parametrize("parked", [0, 3])
def test_bytes_of_a_cache_are_those_of_its_arrays(parked):
    cache = init_cache(TINY, LANE.groups, LANE.candidates, LANE.history, LANE.turn, jnp.bfloat16, parked)
    arrays = cache.history_k, cache.history_v, cache.turn_k, cache.turn_v
    assert estimate.cache_bytes(TINY, dataclasses.replace(LANE, parked=parked), 2) == sum(
        x.nbytes for x in arrays
    )


# ---------------------------------------------------------------- a workflow


def test_rows_of_a_hierarchy():
    """Half of every limit: 2 of 4 sessions with 3 searches each, 128 of 256 tokens per turn, 32 of 64."""
    rows = estimate.workflow_rows(TeamConfig(), candidates=5)
    assert rows == {
        "leader": Rows(1, 400 + 3 * 128 + 2 * 128, 3 * 128),
        "searcher": Rows(2, 400 + 4 * 128 + 3 * 768, 4 * 128),
        "answerer": Rows(5, 400 + 32 + 2 * 128, 32),
    }


def test_rows_of_a_cascade_end_at_the_longest_row():
    team = TeamConfig(workflow=Workflow.CASCADE, session_searches=8, row_tokens=4096)
    rows = estimate.workflow_rows(team, candidates=1)
    assert rows == {
        "searcher": Rows(1, 4096, 7 * 128),
        "answerer": Rows(1, 400 + 32 + 128, 32),
    }
    assert math.isclose(rows["searcher"].generated, 896)
