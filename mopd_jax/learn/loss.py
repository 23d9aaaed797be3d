"""The single masked loss, for every role and every phase.

Shape letters: B packed rows, M gathered (generated) positions.
"""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Streams:
    """What the loss knows of each generated token; all float32 [B, M]."""

    advantage: jax.Array
    weight: jax.Array
    """m_t / N: 0 where a token is left out, 1 / denominator elsewhere."""
    old: jax.Array | None = None
    """log π_old of the fused pass; None: the current policy itself (supervised, ρ = 1)."""
    sampler: jax.Array | None = None
    """log π of the sampler for the weight w_t; None: w_t = 1."""


@flax.struct.dataclass
class Sums:
    """What a micro-batch adds to the figures of its step; float32 []."""

    loss: jax.Array
    nll: jax.Array
    """−Σ_t m_t · log π_θ / N: what a supervised phase lowers."""
    clipped: jax.Array
    """Σ_t m_t / N over the tokens on which the ratio clip binds."""


def policy_loss(logps: jax.Array, streams: Streams, clip: float, cap: float) -> Sums:
    """L = −Σ_t w_t · m_t · min(ρ_t A_t, clip(ρ_t, 1−ε, 1+ε) A_t) / N (method.md, one masked loss).

    Args:
      logps: log π_θ of the targets, float32 [B, M].
      streams: see `Streams`.
      clip: ε.
      cap: upper bound of w_t = exp(log π_old − log π_sampler), no gradient through it [D].

    Returns:
      Sums over the tokens: those of micro-batches add up.
    """
    used = streams.weight > 0
    logps = jnp.where(used, logps, 0.0)
    old = jax.lax.stop_gradient(logps) if streams.old is None else jnp.where(used, streams.old, 0.0)
    ratio = jnp.exp(logps - old)
    clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
    gain = jnp.minimum(ratio * streams.advantage, clipped * streams.advantage)
    weight = streams.weight
    if streams.sampler is not None:
        gap = old - jnp.where(used, streams.sampler, 0.0)
        weight = weight * jax.lax.stop_gradient(jnp.minimum(cap, jnp.exp(gap)))
    binds = used & (clipped * streams.advantage < ratio * streams.advantage)
    return Sums(
        loss=-(weight * gain).sum(),
        nll=-(streams.weight * logps).sum(),
        clipped=(streams.weight * binds).sum(),
    )
