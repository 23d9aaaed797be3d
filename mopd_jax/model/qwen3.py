"""Qwen3 as functional Flax: one module, one plain parameter tree, three ways to run it.

`__call__` reads packed rows (training, scoring), `extend` writes prompts into a cache (prefill) and
`decode` advances every slot of the cache by one token. All three run the same layers under one
`nn.scan`; they differ in their `Attention` context only. Parameters may be stored in any
type: they are cast to `config.dtype` where they are used, products accumulate in float32, and
norms, rotary embeddings, softmax and logits are float32. Architecture: Qwen3 technical report
(arXiv 2505.09388), as in Hugging Face transformers.
"""

import dataclasses
import math
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn

from mopd_jax.config import Attention, Remat
from mopd_jax.model import attention, splash
from mopd_jax.model.cache import (
    KVCache,
    append_history,
    append_turn,
    load,
    slot_histories,
    stored_dtype,
)
from mopd_jax.model.sharding import constrain
from mopd_jax.refusal import Refusal

COUNTS = (
    "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim "
    "max_position_embeddings"
).split()
"""Sizes that are whole numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config:
    """Sizes of a Qwen3 decoder and how it computes; hashable, so it can be a static argument."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    dtype: jnp.dtype = jnp.float32
    """Type of activations and of the operands of matrix products."""
    remat: Remat = Remat.MINIMAL
    """What the backward pass computes again."""
    attention: Attention = Attention.XLA
    """What computes attention over packed rows; prefill and decode have their own."""

    def __post_init__(self):
        for name in COUNTS:
            found = getattr(self, name)
            if not isinstance(found, int) or found < 1:
                raise Refusal(f"{name} = {found!r}: expected a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise Refusal(
                f"num_heads = {self.num_heads} is no multiple of num_kv_heads = {self.num_kv_heads}: "
                "every key/value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise Refusal(f"head_dim = {self.head_dim} is odd: rotary embedding turns pairs, make it even")


def init_cache(
    config: Qwen3Config,
    groups: int,
    candidates: int,
    history: int,
    turn: int,
    dtype: jnp.dtype,
    parked: int = 0,
) -> KVCache:
    """Returns an empty cache of `dtype`: `groups` slots of `history` + `candidates` × `turn` tokens, and
    `parked` places of `history` tokens."""
    L, K, H = config.num_layers, config.num_kv_heads, config.head_dim
    history_shape, turn_shape = (L, groups + parked, K, history, H), (L, groups, K, candidates, turn, H)
    return KVCache(
        history_k=jnp.zeros(history_shape, stored_dtype(dtype)),
        history_v=jnp.zeros(history_shape, stored_dtype(dtype)),
        history_length=jnp.zeros((groups + parked,), jnp.int32),
        turn_k=jnp.zeros(turn_shape, stored_dtype(dtype)),
        turn_v=jnp.zeros(turn_shape, stored_dtype(dtype)),
        turn_length=jnp.zeros((groups, candidates), jnp.int32),
    )


class Context(Protocol):
    """What the queries of a run may look at."""

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: KVCache | None, layer: jax.Array
    ) -> tuple[jax.Array, KVCache | None]:
        """Returns the attention, shaped like `q` [rows, T, N, H], and the cache with k and v in it."""


PACKED = {Attention.XLA: attention.attend, Attention.SPLASH: splash.attend}
"""Choice → attention over packed rows: (q, k, v, segments) → out."""
KEPT = {
    # Only attention's products have batch dimensions: they are computed again, or scores would fill memory.
    Remat.MINIMAL: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    Remat.FULL: jax.checkpoint_policies.nothing_saveable,
}
"""Choice → what of a layer is kept for the backward pass."""


@flax.struct.dataclass
class PackedContext:
    """Packed rows: the tokens before in the same segment, no cache."""

    segments: jax.Array  # [B, T]
    attention: Attention = flax.struct.field(pytree_node=False, default=Attention.XLA)

    def attend(self, q, k, v, cache, layer):
        return PACKED[self.attention](q, k, v, self.segments), cache


@flax.struct.dataclass
class ExtendContext:
    """Prompt chunks: the history of the row's group, to which the chunk is appended first.

    Attention then runs over the history region alone: a key lies at the index of its position however
    the prompt was cut, so the order of the sums, and with it every bit, does not depend on the cut.
    """

    groups: jax.Array  # [R]
    lengths: jax.Array  # [R]
    positions: jax.Array  # [R, T]

    def attend(self, q, k, v, cache, layer):
        cache = append_history(cache, layer, self.groups, self.lengths, k, v)

        def attend_row(row):
            q, group, positions = row
            k = load(cache.history_k[layer, group], q.dtype)
            v = load(cache.history_v[layer, group], q.dtype)
            return attention.attend_history(q[None], k[None], v[None], positions[None])[0]

        # Row by row: the history is read in place, and scores [N, T, P] are held for one row.
        return jax.lax.map(attend_row, (q, self.groups, self.positions)), cache


