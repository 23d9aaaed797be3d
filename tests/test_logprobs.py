"""Chunked log-probabilities against the plain ones, and what they never hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mopd_jax.model import sharding
from mopd_jax.model.logprobs import token_logprobs
from tests.tiny_qwen3 import VOCAB, make_model, make_params, random_ids

B, T, M, CHUNK = 4, 10, 5, 6  # 20 positions: the last chunk is padded


@pytest.fixture(scope="module")
def model():
    return make_model()


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


def loss(function, weights):
    def weighted(params):
        logps, entropy = function(params)
        return (logps * weights).sum(), (logps, entropy)

    return jax.jit(jax.value_and_grad(weighted, has_aux=True))


@pytest.mark.parametrize("chunk", [1, CHUNK, 20, 64])
@pytest.mark.parametrize("tied", [False, True])
def test_values_and_gradients_are_those_of_all_logits_at_once(chunk, tied, batch):
    model = make_model(tie_word_embeddings=tied)
    params = make_params(model)
    weights = np.random.default_rng(1).normal(size=(B, M)).astype(np.float32)
    (_, found), gradient = loss(lambda p: token_logprobs(model, p, *batch, chunk), weights)(params)
    (_, expected), expected_gradient = loss(lambda p: plain(model, p, *batch), weights)(params)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == (B, M) and a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_entropy_of_a_uniform_policy_is_log_vocab_and_has_no_gradient(model, params, batch):
    uniform = params | {"head": {"kernel": jnp.zeros_like(params["head"]["kernel"])}}
    logps, entropy = token_logprobs(model, uniform, *batch, CHUNK)
    np.testing.assert_allclose(entropy, np.full((B, M), np.log(VOCAB)), rtol=1e-6)
    np.testing.assert_allclose(logps, np.full((B, M), -np.log(VOCAB)), rtol=1e-6)
    gradient = jax.grad(lambda p: token_logprobs(model, p, *batch, CHUNK)[1].sum())(params)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(gradient))


def test_bfloat16_model_scores_in_float32(params, batch):
    logps, entropy = token_logprobs(make_model(dtype=jnp.bfloat16), params, *batch, CHUNK)
    assert logps.dtype == entropy.dtype == jnp.float32
    assert (np.asarray(logps) <= 0).all() and (np.asarray(entropy) <= np.log(VOCAB) + 1e-5).all()


def shapes(jaxpr) -> set[tuple[int, ...]]:
    """Shapes of all values made in a jaxpr, those of its inner jaxprs too."""
    found = set()
    for equation in jaxpr.eqns:
        found |= {v.aval.shape for v in equation.outvars if hasattr(v.aval, "shape")}
        for inner in jax.core.jaxprs_in_params(equation.params):
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
    assert largest_logits(lambda p: token_logprobs(model, p, *batch, CHUNK), params) == CHUNK * VOCAB


def test_rows_over_a_mesh_score_the_same(model, params, batch):
    mesh = sharding.make_mesh((2, 2, 1), jax.devices()[:4])
    weights = np.random.default_rng(1).normal(size=(B, M)).astype(np.float32)
    (_, expected), expected_gradient = loss(lambda p: token_logprobs(model, p, *batch, 2), weights)(params)
    layout = sharding.param_shardings(model, mesh)
    rows = jax.device_put(batch, sharding.batch_sharding(mesh))
    with sharding.on_mesh(mesh):
        scored = loss(lambda p: token_logprobs(model, p, *rows, 2), weights)
        (_, found), gradient = scored(jax.device_put(params, layout))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
