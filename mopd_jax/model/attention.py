"""Grouped-query attention in plain XLA: over packed rows, over a group's history, and over two parts.

Keys and values are never repeated per query head: the N query heads are viewed as K × N/K. Products
accumulate in float32, the softmax is float32, results come back in the queries' type.
"""

import jax
import jax.numpy as jnp


def attend(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """Returns attention [B, T, N, H] of packed rows: causal, and only inside equal segments.

    Padding (segment 0) attends to the padding before it, so that its values are finite.
    """
    T = q_BTNH.shape[1]
    causal_TT = jnp.tril(jnp.ones((T, T), bool))
    same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
    return _attend_seen(q_BTNH, k_BTKH, v_BTKH, causal_TT & same_BTT)


def attend_history(
    q_RTNH: jax.Array, k_RKPH: jax.Array, v_RKPH: jax.Array, positions_RT: jax.Array
) -> jax.Array:
    """Returns attention [R, T, N, H] over histories in which the key at position p has index p.

    A query sees the keys up to its own position, itself included.
    """
    seen_RTP = jnp.arange(k_RKPH.shape[2]) <= positions_RT[:, :, None]
    return _attend_seen(q_RTNH, k_RKPH.swapaxes(1, 2), v_RKPH.swapaxes(1, 2), seen_RTP)


def attend_two_parts(
    q_GCNH: jax.Array,
    history_k_GKPH: jax.Array,
    history_v_GKPH: jax.Array,
    history_length_G: jax.Array,
    turn_k_GKCSH: jax.Array,
    turn_v_GKCSH: jax.Array,
    turn_length_GC: jax.Array,
) -> jax.Array:
    """Returns attention [G, C, N, H] of one token per candidate over shared history and own turn.

    A query sees the first `history_length` keys of its group's history, which its candidates read in
    place, and the keys 0 … `turn_length` of its own turn, its own key being the last of them.
    One softmax runs over both parts.
    """
    q_GKNCH = _by_kv_head(q_GCNH, history_k_GKPH.shape[1])
    history = _scores("gknch,gkph->gkncp", q_GKNCH, history_k_GKPH)
    turn = _scores("gkcnh,gkcsh->gkcns", q_GKNCH.swapaxes(2, 3), turn_k_GKCSH).swapaxes(2, 3)
    seen_GP = jnp.arange(history.shape[-1]) < history_length_G[:, None]
    seen_GCS = jnp.arange(turn.shape[-1]) <= turn_length_GC[:, :, None]
    history = jnp.where(seen_GP[:, None, None, None], history, -jnp.inf)
    turn = jnp.where(seen_GCS[:, None, None], turn, -jnp.inf)

    # Key 0 of the own turn is always seen: the peak is finite even over an empty history.
    peak = jnp.maximum(history.max(-1, keepdims=True), turn.max(-1, keepdims=True))
    history, turn = jnp.exp(history - peak), jnp.exp(turn - peak)
    total = history.sum(-1, keepdims=True) + turn.sum(-1, keepdims=True)
    from_history = _dot("gkncp,gkph->gknch", history.astype(q_GCNH.dtype), history_v_GKPH)
    # Products in the order in which a turn lies: any other is several times as slow on CPU.
    turn = turn.astype(q_GCNH.dtype).swapaxes(2, 3)
    from_turn = _dot("gkcns,gkcsh->gkcnh", turn, turn_v_GKCSH).swapaxes(2, 3)
    return _by_head((from_history + from_turn) / total).astype(q_GCNH.dtype)


def _attend_seen(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, seen_BTS: jax.Array) -> jax.Array:
    q = _by_kv_head(q_BTNH, k_BSKH.shape[2])
    B, K, N, T, H = q.shape
    # N and T are one axis of the products: gradients then sum over one axis, for which XLA copies nothing.
    scores = _scores("bkqh,bskh->bkqs", q.reshape(B, K, N * T, H), k_BSKH).reshape(B, K, N, T, -1)
    weights = jax.nn.softmax(jnp.where(seen_BTS[:, None, None], scores, -jnp.inf), axis=-1).astype(q.dtype)
    out = _dot("bkqs,bskh->bkqh", weights.reshape(B, K, N * T, -1), v_BSKH)
    return _by_head(out.reshape(q.shape)).astype(q.dtype)


def _by_kv_head(q_BTNH: jax.Array, num_kv_heads: int) -> jax.Array:
    """Returns [B, K, N/K, T, H]: query head n reads key/value head n // (N/K)."""
    B, T, N, H = q_BTNH.shape
    return q_BTNH.reshape(B, T, num_kv_heads, N // num_kv_heads, H).transpose(0, 2, 3, 1, 4)


def _by_head(out: jax.Array) -> jax.Array:
    """Undoes `_by_kv_head`."""
    B, K, queries, T, H = out.shape
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, K * queries, H)


def _scores(subscripts: str, q: jax.Array, k: jax.Array) -> jax.Array:
    return _dot(subscripts, q, k) * q.shape[-1] ** -0.5


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    # The only way to XLA's fast bf16 products on CPU, and what the MXU does anyway.
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