@flax.struct.dataclass
class DecodeContext:
    """One token per candidate [G, C]: the slot's history and the candidate's own turn."""

    active: jax.Array  # bool [G, C]

    def attend(self, q, k, v, cache, layer):
        cache = append_turn(cache, layer, self.active, k, v)
        slots = len(self.active)
        out = attention.attend_two_parts(
            q,
            load(slot_histories(cache.history_k, layer, slots), q.dtype),
            load(slot_histories(cache.history_v, layer, slots), q.dtype),
            cache.history_length[:slots],
            load(cache.turn_k[layer], q.dtype),
            load(cache.turn_v[layer], q.dtype),
            cache.turn_length,
        )
        return out, cache


class RMSNorm(nn.Module):
    """x / rms(x) · scale over the last axis, in float32."""

    size: int
    axis: str
    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", _partitioned(nn.initializers.ones, self.axis), (self.size,))
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + self.eps)
        return (normed * scale.astype(jnp.float32)).astype(x.dtype)


class Linear(nn.Module):
    """Matrix product with a kernel of any rank, e.g. "td,ndh->tnh", without bias: the first axis stands for
    the rows, which may be any number of axes of `x`."""

    subscripts: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    @nn.compact
    def __call__(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        # Fan-in scaling: 0.02, as in transformers, at Qwen3-4B's width; small models learn slower with it.
        init = nn.initializers.normal(self._fan_in() ** -0.5)
        kernel = self.param("kernel", _partitioned(init, *self.axes), self.shape)
        # Rows as one axis: the kernel's gradient then sums over one axis, for which XLA copies nothing.
        split = x.ndim - (self.subscripts.index(",") - 1)
        rows = x.reshape(-1, *x.shape[split:])
        out = jnp.einsum(self.subscripts, rows, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
        return out.astype(out_dtype or x.dtype).reshape(*x.shape[:split], *out.shape[1:])

    def _fan_in(self) -> int:
        operands, out = self.subscripts.split("->")
        kernel = operands.split(",")[1]
        return math.prod(size for axis, size in zip(kernel, self.shape, strict=True) if axis not in out)


class Embedding(nn.Module):
    """Token vectors, and the output head where the two are tied."""

    vocab_size: int
    width: int

    def setup(self):
        init = _partitioned(nn.initializers.normal(self.width**-0.5), "vocab", "embed")
        self.embedding = self.param("embedding", init, (self.vocab_size, self.width))

    def look_up(self, ids_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Returns the vectors [B, T, D] of token ids."""
        # Gathered over fsdp first: a look-up in a table split along both axes makes XLA replicate it all.
        # Cast after the look-up: the gradient of a frequent token is a long sum, kept in the table's type.
        table = constrain(self.embedding, "vocab", "width")
        return constrain(jnp.take(table, ids_BT, axis=0).astype(dtype), "batch", "length", "width")

    def unembed(self, hidden: jax.Array) -> jax.Array:
        table = self.embedding.astype(hidden.dtype)
        return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)


class SelfAttention(nn.Module):
    """Grouped-query attention with RMS-normed queries and keys and rotary positions."""

    config: Qwen3Config

    @nn.compact
    def __call__(self, x_BTD, layer, positions_BT, context: Context, cache: KVCache | None):
        c = self.config
        D, N, K, H = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim
        # Head by head, as products read them: XLA on TPU would copy them into this order for every decode.
        q = Linear("td,ndh->tnh", (N, D, H), ("heads", "embed", "head_dim"), name="q")(x_BTD)
        k = Linear("td,kdh->tkh", (K, D, H), ("kv_heads", "embed", "head_dim"), name="k")(x_BTD)
        v = Linear("td,kdh->tkh", (K, D, H), ("kv_heads", "embed", "head_dim"), name="v")(x_BTD)
        q = rotate(RMSNorm(H, "head_dim", c.rms_norm_eps, name="q_norm")(q), positions_BT, c.rope_theta)
        k = rotate(RMSNorm(H, "head_dim", c.rms_norm_eps, name="k_norm")(k), positions_BT, c.rope_theta)
        q = constrain(q, "batch", "length", "heads", "head_dim")
        k = constrain(k, "batch", "length", "kv_heads", "head_dim")
        v = constrain(v, "batch", "length", "kv_heads", "head_dim")
        out, cache = context.attend(q, k, v, cache, layer)
        return Linear("tnh,nhd->td", (N, H, D), ("heads", "head_dim", "embed"), name="o")(out), cache


class MLP(nn.Module):
    """SwiGLU."""

    config: Qwen3Config

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        D, F = self.config.hidden_size, self.config.intermediate_size
        gate = Linear("td,df->tf", (D, F), ("embed", "mlp"), name="gate")(x_BTD)
        up = Linear("td,df->tf", (D, F), ("embed", "mlp"), name="up")(x_BTD)
        hidden = constrain(nn.silu(gate) * up, "batch", "length", "mlp")
        return Linear("tf,fd->td", (F, D), ("mlp", "embed"), name="down")(hidden)


class Layer(nn.Module):
    """One decoder layer, as the body of a scan over layers: the residual stream and the cache are carried."""

    config: Qwen3Config

    @nn.compact
    def __call__(self, carry, layer, positions_BT, context: Context):
        x, cache = carry
        D, eps = self.config.hidden_size, self.config.rms_norm_eps
        normed = RMSNorm(D, "norm", eps, name="attn_norm")(x)
        mixed, cache = SelfAttention(self.config, name="attention")(
            normed, layer, positions_BT, context, cache
        )
        x = constrain(x + mixed, "batch", "length", "width")
        x = x + MLP(self.config, name="mlp")(RMSNorm(D, "norm", eps, name="mlp_norm")(x))
        return (constrain(x, "batch", "length", "width"), cache), None


class Qwen3(nn.Module):
    """The decoder. Its parameters are a plain nested dict (see `sharding.init_params`)."""

    config: Qwen3Config

    def setup(self):
        c = self.config
        # Inside a scan the loop itself keeps XLA from merging the recomputation with the first pass.
        body = nn.remat(Layer, prevent_cse=False, policy=KEPT[c.remat])
        scan = nn.scan(
            body,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=c.num_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        self.embed = Embedding(c.vocab_size, c.hidden_size)
        self.layers = scan(c)
        self.final_norm = RMSNorm(c.hidden_size, "norm", c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.head = Linear("td,dv->tv", (c.hidden_size, c.vocab_size), ("embed", "vocab"))

    def __call__(self, ids_BT: jax.Array, positions_BT: jax.Array, segments_BT: jax.Array) -> jax.Array:
        """Returns hidden states [B, T, D], after the final norm, of packed rows.

        Tokens see the earlier tokens of their own segment. Segment 0 is padding: finite and meaningless.
        """
        return self._run(ids_BT, positions_BT, PackedContext(segments_BT, self.config.attention), None)[0]

    def extend(self, cache: KVCache, ids_RT: jax.Array, groups_R: jax.Array, lengths_R: jax.Array) -> KVCache:
        """Returns the cache with `ids[r, :lengths[r]]` appended to the history of group `groups[r]`.

        Active groups are distinct; group G + Q marks a padding row, which writes nothing.
        """
        start_R = cache.history_length.at[groups_R].get(mode="clip")
        positions_RT = start_R[:, None] + jnp.arange(ids_RT.shape[1])
        context = ExtendContext(groups_R, lengths_R, positions_RT)
        _, cache = self._run(ids_RT, positions_RT, context, cache)
        grown = cache.history_length.at[groups_R].add(lengths_R, mode="drop")
        return cache.replace(history_length=grown)

    def decode(self, cache: KVCache, ids_GC: jax.Array, active_GC: jax.Array) -> tuple[jax.Array, KVCache]:
        """Returns hidden states [G, C, D] of one token per candidate, and the cache with it appended.

        The token stands at position history_length + turn_length and sees the slot's history and its
        own turn, itself included. Inactive candidates write nothing; their values are finite and meaningless.
        """
        positions_GC = cache.history_length[: len(active_GC), None] + cache.turn_length
        hidden, cache = self._run(ids_GC, positions_GC, DecodeContext(active_GC), cache)
        return hidden, cache.replace(turn_length=cache.turn_length + active_GC)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Returns float32 logits [..., V] of hidden states [..., D]."""
        if self.config.tie_word_embeddings:
            return self.embed.unembed(hidden)
        return self.head(hidden, out_dtype=jnp.float32)

    def logits(self, ids_BT: jax.Array, positions_BT: jax.Array, segments_BT: jax.Array) -> jax.Array:
        """Returns float32 logits [B, T, V] of packed rows: for short texts, as it holds all of them."""
        return self.unembed(self(ids_BT, positions_BT, segments_BT))

    def _run(
        self, ids: jax.Array, positions: jax.Array, context: Context, cache: KVCache | None
    ) -> tuple[Any, Any]:
        x = self.embed.look_up(ids, self.config.dtype)
        (x, cache), _ = self.layers((x, cache), jnp.arange(self.config.num_layers), positions, context)
        return self.final_norm(x), cache


def head_params(config: Qwen3Config, params: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of the parameters that `Qwen3.unembed` reads."""
    name = "embed" if config.tie_word_embeddings else "head"
    return {name: params[name]}


def rotate(x_BTNH: jax.Array, positions_BT: jax.Array, theta: float) -> jax.Array:
    """Returns `x` with rotary positions: pairs (i, i + H/2) turned by position · theta^(−2i/H)."""
    half = x_BTNH.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions_BT[:, :, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)


def _partitioned(init, *axes: str):
    return nn.with_logical_partitioning(init, axes)
