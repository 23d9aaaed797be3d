"""The single masked loss against its formula in plain NumPy, float64."""

import jax
import numpy as np
import pytest

from mopd_jax.learn.loss import Streams, policy_loss

CLIP, CAP = 0.2, 2.0
SHAPE = 3, 40


def reference(logps, advantage, weight, old, sampler, clip=CLIP, cap=CAP):
    """Returns loss, its gradient by log π_θ, and the weight on which the clip binds, token by token."""
    loss, binding, gradient = 0.0, 0.0, np.zeros(logps.shape)
    for at in np.ndindex(logps.shape):
        if not weight[at]:
            continue
        A, ratio = advantage[at], np.exp(logps[at] - old[at])
        importance = min(cap, np.exp(old[at] - sampler[at]))
        clipped = min(max(ratio, 1 - clip), 1 + clip)
        loss -= weight[at] * importance * min(ratio * A, clipped * A)
        if ratio * A <= clipped * A:
            gradient[at] = -weight[at] * importance * ratio * A
        else:
            binding += weight[at]
    return loss, gradient, binding


def draw(seed, spread):
    """Random streams: policies `spread` nats apart, a third of the tokens left out."""
    rng = np.random.default_rng(seed)
    old = rng.uniform(-4, -0.1, SHAPE)
    return {
        "logps": old + rng.normal(0, spread, SHAPE),
        "advantage": rng.normal(0, 1, SHAPE),
        "weight": (rng.random(SHAPE) < 0.67) / 57,
        "old": old,
        "sampler": old + rng.normal(0, 1, SHAPE),
    }


def one_token(ratio, advantage, weight, sampler=None):
    """A token of which the old policy's log-prob is −2."""
    logps = np.log(ratio) - 2
    streams = {"logps": logps, "advantage": advantage, "weight": weight, "old": -2.0, "sampler": sampler}
    return {name: None if x is None else np.full((1, 1), x) for name, x in streams.items()}


def evaluate(values, clip=CLIP, cap=CAP):
    """Returns the sums and the gradient by log π_θ."""
    values = {name: None if x is None else np.asarray(x, np.float32) for name, x in values.items()}
    logps = values.pop("logps")

    def loss(logps):
        sums = policy_loss(logps, Streams(**values), clip, cap)
        return sums.loss, sums

    (_, sums), gradient = jax.value_and_grad(loss, has_aux=True)(logps)
    return sums, gradient


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", [0.01, 0.5], ids=["clip inert", "clip active"])
def test_value_gradient_and_clip_share_are_those_of_the_formula(seed, spread):
    values = draw(seed, spread)
    sums, gradient = evaluate(values)
    loss, expected, binding = reference(**values)
    np.testing.assert_allclose(sums.loss, loss, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(sums.clipped, binding, rtol=1e-5)
    assert (binding > 0) == (spread == 0.5)
    np.testing.assert_allclose(sums.nll, -(values["weight"] * values["logps"]).sum(), rtol=1e-5)
    assert (np.exp(values["old"] - values["sampler"]) > CAP).any(), "the cap is never reached"


def test_another_clip_and_another_cap():
    values = draw(3, 0.5)
    sums, gradient = evaluate(values, clip=0.05, cap=1.0)
    loss, expected, binding = reference(**values, clip=0.05, cap=1.0)
    np.testing.assert_allclose(sums.loss, loss, rtol=2e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(sums.clipped, binding, rtol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "slope"),
    [
        (1.0, 3.0, 3.0, 3.0),
        (1.1, 3.0, 3.3, 3.3),
        (1.5, 3.0, 3.6, 0.0),  # better than allowed: flat
        (0.5, 3.0, 1.5, 1.5),  # made less likely although good: pulled back
        (0.5, -3.0, -2.4, 0.0),
        (1.5, -3.0, -4.5, -4.5),
    ],
)
def test_one_token(ratio, advantage, gain, slope):
    sums, gradient = evaluate(one_token(ratio, advantage, weight=0.25))
    np.testing.assert_allclose(sums.loss, -0.25 * gain, rtol=1e-5)
    np.testing.assert_allclose(gradient, [[-0.25 * slope]], rtol=1e-5)
    np.testing.assert_allclose(sums.clipped, 0.25 * (slope == 0.0))
    np.testing.assert_allclose(sums.nll, 0.25 * (2 - np.log(ratio)), rtol=1e-5)


def test_unchanged_weights_give_the_plain_policy_gradient():
    """ρ = 1: L = −Σ w m A / N and ∂L/∂log π = −w m A / N, without a clip."""
    values = draw(0, 0.0)
    sums, gradient = evaluate(values)
    importance = np.minimum(CAP, np.exp(values["old"] - values["sampler"]))
    expected = -importance * values["weight"] * values["advantage"]
    np.testing.assert_allclose(sums.loss, expected.sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-9)
    assert sums.clipped == 0


@pytest.mark.parametrize(
    ("gap", "importance"), [(-1.0, np.exp(-1)), (0.0, 1.0), (0.5, np.exp(0.5)), (3.0, 2.0)]
)
def test_the_sampler_weight_is_capped_above_only_and_has_no_gradient(gap, importance):
    sums, gradient = evaluate(one_token(1.0, 1.0, weight=1.0, sampler=-2.0 - gap))
    np.testing.assert_allclose(sums.loss, -importance, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[-importance]], rtol=1e-6)


def test_without_a_sampler_the_weight_is_one():
    values = draw(1, 0.3)
    sums, gradient = evaluate(values | {"sampler": None})
    loss, expected, _ = reference(**values | {"sampler": values["old"]})
    np.testing.assert_allclose(sums.loss, loss, rtol=2e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)


def test_a_supervised_stream_gives_the_gradient_of_the_mean_nll():
    logps = np.random.default_rng(0).uniform(-4, 0, SHAPE)
    weight = np.full(SHAPE, 1 / np.prod(SHAPE))
    sums, gradient = evaluate({"logps": logps, "advantage": np.ones(SHAPE), "weight": weight})
    np.testing.assert_allclose(gradient, -weight, rtol=1e-6)
    np.testing.assert_allclose(sums.nll, -logps.mean(), rtol=1e-6)
    assert sums.clipped == 0


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, -1e30])
@pytest.mark.parametrize("stream", ["logps", "old", "sampler"])
def test_a_token_that_is_left_out_cannot_be_heard(stream, poison):
    values = draw(2, 0.5)
    sums, gradient = evaluate(values)
    values[stream] = np.where(values["weight"] > 0, values[stream], poison)
    poisoned, poisoned_gradient = evaluate(values)
    np.testing.assert_array_equal(poisoned_gradient, gradient)
    assert (poisoned.loss, poisoned.nll, poisoned.clipped) == (sums.loss, sums.nll, sums.clipped)
    assert not gradient[values["weight"] == 0].any()


def test_no_tokens_give_zero():
    sums, gradient = evaluate(draw(0, 0.5) | {"weight": np.zeros(SHAPE)})
    assert (sums.loss, sums.nll, sums.clipped) == (0, 0, 0)
    assert not gradient.any()
