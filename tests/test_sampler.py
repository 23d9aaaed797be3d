"""The draw against exact quantiles, and what the jitted programs of a lane touch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mopd_jax.rollout.sampler import BLOCKS, Sampler, SamplerState, draw
from tests import engines
from tests.engines import CANDIDATES, ROLLOUT, keys
from tests.tiny_qwen3 import packed

VOCABULARIES = (1, 37, BLOCKS, 11 * BLOCKS - 100)
ALMOST_ONE = np.nextafter(np.float32(1), np.float32(0))

jitted_draw = jax.jit(draw)


def inverse_cdf(logits: np.ndarray, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids that the uniforms stand for, and how far each uniform lies inside its id's interval,
    both in float64."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    edges = np.cumsum(weights) / weights.sum()
    ids = np.searchsorted(edges, uniforms, side="right")
    ids = np.minimum(ids, np.flatnonzero(weights)[-1])
    lower = np.where(ids > 0, edges[ids - 1], 0.0)
    return ids, np.minimum(uniforms - lower, edges[ids] - uniforms)


def repeat(logits: np.ndarray, count: int) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))


# ---------------------------------------------------------------- the draw


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_draw_inverts_the_cumulative_sum(vocabulary):
    logits = np.random.default_rng(vocabulary).normal(0, 2, vocabulary).astype(np.float32)
    uniforms = ((np.arange(4096) + 0.5) / 4096).astype(np.float32)
    ids, _ = jitted_draw(repeat(logits, 4096), uniforms)
    expected, margin = inverse_cdf(logits, uniforms)
    clear = margin > 1e-6  # nearer to an edge, float32 sums may fall on either side
    assert clear.mean() > 0.98 or vocabulary == 1
    np.testing.assert_array_equal(np.asarray(ids)[clear], expected[clear])


def test_frequencies_are_the_softmax():
    logits = np.log([0.5, 0.25, 0.125, 0.125]).astype(np.float32)
    ids, _ = jitted_draw(repeat(logits, 4096), ((np.arange(4096) + 0.5) / 4096).astype(np.float32))
    assert np.bincount(ids, minlength=4).tolist() == [2048, 1024, 512, 512]


@pytest.mark.parametrize("vocabulary", VOCABULARIES[1:])
def test_an_impossible_id_is_never_drawn(vocabulary):
    """Uniforms on and around all edges of the cumulative sum, where rounding decides."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(0, 1, vocabulary).astype(np.float32)
    logits[rng.random(vocabulary) < 0.6] = -np.inf
    logits[: vocabulary // 8] = logits[-vocabulary // 3 :] = -200.0  # underflows to a weight of 0
    weights = np.exp(logits.astype(np.float64))
    edges = np.cumsum(weights) / weights.sum()
    around = (edges[:, None] + np.arange(-4, 5) * 2.0**-24).ravel()
    uniforms = np.append(np.clip(around, 0, ALMOST_ONE), [0, ALMOST_ONE]).astype(np.float32)
    ids, logps = jitted_draw(repeat(logits, len(uniforms)), uniforms)
    assert np.all(logits[np.asarray(ids)] > -100)
    assert np.all(np.asarray(logps) > -100)


def test_uniforms_at_both_ends():
    logits = np.array([-np.inf, 0, 1, 2, -np.inf], np.float32)
    ids, _ = jitted_draw(repeat(logits, 2), jnp.array([0, ALMOST_ONE], jnp.float32))
    assert ids.tolist() == [1, 3]
    flat, _ = jitted_draw(repeat(np.zeros(11 * BLOCKS - 100), 2), jnp.array([0, ALMOST_ONE], jnp.float32))
    assert flat.tolist() == [0, 11 * BLOCKS - 101]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_logps_are_the_log_softmax(vocabulary):
    logits = np.random.default_rng(0).normal(0, 5, (64, vocabulary)).astype(np.float32)
    uniforms = ((np.arange(64) + 0.5) / 64).astype(np.float32)
    ids, logps = jitted_draw(logits, uniforms)
    exact = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(logps, exact[np.arange(64), ids], atol=1e-5)


def test_not_a_number_stays_one():
    """The learner drops and counts such tokens; a finite number in their place would be learnt from."""
    logits = repeat(np.array([0, np.nan, 1], np.float32), 1)
    ids, logps = jitted_draw(logits, jnp.array([0.5]))
    assert 0 <= int(ids[0]) < 3 and np.isnan(logps[0])


# ---------------------------------------------------------------- the programs of a lane of 4 conversations

PROMPTS = {0: [5, 9, 13, 2], 2: [7, 7, 21], 3: [30, 4, 18, 60, 99]}
"""By group."""
ROWS, WIDTH, STEPS = ROLLOUT.prefill_rows, ROLLOUT.prefill_tokens, ROLLOUT.decode_steps
PADDING = ROLLOUT.conversations + ROLLOUT.parked
NEVER = 99
"""More groups than there are: no dispatch ends early."""


@pytest.fixture(scope="module")
def params():
    """Weights of the tiny model that never end a turn."""
    tree = jax.tree.map(lambda x: x, engines.params())
    tree["head"]["kernel"] = tree["head"]["kernel"].at[0, engines.tokens().end_of_turn_id].set(-100.0)
    return tree


@pytest.fixture
def sampler() -> Sampler:
    return engines.fresh_sampler()[0]


@pytest.fixture
def state(sampler, params) -> SamplerState:
    """A lane with the prompts' histories, nothing started."""
    empty = engines.fresh_sampler()[1]
    ids = np.zeros((ROWS, WIDTH), np.int32)
    for row, prompt in zip(ids, PROMPTS.values(), strict=True):
        row[: len(prompt) - 1] = prompt[:-1]
    lengths = np.array([len(prompt) - 1 for prompt in PROMPTS.values()], np.int32)
    return sampler.extend(empty, params, ids, np.array(list(PROMPTS), np.int32), lengths)


def start(sampler: Sampler, state: SamplerState, limits: dict[int, int]) -> SamplerState:
    """Starts the groups of `limits`; the rows that are left over are padding with inputs of their own."""
    padding = ROWS - len(limits)
    return sampler.start(
        state,
        np.array([*limits, *[PADDING] * padding], np.int32),
        np.array([PROMPTS[g][-1] for g in limits] + [1] * padding, np.int32),
        np.stack([keys(g) for g in limits] + [keys(99)] * padding),
        np.array([*limits.values(), *[1] * padding], np.int32),
    )


def held(state: SamplerState) -> SamplerState:
    """Copies a state, which the next call takes away, to the host."""
    return jax.tree.map(np.array, state)


def test_slots_decode_to_their_limits(sampler, state, params):
    after = held(sampler.decode(start(sampler, state, {0: 2, 3: 7}), params, NEVER))
    assert after.counts[:, 0].tolist() == [2, 0, 0, 4]
    assert after.active[:, 0].tolist() == [False, False, False, True]
    assert int(after.steps) == STEPS == 4
    assert after.cache.history_length.tolist() == [3, 0, 2, 4, 0, 0, 0]
    assert after.cache.turn_length[:, 0].tolist() == [2, 0, 0, 4]
    assert not after.ids[1:3].any() and not after.ids[0, 0, 2:].any()
    assert (after.logps[0, 0, :2] < 0).all() and not after.logps[0, 0, 2:].any()


def test_decoding_goes_on_where_it_stopped_and_ends_with_the_last_slot(sampler, state, params):
    state = sampler.decode(start(sampler, state, {0: 2, 3: 7}), params, NEVER)
    first = held(state)
    after = held(sampler.decode(state, params, NEVER))
    assert int(after.steps) == 7 and after.counts[:, 0].tolist() == [2, 0, 0, 7] and not after.active.any()
    np.testing.assert_array_equal(after.ids[0], first.ids[0])
    np.testing.assert_array_equal(after.ids[3, 0, :4], first.ids[3, 0, :4])
    assert after.inputs[3, 0] == after.ids[3, 0, 6] and after.cache.turn_length[3, 0] == 7


def test_a_dispatch_ends_when_enough_slots_have_ended_in_it(sampler, state, params):
    state = sampler.decode(start(sampler, state, {0: 1, 2: 2, 3: 9}), params, 2)
    first = held(state)
    assert int(first.steps) == 2 and first.active[:, 0].tolist() == [False, False, False, True]
    after = held(sampler.decode(state, params, 1))
    assert int(after.steps) == 2 + STEPS, "what had ended before does not count"


def test_a_group_has_ended_when_all_its_candidates_have(params):
    sampler, state = engines.fresh_sampler(CANDIDATES)
    counts = np.zeros((2, CANDIDATES), np.int32)
    counts[0, 1:] = 1
    state = state.replace(
        active=jnp.ones((2, CANDIDATES), bool),
        counts=jnp.asarray(counts),
        limits=jnp.array([2, 9], jnp.int32),
    )
    after = held(sampler.decode(state, params, 1))
    assert int(after.steps) == 2 and after.active.any(1).tolist() == [False, True]


def test_without_active_slots_nothing_changes(sampler, state, params):
    before = held(state)
    jax.tree.map(np.testing.assert_array_equal, held(sampler.decode(state, params, NEVER)), before)


def test_padding_rows_touch_nothing(sampler, state):
    before, none = held(state), np.full(ROWS, PADDING, np.int32)
    state = start(sampler, state, {})
    state = sampler.copy(state, none, none, np.full(ROWS, 2, np.int32))
    state = sampler.commit(sampler.rewind(state, none, np.full(ROWS, 2, np.int32)), none)
    jax.tree.map(np.testing.assert_array_equal, held(state), before)


def test_each_token_is_drawn_with_a_uniform_of_its_own(sampler, state, params):
    """The key is the turn's, the count tells its tokens apart: ids are those of `draw` on the logits."""
    after = held(sampler.decode(start(sampler, state, {0: 4}), params, NEVER))
    ids = PROMPTS[0] + after.ids[0, 0, :4].tolist()
    logits = jax.jit(functools.partial(engines.model().apply, method="logits"))(
        {"params": params}, *packed(np.array(ids), length=len(ids))
    )
    key = jax.random.wrap_key_data(keys(0)[0], impl="threefry2x32")
    uniforms = jnp.stack([jax.random.uniform(jax.random.fold_in(key, n)) for n in range(4)])
    assert len(set(uniforms.tolist())) == 4
    expected, logps = draw(logits[0, len(PROMPTS[0]) - 1 : -1], uniforms)
    assert expected.tolist() == ids[len(PROMPTS[0]) :]
    np.testing.assert_allclose(after.logps[0, 0, :4], logps, atol=1e-5)
