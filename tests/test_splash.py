"""Splash attention against plain XLA: kernel, whole network, mesh, and what it refuses.

On a CPU the kernel is interpreted; lowered for a TPU it must be the real one.
"""

import functools
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mopd_jax.config import Attention, Remat
from mopd_jax.learn.loss import Streams, policy_loss
from mopd_jax.learn.packing import pack
from mopd_jax.model import attention, sharding, splash
from mopd_jax.model.logprobs import token_logprobs
from tests.tiny_qwen3 import assert_trees_close, make_model, make_params, random_ids

KERNELS = {"splash_mha_fwd_segmented_residuals", "splash_mha_dq_segmented_no_residuals"} | {
    "splash_mha_dkv_segmented_no_residuals"
}
"""What the gradient runs: forward, the queries' gradient, and that of keys and values."""


# ---------------------------------------------------------------- the kernel


def make_inputs(length: int, dtype=jnp.float32) -> tuple[tuple, np.ndarray, np.ndarray]:
    """Returns ((q, k, v), segments, cotangent) of two rows, 4 heads on 2: one row is packed, the other is
    nothing but padding."""
    rng = np.random.default_rng(length)
    shapes = [(2, length, heads, 8) for heads in (4, 2, 2, 4)]
    *qkv, cotangent = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    segments = np.zeros((2, length), np.int32)
    segments[0, :100], segments[0, 100:101], segments[0, 101:230] = 1, 2, 3
    return tuple(qkv), segments, cotangent


def value_and_gradients(attend, qkv, segments, cotangent):
    """Returns (out, (dq, dk, dv))."""

    @jax.jit
    def run(qkv, cotangent):
        out, backward = jax.vjp(lambda *qkv: attend(*qkv, segments), *qkv)
        return out, backward(cotangent)

    return run(qkv, cotangent)


@pytest.mark.parametrize("length", [256, 384], ids=["one tile", "three tiles"])
def test_values_and_gradients_are_those_of_plain_attention(length):
    inputs = make_inputs(length)
    found = value_and_gradients(splash.attend, *inputs)
    expected = value_and_gradients(attention.attend, *inputs)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-5)
        assert np.abs(b).max() > 0.5  # of both rows: padding is compared too, so it is finite
        assert np.isfinite(a).all()


def test_in_bfloat16_it_is_as_close_as_the_type_allows():
    exact = value_and_gradients(attention.attend, *make_inputs(256))
    found = value_and_gradients(splash.attend, *make_inputs(256, jnp.bfloat16))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.abs(np.asarray(a, np.float32) - b).max() < 0.02 * np.abs(b).max()


# ---------------------------------------------------------------- the network, packed and alone

LENGTHS = (120, 100, 90)
TOGETHER, ALONE = 384, 128
"""Row lengths: the texts side by side over three tiles, or each in a row of its own."""


