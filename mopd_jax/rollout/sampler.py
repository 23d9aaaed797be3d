"""Jitted prefill and decode: state → state, donated.

Shape letters: G cache groups that decode, the slots, Q parking places, C candidates per group, S turn
capacity, P history capacity, R prefill rows, T tokens of one prefill call, V vocabulary, L layers.

A group holds one prompt; its C candidates share the prompt's keys and values and differ in their
private turn. The last prompt token is not prefilled: it is the first decode input, so that every
sampled token and log-probability comes out of one and the same program.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.stages import Lowered

from mopd_jax.model import cache, qwen3, sharding
from mopd_jax.model.cache import KVCache
from mopd_jax.model.qwen3 import Qwen3

BLOCKS = 128
"""Blocks of the two-level draw. They divide Qwen3's vocabulary (128 × 1,187) and go evenly over the devices
of a host: each sums its own part, and none holds all weights."""


@flax.struct.dataclass
class SamplerState:
    """Everything one lane of slots needs to decode."""

    cache: KVCache
    inputs: jax.Array
    """int32 [G, C]: the id each slot consumes next."""
    keys: jax.Array
    """uint32 [G, C, 2]: threefry key data of the slot's turn."""
    counts: jax.Array
    """int32 [G, C]: tokens sampled in this turn."""
    limits: jax.Array
    """int32 [G]: most tokens this turn may have."""
    active: jax.Array
    """bool [G, C]: still decoding."""
    ids: jax.Array
    """int32 [G, C, S]: sampled ids."""
    logps: jax.Array
    """float32 [G, C, S]: their log-probabilities."""
    steps: jax.Array
    """int32 []: decode steps taken since the state was made."""


def init_state(
    config: qwen3.Qwen3Config, groups: int, candidates: int, history: int, turn: int, parked: int
) -> SamplerState:
    """Returns an empty lane: G groups of C candidates, P = history, S = turn, Q = parked, in the config's
    dtype."""
    slots = (groups, candidates)
    return SamplerState(
        cache=qwen3.init_cache(config, groups, candidates, history, turn, config.dtype, parked),
        inputs=jnp.zeros(slots, jnp.int32),
        keys=jnp.zeros((*slots, 2), jnp.uint32),
        counts=jnp.zeros(slots, jnp.int32),
        limits=jnp.zeros(groups, jnp.int32),
        active=jnp.zeros(slots, bool),
        ids=jnp.zeros((*slots, turn), jnp.int32),
        logps=jnp.zeros((*slots, turn), jnp.float32),
        steps=jnp.zeros((), jnp.int32),
    )


def draw(logits_NV: jax.Array, uniforms_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Samples from softmax(logits) by inverting the cumulative sum, one uniform number per row.

    The sum has two levels (blocks, then inside one block): on CPU a tenth of the time of Gumbel
    noise over the whole vocabulary. Returns ids int32 [N] and log-probabilities float32 [N].
    """
    n, vocab = logits_NV.shape
    top = logits_NV.max(-1, keepdims=True)
    weights = jnp.exp(logits_NV - top)
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % BLOCKS))).reshape(n, BLOCKS, -1)
    sums = blocks.sum(-1)
    total = sums.sum(-1)
    block, rest = _invert(sums, uniforms_N * total)
    inside, _ = _invert(jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0], rest)
    ids = (block * blocks.shape[-1] + inside).astype(jnp.int32)
    logps = jnp.take_along_axis(logits_NV, ids[:, None], 1)[:, 0] - top[:, 0] - jnp.log(total)
    return ids, logps


def _invert(weights_NK: jax.Array, targets_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the first index at which the cumulative sum passes the target, and the target less the sum
    before it.

    The sum of floats is not exactly monotonic, and rounding can put the target past its end: an entry
    of weight 0 is never chosen, and where none passes the target the heaviest stands in.
    """
    cumulative = jnp.cumsum(weights_NK, -1)
    passes = (cumulative > targets_N[:, None]) & (weights_NK > 0)
    index = jnp.where(passes.any(-1), passes.argmax(-1), weights_NK.argmax(-1))
    before = jnp.pad(cumulative[:, :-1], ((0, 0), (1, 0)))
    return index, targets_N - jnp.take_along_axis(before, index[:, None], 1)[:, 0]


def _uniform(key_data: jax.Array, count: jax.Array) -> jax.Array:
    """Returns the uniform number of a turn's `count`-th token."""
    key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, count))


