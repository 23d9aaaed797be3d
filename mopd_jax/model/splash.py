"""Attention over packed rows by JAX's splash attention: a TPU kernel that never holds the scores of a row.

On a mesh every device runs the kernel on its own rows and heads. Which kernel is decided where the
program is lowered, not where it is traced: for a TPU, also ahead of time on a host without one, it is the
real one; for a CPU the same kernel is interpreted, tile by tile, which is exact and slow.
"""

import functools
import math

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha,
)

from mopd_jax.config import SPLASH_TILE
from mopd_jax.model.sharding import spec
from mopd_jax.refusal import Refusal

LARGEST_TILE = 512
"""Queries, and keys, of one tile at most [D]: the scores of a tile stay in the core's fast memory."""


def attend(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """Returns attention [B, T, N, H] of packed rows: causal, and only inside equal segments.

    The same as `attention.attend` up to the order of sums; in bfloat16 the scaled queries are rounded once
    more. Padding (segment 0) attends to the padding before it, so that its values and gradients are finite.

    Raises Refusal for rows that do not split into tiles, and for a mesh of devices without the kernel.
    """
    if segments_BT.shape[1] % SPLASH_TILE:
        raise Refusal(
            f"splash attention over rows of {segments_BT.shape[1]} tokens, expected a multiple of "
            f"{SPLASH_TILE}: pad the rows, or set model.attention = xla"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return _attend_shard(q_BTNH, k_BTKH, v_BTKH, segments_BT)
    _check_platform(mesh)
    queries, keys = (spec(("batch", "length", heads, "head_dim")) for heads in ("heads", "kv_heads"))
    # XLA cannot split a kernel, so the devices' parts are cut out by hand, along every axis of the mesh.
    # Kernels do not say over which axes their results vary, which `check_vma` would want to know.
    mapped = jax.shard_map(
        _attend_shard,
        in_specs=(queries, keys, keys, spec(("batch", "length"))),
        out_specs=queries,
        check_vma=False,
    )
    return mapped(q_BTNH, k_BTKH, v_BTKH, segments_BT)


def _check_platform(mesh: jax.sharding.AbstractMesh) -> None:
    device = mesh.abstract_device
    if device is not None and device.platform not in ("tpu", "cpu"):
        raise Refusal(
            f"splash attention on a mesh of {device.platform} devices ({device.device_kind}), expected tpu "
            "(or cpu, where it is interpreted): set model.attention = xla"
        )


def _attend_shard(q_BTNH, k_BTKH, v_BTKH, segments_BT):
    """Runs the kernel on the rows and heads of one device; it takes heads first and queries scaled."""
    q, k, v = (x.swapaxes(1, 2) for x in (q_BTNH * q_BTNH.shape[-1] ** -0.5, k_BTKH, v_BTKH))
    out_BNTH = jax.lax.platform_dependent(
        q,
        k,
        v,
        segments_BT,
        tpu=functools.partial(_kernel, interpret=False),
        cpu=functools.partial(_kernel, interpret=True),
    )
    return out_BNTH.swapaxes(1, 2)


def _kernel(q_BNTH, k_BKTH, v_BKTH, segments_BT, interpret: bool):
    heads, length = q_BNTH.shape[1:3]
    tile = math.gcd(length, LARGEST_TILE)
    kernel = make_splash_mha(
        MultiHeadMask([CausalMask((length, length))] * heads),
        block_sizes=BlockSizes(
            block_q=tile,
            block_kv=tile,
            block_q_dkv=tile,
            block_kv_dkv=tile,
            block_q_dq=tile,
            block_kv_dq=tile,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    return jax.vmap(kernel)(q_BNTH, k_BKTH, v_BKTH, SegmentIds(segments_BT, segments_BT))