@pytest.fixture(scope="module")
def texts() -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Ids, mask of the generated ones and their advantages, per text."""
    rng = np.random.default_rng(0)
    masks = [(np.arange(n) > 20) & (rng.random(n) < 0.7) for n in LENGTHS]
    advantages = [rng.normal(size=mask.sum()).astype(np.float32) for mask in masks]
    return [(random_ids(rng, len(m)), m, a) for m, a in zip(masks, advantages, strict=True)]


def network(choice: Attention):
    return make_model(num_layers=2, vocab_size=38, remat=Remat.FULL, attention=choice)


def loss_and_logps(model, params, packed, streams):
    logps, _ = token_logprobs(model, params, *packed, chunk=64)
    return policy_loss(logps, streams, clip=0.2, cap=2.0).loss, logps


def learn(choice: Attention, length: int, mesh_shape: tuple[int, int, int], texts):
    """Returns (log-probabilities per text, gradient of the loss) of one micro-batch on a mesh."""
    mesh = sharding.make_mesh(mesh_shape, jax.devices()[: np.prod(mesh_shape)])
    ids, masks, advantages = zip(*texts, strict=True)
    batch = pack(ids, masks, (length,), TOGETHER, sharding.row_shards(mesh))
    ((packed,), (advantage,)) = batch.micros, batch.scatter(advantages)
    total = sum(map(len, advantages))
    (weight,) = batch.scatter([np.full(len(a), 1 / total, np.float32) for a in advantages])
    model = network(choice)
    layout = sharding.param_shardings(model, mesh)
    run = jax.value_and_grad(functools.partial(loss_and_logps, model), has_aux=True)
    with sharding.on_mesh(mesh):
        arrays = jax.device_put((packed, Streams(advantage, weight)), sharding.batch_sharding(mesh))
        params = jax.device_put(make_params(model), layout)
        (_, logps), gradient = jax.jit(run, out_shardings=(None, layout))(params, *arrays)
    return batch.gather([np.asarray(logps)]), jax.device_get(gradient)


@pytest.fixture(scope="module")
def expected(texts):
    return learn(Attention.XLA, TOGETHER, (1, 1, 1), texts)


@pytest.mark.parametrize(
    ("length", "mesh_shape"),
    [(TOGETHER, (1, 1, 1)), (ALONE, (1, 4, 2))],
    ids=["packed, one device", "alone, with a row of padding, eight devices"],
)
def test_the_network_learns_the_same(texts, expected, length, mesh_shape):
    """However rows are packed and wherever they lie: scanned and recomputed layers, chunked head, loss."""
    logps, gradient = learn(Attention.SPLASH, length, mesh_shape, texts)
    for found, wanted, mask in zip(logps, expected[0], (mask for _, mask, _ in texts), strict=True):
        assert len(found) == mask.sum() > 30
        np.testing.assert_allclose(found, wanted, 1e-5, 1e-5)
    assert_trees_close(gradient, expected[1], 1e-5)


# ---------------------------------------------------------------- which kernel is compiled


def traced_gradient(choice: Attention, mesh: jax.sharding.Mesh):
    """Returns the traced gradient of a batch of `ALONE`-token rows, one per data shard, in bfloat16."""
    model = make_model(num_layers=1, vocab_size=38, head_dim=128, dtype=jnp.bfloat16, attention=choice)
    rows = sharding.row_shards(mesh)

    def abstract(shape, dtype, layout):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)

    layout, by_row = sharding.param_shardings(model, mesh), sharding.batch_sharding(mesh)
    params = jax.tree.map(
        lambda x, where: abstract(x.shape, x.dtype, where), sharding.abstract_params(model), layout
    )
    packed = [abstract((rows, n), jnp.int32, by_row) for n in (ALONE, ALONE, ALONE, 32, 32)]
    streams = Streams(*[abstract((rows, 32), jnp.float32, by_row)] * 2)
    run = jax.grad(functools.partial(loss_and_logps, model), has_aux=True)
    with sharding.on_mesh(mesh):
        return jax.jit(run, out_shardings=(layout, None)).trace(params, packed, streams)


@pytest.mark.parametrize(("choice", "kernels"), [(Attention.SPLASH, KERNELS), (Attention.XLA, set())])
def test_a_program_for_tpus_holds_the_real_kernels(choice, kernels):
    traced = traced_gradient(choice, sharding.make_mesh((1, 1, 1), jax.devices()[:1]))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("tpu_custom_call" in text) == (choice is Attention.SPLASH)
    assert set(re.findall(r"splash_mha_\w+", text)) == kernels
    assert "tpu_custom_call" not in traced.lower().as_text()


def compile_for_tpu() -> None:
    """Compiles the gradient for four TPUs that are not there; prints how many kernels it holds."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    compiled = traced_gradient(Attention.SPLASH, sharding.make_mesh((1, 2, 2), devices)).lower().compile()
    print("kernels:", compiled.as_text().count('custom_call_target="tpu_custom_call"'))


def test_the_compiler_for_tpus_takes_the_kernels():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'jax[tpu]'")
    settings = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    command = [sys.executable, "-c", "from tests.test_splash import compile_for_tpu; compile_for_tpu()"]
    root = pathlib.Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "kernels: 3" in done.stdout


# ---------------------------------------------------------------- refusals


def test_rows_that_do_not_split_into_tiles_are_refused():
    (q, k, v), segments, _ = make_inputs(300)
    with pytest.raises(ValueError, match=r"rows of 300 tokens, expected a multiple of 128.*attention = xla"):
        splash.attend(q, k, v, segments)


def test_a_mesh_of_other_devices_is_refused():
    gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1, 1, 1), sharding.MESH_AXES, abstract_device=gpu)
    (q, k, v), segments, _ = make_inputs(256)
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.raises(ValueError, match=r"mesh of gpu devices \(NVIDIA H200\), expected tpu .* = xla"),
    ):
        splash.attend(q, k, v, segments)
