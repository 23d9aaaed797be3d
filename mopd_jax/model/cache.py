"""The key/value cache of the sampler: per group one shared history, per candidate one private turn.

A prompt is written once into the history of a group, whatever the number of its candidates; each
candidate decodes into its own turn region. A finished turn of a one-candidate conversation is
committed to the history, so that the conversation is extended and never recomputed.

Groups 0 … G − 1 are slots: they decode, and hold turns. Groups from G on, Q of them, are parking places:
a history alone, copied there and back.

A history lies head by head, [K, P, H], as products over it read: from another order XLA on TPU would copy
the whole cache into this one at the start of every decode. Turns lie head by head, too.

bfloat16 is stored as its bits (uint16): XLA on CPU computes no bfloat16 outside of products, and would
convert the whole cache to float32 and back around every gather and scatter.

Lengths say what is valid: nothing past them is ever read, so it is never cleared. Writes that are
addressed to group G + Q (a padding row) or past the capacity are dropped; keeping `history_length` within
P and `turn_length` within S is the caller's part. All functions are pure: jit them with the cache donated.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint


@flax.struct.dataclass
class KVCache:
    """Keys and values of G slots of C candidates and Q parking places: L layers of K heads of width H."""

    history_k: jax.Array  # [L, G + Q, K, P, H]; the key at position p has index p
    history_v: jax.Array  # [L, G + Q, K, P, H]
    history_length: jax.Array  # int32 [G + Q]
    turn_k: jax.Array  # [L, G, K, C, S, H]; index s has position history_length + s
    turn_v: jax.Array  # [L, G, K, C, S, H]
    turn_length: jax.Array  # int32 [G, C]


HISTORY_AXES = ("layers", "groups", "kv_heads", "slots", "head_dim")
TURN_AXES = ("layers", "groups", "kv_heads", "candidates", "slots", "head_dim")

CACHE_AXES = KVCache(
    history_k=HISTORY_AXES,
    history_v=HISTORY_AXES,
    history_length=("groups",),
    turn_k=TURN_AXES,
    turn_v=TURN_AXES,
    turn_length=("groups", "candidates"),
)


def stored_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the type in which a cache of `dtype` lies in memory."""
    return jnp.uint16 if dtype == jnp.bfloat16 else dtype


