"""Log-probabilities of chosen tokens without ever holding the logits of a whole row.

Only the gathered positions are unembedded, `chunk` of them at a time; the backward pass computes
each chunk's logits again. Peak memory is chunk × V per data shard, whatever B, T and M.
"""

from typing import Any

import jax
import jax.numpy as jnp

from mopd_jax.model.qwen3 import Qwen3, head_params
from mopd_jax.model.sharding import map_shards


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
    `chunk` is the most positions whose logits one data shard holds at once.
    """
    hidden_BTD = model.apply({"params": params}, ids_BT, positions_BT, segments_BT)
    hidden_BMD = jnp.take_along_axis(hidden_BTD, source_BM[:, :, None], axis=1)

    def score_chunk(head, hidden, targets):
        logits = model.apply({"params": head}, hidden, method="unembed")
        return _logprob_and_entropy(logits, targets)

    def score_rows(head, hidden_BMD, targets_BM):
        def step(_, rows):
            return None, jax.checkpoint(score_chunk)(head, *rows)

        steps = -(-targets_BM.size // chunk)
        _, scores = jax.lax.scan(step, None, (_chunked(hidden_BMD, steps), _chunked(targets_BM, steps)))
        return tuple(x.reshape(-1)[: targets_BM.size].reshape(targets_BM.shape) for x in scores)

    return map_shards(score_rows, head_params(model.config, params), hidden_BMD, targets_BM)


@jax.custom_vjp
def _logprob_and_entropy(logits_CV: jax.Array, targets_C: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns log π(target) and the entropy, both [C]. Written as differences from the log of the sum, not
    with `log_softmax`, whose many uses of the logits XLA on CPU fuses into the product: twice as slow."""
    return _forward(logits_CV, targets_C)[0]


def _forward(logits_CV, targets_C):
    total_C = jax.nn.logsumexp(logits_CV, axis=-1)
    logps_CV = logits_CV - total_C[:, None]
    chosen_C = jnp.take_along_axis(logits_CV, targets_C[:, None], axis=-1)[:, 0] - total_C
    return (chosen_C, -(jnp.exp(logps_CV) * logps_CV).sum(-1)), (logits_CV, targets_C, total_C)


def _backward(kept, gradients):
    """∂ log π(target) / ∂ logits = [token = target] − π: one pass, without a scatter. Entropy has none."""
    logits_CV, targets_C, total_C = kept
    is_target_CV = jnp.arange(logits_CV.shape[-1]) == targets_C[:, None]
    return gradients[0][:, None] * (is_target_CV - jnp.exp(logits_CV - total_C[:, None])), None


_logprob_and_entropy.defvjp(_forward, _backward)


def _chunked(x_BM: jax.Array, steps: int) -> jax.Array:
    """Returns [steps, positions, ...] of [B, M, ...]: positions of all rows in order, evenly, then zeros."""
    flat = x_BM.reshape(-1, *x_BM.shape[2:])
    padding = -len(flat) % steps
    flat = jnp.pad(flat, [(0, padding)] + [(0, 0)] * (flat.ndim - 1))
    return flat.reshape(steps, -1, *flat.shape[1:])
