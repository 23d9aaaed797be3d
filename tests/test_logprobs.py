"""Chunked log-probabilities against the plain ones, and what they never hold."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from mopd_jax.model.logprobs import _logprob_and_entropy, token_logprobs
from tests.tiny_qwen3 import VOCAB, assert_trees_close, make_model, make_params, random_ids

B, T, M, CHUNK = 4, 10, 5, 6  # 20 positions: the last chunk is padded


@pytest.fixture(scope="module")
def model():
    return make_model(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def params(model):
    return make_params(model)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    positions = np.tile(np.arange(T, dtype=np.int32), (B, 1))
    source = rng.integers(0, T, (B, M)).astype(np.int32)
    return random_ids(rng, B, T), positions, np.ones((B, T), np.int32), source, random_ids(rng, B, M)


def plain(model, params, ids, positions, segments, source, targets):
    """All logits at once, the way it is defined."""
    logits = model.apply({"params": params}, ids, positions, segments, method="logits")
    logps = jax.nn.log_softmax(logits[jnp.arange(B)[:, None], source])
    entropy = -(jnp.exp(logps) * logps).sum(-1)
    return jnp.take_along_axis(logps, targets[..., None], -1)[..., 0], entropy


def gradients(function):
    """Jitted ((loss, (logps, entropy)), gradient) of the log-probabilities' weighted sum."""
    weights = np.random.default_rng(1).normal(size=(B, M)).astype(np.float32)

    def loss(params, *batch):
        logps, entropy = function(params, *batch)
        return (logps * weights).sum(), (logps, entropy)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.fixture(scope="module")
def expected(model, params, batch):
    return gradients(functools.partial(plain, model))(params, *batch)


def assert_same(found, expected):
    (_, scores), gradient = found
    for a, b in zip(scores, expected[0][1], strict=True):
        assert a.shape == (B, M) and a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert_trees_close(gradient, expected[1], 1e-5)


def scorer(model, chunk):
    return lambda params, *batch: token_logprobs(model, params, *batch, chunk)


def test_values_and_gradients_are_those_of_all_logits_at_once(model, params, batch, expected):
    assert_same(gradients(scorer(model, CHUNK))(params, *batch), expected)


@pytest.mark.parametrize("chunk", [1, 64])
def test_any_chunk_gives_the_same_values(chunk, model, params, batch, expected):
    for a, b in zip(jax.jit(scorer(model, chunk))(params, *batch), expected[0][1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_uniform_policy_has_the_entropy_of_the_vocabulary(model, params, batch):
    uniform = params | {"embed": {"embedding": jnp.zeros_like(params["embed"]["embedding"])}}
    logps, entropy = jax.jit(scorer(model, CHUNK))(uniform, *batch)
    np.testing.assert_allclose(entropy, np.full((B, M), np.log(VOCAB)), rtol=1e-6)
    np.testing.assert_allclose(logps, np.full((B, M), -np.log(VOCAB)), rtol=1e-6)


def test_entropy_has_no_gradient(params):
    """Shown on the logits, through which all of it would flow."""
    logits = np.random.default_rng(2).normal(size=(3, VOCAB)).astype(np.float32)
    gradient = jax.grad(lambda x: _logprob_and_entropy(x, np.zeros(3, np.int32))[1].sum())(logits)
    np.testing.assert_array_equal(gradient, np.zeros_like(logits))


def test_bfloat16_model_scores_in_float32(params, batch, expected):
    scores = jax.jit(scorer(make_model(tie_word_embeddings=True, dtype=jnp.bfloat16), CHUNK))(params, *batch)
    for a, b in zip(scores, expected[0][1], strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=0.05 * np.abs(b).max())


def shapes(jaxpr) -> set[tuple[int, ...]]:
    """Shapes of all values made in a jaxpr, those of its inner jaxprs too."""
    found = set()
    for equation in jaxpr.eqns:
        found |= {v.aval.shape for v in equation.outvars if hasattr(v.aval, "shape")}
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            found |= shapes(inner)
    return found


def largest_logits(function, params) -> int:
    """Size of the largest array over the vocabulary that the gradient makes, weights set aside."""
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: function(p)[0].sum()))(params).jaxpr
    weights = {(VOCAB, 16), (16, VOCAB)}
    return max(int(np.prod(s)) for s in shapes(jaxpr) - weights if VOCAB in s)


@pytest.mark.parametrize("tied", [False, True])
def test_gradient_holds_the_logits_of_one_chunk_only(tied, batch):
    model = make_model(tie_word_embeddings=tied)
    params = make_params(model)
    assert largest_logits(lambda p: plain(model, p, *batch), params) == B * T * VOCAB  # the walk sees them
    positions = batch[3].size
    steps = -(-positions // CHUNK)  # as even as they can be
    assert steps > 1
    largest = largest_logits(lambda p: token_logprobs(model, p, *batch, CHUNK), params)
    assert largest == -(-positions // steps) * VOCAB
