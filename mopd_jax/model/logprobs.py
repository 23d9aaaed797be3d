"""Log-probabilities of chosen tokens without ever holding the logits of a whole row.

Only the gathered positions are unembedded, `chunk` of them at a time; the backward pass computes
each chunk's logits again. Peak memory is chunk × V per data shard, whatever B, T and M.
"""

from typing import Any

import jax
import jax.numpy as jnp

from mopd_jax.model.qwen3 import Qwen3
from mopd_jax.model.sharding import constrain, data_shards


def token_logprobs(
    model: Qwen3,
    params: dict[str, Any],
    ids_BT: jax.Array,
    positions_BT: jax.Array,
    segments_BT: jax.Array,
    source_BM: jax.Array,
    targets_BM: jax.Array,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns float32 log π(target) [B, M] and the entropy of π [B, M] (nats, no gradient).

    `source` indexes T: the position whose hidden state predicts the target, i.e. the one before it.
    `chunk` is the number of positions whose logits one data shard holds at once.
    """
    hidden_BTD = model.apply({"params": params}, ids_BT, positions_BT, segments_BT)
    hidden_BMD = jnp.take_along_axis(hidden_BTD, source_BM[:, :, None], axis=1)

    @jax.checkpoint
    def score(_, rows):
        hidden, targets = rows
        logits = model.apply({"params": params}, hidden, method="unembed")
        return None, _logprob_and_entropy(constrain(logits, "batch", "length", "vocab"), targets)

    _, scores = jax.lax.scan(score, None, (_chunked(hidden_BMD, chunk), _chunked(targets_BM, chunk)))
    return tuple(_unchunked(x, targets_BM.shape) for x in scores)


def _logprob_and_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    logps = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logps, targets[..., None], axis=-1)[..., 0]
    fixed = jax.lax.stop_gradient(logps)
    return chosen, -(jnp.exp(fixed) * fixed).sum(-1)


def _chunked(x_BM: jax.Array, chunk: int) -> jax.Array:
    """Returns [steps, shards, chunk, ...] of [B, M, ...], zero-padded: a shard chunks its own rows."""
    shards = data_shards()
    rows = x_BM.reshape(shards, -1, *x_BM.shape[2:])
    padding = -rows.shape[1] % chunk
    rows = jnp.pad(rows, [(0, 0), (0, padding)] + [(0, 0)] * (rows.ndim - 2))
    return rows.reshape(shards, -1, chunk, *rows.shape[2:]).swapaxes(0, 1)


def _unchunked(x: jax.Array, shape_BM: tuple[int, int]) -> jax.Array:
    rows = x.swapaxes(0, 1).reshape(x.shape[1], -1)
    B, M = shape_BM
    return rows[:, : B * M // x.shape[1]].reshape(B, M)