def _decode_step(model: Qwen3, eos_ids: tuple[int, ...], params, state: SamplerState) -> SamplerState:
    """Feeds each active slot its input id and samples the next one."""
    hidden, grown = model.apply(
        {"params": params}, state.cache, state.inputs, state.active, method=Qwen3.decode
    )
    logits = model.apply({"params": params}, hidden, method=Qwen3.unembed)
    uniforms = jax.vmap(_uniform)(state.keys.reshape(-1, 2), state.counts.reshape(-1))
    ids, logps = draw(logits.reshape(-1, logits.shape[-1]), uniforms)
    ids, logps = ids.reshape(state.inputs.shape), logps.reshape(state.inputs.shape)
    groups, candidates = jnp.indices(state.inputs.shape)
    # An inactive slot writes outside its turn, where the update is dropped.
    place = jnp.where(state.active, state.counts, state.ids.shape[-1])
    counts = state.counts + state.active
    ended = jnp.isin(ids, jnp.asarray(eos_ids)) | (counts >= state.limits[:, None])
    return state.replace(
        cache=grown,
        inputs=jnp.where(state.active, ids, state.inputs),
        counts=counts,
        active=state.active & ~ended,
        ids=state.ids.at[groups, candidates, place].set(ids, mode="drop"),
        logps=state.logps.at[groups, candidates, place].set(logps, mode="drop"),
        steps=state.steps + 1,
    )


def _start(state: SamplerState, groups_R, inputs_R, keys_RC2, limits_R) -> SamplerState:
    def at(array):
        return array.at[groups_R]

    return state.replace(
        inputs=at(state.inputs).set(inputs_R[:, None], mode="drop"),
        keys=at(state.keys).set(keys_RC2, mode="drop"),
        counts=at(state.counts).set(0, mode="drop"),
        limits=at(state.limits).set(limits_R, mode="drop"),
        active=at(state.active).set(True, mode="drop"),
    )


def _commit(state: SamplerState, groups_R) -> SamplerState:
    return state.replace(cache=cache.commit_turns(state.cache, groups_R))


def _copy(state: SamplerState, sources_R, groups_R, lengths_R) -> SamplerState:
    return state.replace(cache=cache.copy_history(state.cache, sources_R, groups_R, lengths_R))


def _rewind(state: SamplerState, groups_R, lengths_R) -> SamplerState:
    return state.replace(cache=cache.set_history(state.cache, groups_R, lengths_R))