def load(stored: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns keys or values read from a cache, as `dtype`."""
    values = jax.lax.bitcast_convert_type(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored
    return values.astype(dtype)


def slot_histories(history: jax.Array, layer: jax.Array, slots: int) -> jax.Array:
    """Returns one layer of the slots' histories, [G, K, P, H]: one slice, of which XLA copies nothing."""
    at, (_, _, K, P, H) = (layer, 0, 0, 0, 0), history.shape
    return jax.lax.dynamic_slice(history, at, (1, slots, K, P, H))[0]


def _store(values: jax.Array, like: jax.Array) -> jax.Array:
    if like.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return values.astype(like.dtype)


def set_history(cache: KVCache, groups_R: jax.Array, lengths_R: jax.Array) -> KVCache:
    """Returns the cache with the histories of `groups` cut to `lengths` and their turns emptied."""
    return cache.replace(
        history_length=cache.history_length.at[groups_R].set(lengths_R, mode="drop"),
        turn_length=cache.turn_length.at[groups_R].set(0, mode="drop"),
    )


def copy_history(cache: KVCache, source_R: jax.Array, target_R: jax.Array, lengths_R: jax.Array) -> KVCache:
    """Returns the cache in which each target group starts with the first `lengths` tokens of its source.

    Rows are copied in order. Turns of the targets are emptied; target G + Q marks a padding row, and
    padding rows come last.
    """
    L, groups = cache.history_k.shape[:2]
    source_R, target_R = map(jnp.asarray, (source_R, target_R))
    real = (target_R < groups).sum()

    def copy_slice(i, histories):
        row, layer = i // L, i % L
        return [x.at[layer, target_R[row]].set(x[layer, source_R[row]]) for x in histories]

    # One slice at a time: XLA on TPU copies the whole cache, twice, for one gather of several rows.
    histories = [cache.history_k, cache.history_v]
    history_k, history_v = jax.lax.fori_loop(0, L * real, copy_slice, histories)
    return set_history(cache.replace(history_k=history_k, history_v=history_v), target_R, lengths_R)


def commit_turns(cache: KVCache, groups_R: jax.Array) -> KVCache:
    """Returns the cache with the turns of `groups` moved to the end of their histories.

    Active groups are distinct slots; group G + Q marks a padding row. Raises ValueError where a group has
    several candidates.
    """
    L, _, _, C = cache.turn_k.shape[:4]
    if C != 1:
        raise ValueError(f"a group of {C} candidates has no one turn to commit: use a cache with 1 candidate")
    start_R = cache.history_length.at[groups_R].get(mode="clip")
    length_R = cache.turn_length.at[groups_R, 0].get(mode="clip")

    def commit(layer, history, turn):
        rows_RSKH = jax.lax.map(lambda group: turn[layer, group, :, 0].swapaxes(0, 1), groups_R)
        return _write(history, layer, groups_R, start_R, length_R, rows_RSKH)

    def commit_layer(layer, histories):
        return commit(layer, histories[0], cache.turn_k), commit(layer, histories[1], cache.turn_v)

    history_k, history_v = jax.lax.fori_loop(0, L, commit_layer, (cache.history_k, cache.history_v))
    committed = cache.replace(history_k=history_k, history_v=history_v)
    return set_history(committed, groups_R, start_R + length_R)


def append_history(
    cache: KVCache,
    layer: jax.Array,
    groups_R: jax.Array,
    lengths_R: jax.Array,
    k_RTKH: jax.Array,
    v_RTKH: jax.Array,
) -> KVCache:
    """Returns the cache with the first `lengths` of T keys and values written behind each history.

    `history_length` stays: it grows once, after the last layer.
    """
    start_R = cache.history_length.at[groups_R].get(mode="clip")

    def write(history, rows_RTKH):
        return _write(history, layer, groups_R, start_R, lengths_R, _store(rows_RTKH, history))

    return cache.replace(history_k=write(cache.history_k, k_RTKH), history_v=write(cache.history_v, v_RTKH))


def append_turn(
    cache: KVCache, layer: jax.Array, active_GC: jax.Array, k_GCKH: jax.Array, v_GCKH: jax.Array
) -> KVCache:
    """Returns the cache with one key and value written behind each active turn; `turn_length` stays."""
    _, G, K, C, S, _ = cache.turn_k.shape
    index_GC = jnp.where(active_GC, cache.turn_length, S)
    g, c, k = jnp.indices((G, C, K), sparse=True)
    # Head by head: for windows over heads XLA on TPU would bring all turns into another order first.
    at = (layer, g, k, c, index_GC[:, :, None])
    return cache.replace(
        turn_k=cache.turn_k.at[at].set(_store(k_GCKH, cache.turn_k), mode="drop"),
        turn_v=cache.turn_v.at[at].set(_store(v_GCKH, cache.turn_v), mode="drop"),
    )


def _write(
    history: jax.Array,
    layer: jax.Array,
    groups_R: jax.Array,
    start_R: jax.Array,
    length_R: jax.Array,
    rows_RTKH: jax.Array,
) -> jax.Array:
    """Returns the history [L, G + Q, K, P, H] with the first `length` tokens of each row behind `start`.

    One row after the other, as the slice that it is, and in the order in which the cache lies: for a write,
    XLA on TPU would rather bring the whole of it into another order and back.
    """
    _, groups, K, P, H = history.shape
    groups_R, start_R, length_R = map(jnp.asarray, (groups_R, start_R, length_R))
    window = min(rows_RTKH.shape[1], P)

    def write_row(r, history):
        first = jnp.minimum(start_R[r], P - window)  # a slice ends inside the capacity
        token = first + jnp.arange(window) - start_R[r]
        real = (token >= 0) & (token < length_R[r]) & (groups_R[r] < groups)
        at = (layer, jnp.minimum(groups_R[r], groups - 1), 0, first, 0)
        old = jax.lax.dynamic_slice(history, at, (1, 1, K, window, H))
        new = jnp.take(rows_RTKH[r], token, axis=0, mode="clip").swapaxes(0, 1)
        written = jax.lax.dynamic_update_slice(history, jnp.where(real[:, None], new, old), at)
        return with_layout_constraint(written, Layout(tuple(range(written.ndim))))

    return jax.lax.fori_loop(0, len(groups_R), write_row, history)