class Sampler:
    """The compiled programs of the lanes. Holds no state and no weights.

    Every method takes a `SamplerState`, donates it and returns the next; group indices equal to G + Q
    are padding, come last and touch nothing.
    """

    def __init__(self, model: Qwen3, eos_ids: tuple[int, ...], decode_steps: int, mesh: Mesh):
        self.eos_ids = eos_ids
        self._model, self._steps, self._mesh = model, decode_steps, mesh
        jit = functools.partial(jax.jit, donate_argnums=0)
        self._extend, self._decode = jit(self._extend_fn), jit(self._decode_fn)
        self._start, self._commit, self._copy, self._rewind = map(jit, (_start, _commit, _copy, _rewind))
        self._layout = self._state_shardings()
        self._init = jax.jit(init_state, static_argnums=range(6), out_shardings=self._layout)

    def _state_shardings(self) -> SamplerState:
        whole = sharding.replicated(self._mesh)
        layout = jax.tree.map(
            lambda _: whole, jax.eval_shape(lambda: init_state(self._model.config, 1, 1, 1, 1, 0))
        )
        by_axes = jax.tree.map(
            lambda axes: NamedSharding(self._mesh, sharding.spec(axes)),
            cache.CACHE_AXES,
            is_leaf=lambda x: isinstance(x, tuple),
        )
        return layout.replace(cache=by_axes)

    def init(self, groups: int, candidates: int, history: int, turn: int, parked: int = 0) -> SamplerState:
        """Returns an empty lane on the mesh, see `init_state`."""
        return self._init(self._model.config, groups, candidates, history, turn, parked)

    def abstract_state(
        self, groups: int, candidates: int, history: int, turn: int, parked: int = 0
    ) -> SamplerState:
        """Returns the shapes and the layout of what `init` returns, without allocating it."""
        sizes = (groups, candidates, history, turn, parked)
        shapes = jax.eval_shape(lambda: init_state(self._model.config, *sizes))
        return sharding.laid_out(shapes, self._layout)

    def lower(self, state: SamplerState, params, rows: int, tokens: int) -> dict[str, Lowered]:
        """Returns the programs that touch the cache, ready to be compiled.

        Args:
          state: see `abstract_state`.
          params: shapes with their shardings.
          rows: R, prompts per prefill call.
          tokens: T, tokens per prompt and prefill call.
        """
        ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, tokens), (rows,))]
        ids_RT, values_R = sharding.laid_out(ints, sharding.replicated(self._mesh))
        with sharding.on_mesh(self._mesh):
            programs = {
                "prefill": self._extend.lower(state, params, ids_RT, values_R, values_R),
                "decode": self._decode.lower(state, params, 1),
            }
        programs["copy"] = self._copy.lower(state, values_R, values_R, values_R)
        if state.inputs.shape[1] == 1:
            programs["commit"] = self._commit.lower(state, values_R)
        return programs

    def _extend_fn(self, state, params, ids_RT, groups_R, lengths_R):
        grown = self._model.apply(
            {"params": params}, state.cache, ids_RT, groups_R, lengths_R, method=Qwen3.extend
        )
        return state.replace(cache=grown)

    def _decode_fn(self, state, params, enough):
        decoding_G = state.active.any(-1)

        def step(carry):
            state, i = carry
            return _decode_step(self._model, self.eos_ids, params, state), i + 1

        def more(carry):
            state, i = carry
            left_G = state.active.any(-1)
            ended = (decoding_G & ~left_G).sum()
            return (i < self._steps) & left_G.any() & (ended < enough)

        return jax.lax.while_loop(more, step, (state, 0))[0]

    def extend(self, state: SamplerState, params, ids_RT, groups_R, lengths_R) -> SamplerState:
        """Appends `lengths` prompt tokens to the histories of `groups`."""
        with sharding.on_mesh(self._mesh):
            return self._extend(state, params, ids_RT, groups_R, lengths_R)

    def start(self, state: SamplerState, groups_R, inputs_R, keys_RC2, limits_R) -> SamplerState:
        """Makes all candidates of `groups` ready to decode from the last prompt token `inputs`."""
        return self._start(state, groups_R, inputs_R, keys_RC2, limits_R)

    def decode(self, state: SamplerState, params, enough: int) -> SamplerState:
        """Samples up to `decode_steps` tokens in every active slot.

        Stops early when none is active, and when `enough` groups have ended: out of them all candidates.
        """
        with sharding.on_mesh(self._mesh):
            return self._decode(state, params, enough)

    def copy(self, state: SamplerState, sources_R, groups_R, lengths_R) -> SamplerState:
        """Copies the first `lengths` tokens of the sources' histories into `groups`."""
        return self._copy(state, sources_R, groups_R, lengths_R)

    def rewind(self, state: SamplerState, groups_R, lengths_R) -> SamplerState:
        """Sets the histories of `groups` to their first `lengths` tokens and empties their turns."""
        return self._rewind(state, groups_R, lengths_R)

    def commit(self, state: SamplerState, groups_R) -> SamplerState:
        """Moves the finished turns of one-candidate `groups` to the end of their histories."""
        return self._commit(state, groups_R)
