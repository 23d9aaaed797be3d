"""Packed rows, cached runs and their equality; what the cache writes, shares and keeps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mopd_jax.config import Remat
from mopd_jax.model.cache import KVCache, commit_turns, copy_history, set_history
from mopd_jax.model.qwen3 import Layer, PackedContext, Qwen3, init_cache, rotate
from tests.tiny_qwen3 import assert_trees_close, make_model, make_params, packed, random_ids

G, C, P, S = 4, 5, 24, 6
PREFILL_ROWS, PREFILL_TOKENS = 3, 7


@pytest.fixture(scope="module")
def model() -> Qwen3:
    return make_model()


@pytest.fixture(scope="module")
def params(model) -> dict:
    return make_params(model)


class Runner:
    """The model's three ways to run, jitted once for all tests of the module."""

    def __init__(self, model: Qwen3, params: dict):
        self.model, self.params = model, params
        apply = functools.partial(model.apply, {"params": params})
        self._full = jax.jit(apply)
        self._extend = jax.jit(functools.partial(apply, method="extend"), donate_argnums=0)
        self.decode = jax.jit(functools.partial(apply, method="decode"), donate_argnums=0)

    def cache(self, candidates: int = C, dtype=jnp.float32, parked: int = 0) -> KVCache:
        return init_cache(self.model.config, G, candidates, P, S, dtype, parked)

    def full(self, text: np.ndarray) -> np.ndarray:
        """Hidden states [len(text), D] without any cache."""
        return np.asarray(self._full(*packed(text, length=P + S)))[0, : len(text)]

    def extend(self, cache: KVCache, chunks: dict[int, np.ndarray]) -> KVCache:
        """Appends one chunk per group, at the one compiled shape; unused rows are padding."""
        ids = np.full((PREFILL_ROWS, PREFILL_TOKENS), 1, np.int32)
        padding = len(cache.history_length)
        groups, lengths = np.full(PREFILL_ROWS, padding, np.int32), np.full(PREFILL_ROWS, 5, np.int32)
        for row, (group, chunk) in enumerate(chunks.items()):
            ids[row, : len(chunk)], groups[row], lengths[row] = chunk, group, len(chunk)
        return self._extend(cache, ids, groups, lengths)

    def prefill(self, cache: KVCache, group: int, text: np.ndarray, cut: int = PREFILL_TOKENS) -> KVCache:
        for start in range(0, len(text), cut):
            cache = self.extend(cache, {group: text[start : start + cut]})
        return cache


@pytest.fixture(scope="module")
def runner(model, params) -> Runner:
    return Runner(model, params)


def arrays(cache: KVCache) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(cache)]


# ---- sizes


@pytest.mark.parametrize(
    "change, message",
    [({"num_heads": 3}, "num_heads = 3 is no multiple of num_kv_heads = 2"), ({"head_dim": 7}, "odd")],
)
def test_senseless_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_model(**change)


def test_config_is_hashable_and_comparable(model):
    assert hash(model.config) == hash(make_model().config)
    assert model.config != dataclasses.replace(model.config, remat=Remat.FULL)


# ---- packed rows


def test_rotation_is_the_pairwise_turn_and_depends_on_distance_only():
    x = np.zeros((1, 2, 1, 4), np.float32)
    x[..., 0], x[..., 1] = 1.0, 2.0
    turned = np.asarray(rotate(x, np.array([[0, 3]]), 100.0))
    np.testing.assert_allclose(turned[0, 0, 0], [1, 2, 0, 0], rtol=1e-6)
    expected = [np.cos(3), 2 * np.cos(0.3), np.sin(3), 2 * np.sin(0.3)]
    np.testing.assert_allclose(turned[0, 1, 0], expected, rtol=1e-5)

    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)
    turn = jax.jit(rotate, static_argnums=2)

    def product(i, j):
        return (
            np.asarray(turn(q, np.array([[i]]), 100.0)) * np.asarray(turn(k, np.array([[j]]), 100.0))
        ).sum()

    np.testing.assert_allclose(product(9, 4), product(25, 20), rtol=1e-4)
    assert abs(product(9, 4) - product(9, 5)) > 1e-2


def test_scan_over_layers_is_one_layer_after_the_other(model, params):
    ids, positions, segments = packed(random_ids(np.random.default_rng(0), 9), length=9)
    x = params["embed"]["embedding"][ids]
    for i in range(model.config.num_layers):
        one = jax.tree.map(lambda w, i=i: w[i], params["layers"])
        (x, _), _ = Layer(model.config).apply(
            {"params": one}, (x, None), i, positions, PackedContext(segments)
        )
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * params["final_norm"]["scale"]
    expected = jax.jit(model.apply)({"params": params}, ids, positions, segments)
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-5)


def gradients(model: Qwen3):
    """Jitted value and gradient of the hidden states' sum under random weights."""
    return jax.jit(
        jax.value_and_grad(lambda p, weights, *rows: (model.apply({"params": p}, *rows) * weights).sum())
    )


@pytest.fixture(scope="module")
def texts():
    return [random_ids(np.random.default_rng(1), n) for n in (6, 1, 4)]


@pytest.fixture(scope="module")
def weights():
    """Weights of the three texts packed into a row of 14, of which 3 are padding."""
    drawn = np.random.default_rng(2).normal(size=(1, 14, 16)).astype(np.float32)
    drawn[:, 11:] = 0
    return drawn


@pytest.fixture(scope="module")
def packed_gradients(model):
    return gradients(model)


@pytest.fixture(scope="module")
def packed_result(packed_gradients, params, texts, weights):
    return packed_gradients(params, weights, *packed(*texts, length=14))


def test_recomputed_layers_give_the_same_values_and_gradients(params, texts, weights, packed_result):
    recomputed = gradients(make_model(remat=Remat.FULL))
    value, gradient = recomputed(params, weights, *packed(*texts, length=14))
    np.testing.assert_allclose(value, packed_result[0], rtol=1e-5)
    assert_trees_close(gradient, packed_result[1], 1e-5)


def test_backward_keeps_only_what_remat_says(params):
    """Per token and layer: its input (FULL), and beside it the outputs of its seven projections (MINIMAL)."""
    rows = packed(random_ids(np.random.default_rng(0), 9), length=9)

    def kept(remat: Remat) -> set[tuple[int, ...]]:
        model = make_model(remat=remat)
        _, backward = jax.vjp(lambda p: model.apply({"params": p}, *rows), params)
        L = model.config.num_layers
        leaves = [x.shape for x in jax.tree.leaves(backward)]
        return {x[2:] for x in leaves if x[:2] == (L, 9)} | {x[3:] for x in leaves if x[:3] == (L, 1, 9)}

    c = make_model().config
    D, F, H = c.hidden_size, c.intermediate_size, c.head_dim
    assert kept(Remat.FULL) == {(D,)}
    assert kept(Remat.MINIMAL) == {(D,), (F,), (c.num_heads, H), (c.num_kv_heads, H)}


def test_packed_rows_are_separate_rows_in_values_and_gradients(model, params, texts, weights, packed_result):
    rows = [np.concatenate(x) for x in zip(*(packed(t, length=6) for t in texts), strict=True)]
    separate = np.zeros((3, 6, 16), np.float32)
    for row, (start, text) in enumerate(zip((0, 6, 7), texts, strict=True)):
        separate[row, : len(text)] = weights[0, start : start + len(text)]
    value, gradient = gradients(model)(params, separate, *rows)
    np.testing.assert_allclose(value, packed_result[0], rtol=1e-5)
    assert_trees_close(gradient, packed_result[1], 1e-5)


def test_row_of_padding_is_finite_in_values_and_gradients(packed_gradients, params):
    result = packed_gradients(params, np.ones((1, 14, 16), np.float32), *packed(length=14))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result))


def test_tied_head_is_the_embedding(params):
    tied = make_model(tie_word_embeddings=True)
    hidden = np.random.default_rng(4).normal(size=(2, 3, 16)).astype(np.float32)
    without_head = {name: params[name] for name in ("embed", "layers", "final_norm")}
    logits = tied.apply({"params": without_head}, hidden, method="unembed")
    np.testing.assert_allclose(
        logits, hidden @ np.asarray(params["embed"]["embedding"]).T, rtol=1e-5, atol=1e-5
    )


# ---- the cache


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_prefill_and_decode_are_the_full_forward(runner, cut):
    """Groups of unequal prompts (one of them empty), five candidates on each, chunks of any size."""
    rng = np.random.default_rng(5)
    prompts = [random_ids(rng, n) for n in (11, 0, 5, 18)]
    turns = random_ids(rng, G, C, S)
    cache = runner.cache()
    for group, prompt in enumerate(prompts):
        cache = runner.prefill(cache, group, prompt, cut)
    np.testing.assert_array_equal(cache.history_length, [11, 0, 5, 18])
    hidden = []
    for step in range(S):
        h, cache = runner.decode(cache, turns[:, :, step], np.ones((G, C), bool))
        hidden.append(np.asarray(h))
    np.testing.assert_array_equal(cache.turn_length, np.full((G, C), S))
    for g, c in np.ndindex(G, C):
        expected = runner.full(np.concatenate([prompts[g], turns[g, c]]))[len(prompts[g]) :]
        np.testing.assert_allclose([h[g, c] for h in hidden], expected, rtol=1e-5, atol=1e-5)


def test_prefill_of_several_groups_in_one_call(runner):
    rng = np.random.default_rng(6)
    first, second = random_ids(rng, 7), random_ids(rng, 4)
    cache = runner.extend(runner.cache(), {3: first, 1: second})
    alone = runner.extend(runner.extend(runner.cache(), {1: second}), {3: first})
    for a, b in zip(arrays(cache), arrays(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_every_bit_is_the_same_however_the_prompt_was_cut(runner):
    text = random_ids(np.random.default_rng(7), 20)
    cuts = [[7, 7, 6], [1, 7, 5, 7], [3] * 6 + [2], [1] * 20]
    caches = []
    for cut in cuts:
        cache = runner.cache()
        for end, length in zip(np.cumsum(cut), cut, strict=True):
            cache = runner.extend(cache, {2: text[end - length : end]})
        hidden, cache = runner.decode(cache, np.full((G, C), 3), np.ones((G, C), bool))
        caches.append([*arrays(cache), np.asarray(hidden)])
    for other in caches[1:]:
        for a, b in zip(caches[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_padding_rows_and_padded_tokens_write_nothing(runner):
    rng = np.random.default_rng(8)
    cache = runner.prefill(runner.cache(), 1, random_ids(rng, 9))
    before = arrays(cache)
    after = runner.extend(cache, {})  # every row addresses group G
    for a, b in zip(before, arrays(after), strict=True):
        np.testing.assert_array_equal(a, b)

    short = runner.extend(after, {1: random_ids(rng, 2)})
    assert not np.asarray(short.history_k)[:, 1, :, 11:].any()
    assert np.asarray(short.history_k)[:, 1, :, :11].all()
    assert not np.asarray(short.history_k)[:, [0, 2, 3]].any()
    np.testing.assert_array_equal(short.history_length, [0, 11, 0, 0])


def test_writes_past_the_capacity_are_dropped(runner):
    rng = np.random.default_rng(9)
    cache = runner.prefill(runner.cache(), 0, random_ids(rng, P - 2))
    before = np.array(cache.history_k)
    after = np.array(runner.extend(cache, {0: random_ids(rng, 5)}).history_k)
    np.testing.assert_array_equal(after[:, 0, :, : P - 2], before[:, 0, :, : P - 2])
    assert after[:, 0, :, P - 2 :].all() and not after[:, 1:].any()


def test_inactive_candidates_write_nothing_and_are_finite(runner):
    rng = np.random.default_rng(10)
    cache = runner.cache()
    active = np.zeros((G, C), bool)
    active[0, 1] = active[2, 4] = True
    hidden, cache = runner.decode(cache, random_ids(rng, G, C), active)
    assert np.isfinite(hidden).all()
    np.testing.assert_array_equal(cache.turn_length, active)
    written = np.asarray(cache.turn_k).any(axis=(0, 2, 5))  # [G, C, S]
    np.testing.assert_array_equal(written[..., 0], active)
    assert not written[..., 1:].any()


def test_candidates_do_not_see_each_other(runner):
    rng = np.random.default_rng(11)
    ids = random_ids(rng, 2, G, C)
    changed = ids.copy()
    changed[:, :, 1:] = (ids[:, :, 1:] + 1) % 37
    results = []
    for steps in (ids, changed):
        cache = runner.prefill(runner.cache(), 0, random_ids(np.random.default_rng(0), 5))
        for step in steps:
            hidden, cache = runner.decode(cache, step, np.ones((G, C), bool))
        results.append(np.asarray(hidden))
    np.testing.assert_array_equal(results[0][:, 0], results[1][:, 0])
    assert (results[0][:, 1:] != results[1][:, 1:]).any()


def test_committed_turn_is_history_and_the_conversation_goes_on(runner):
    """Prompt, turn, documents, turn: each token enters the cache once, and the last sees all of them."""
    rng = np.random.default_rng(12)
    prompt, turn, documents, last = (random_ids(rng, n) for n in (6, 4, 5, 1))
    cache = runner.prefill(runner.cache(candidates=1), 2, prompt)
    active = np.zeros((G, 1), bool)
    active[2] = True
    for token in turn:
        _, cache = runner.decode(cache, np.full((G, 1), token), active)
    other = np.array(cache.history_k)[:, [0, 1, 3]]
    cache = jax.jit(commit_turns, donate_argnums=0)(cache, np.array([2, G]))
    np.testing.assert_array_equal(cache.history_length, [0, 0, 10, 0])
    np.testing.assert_array_equal(cache.turn_length, np.zeros((G, 1)))
    np.testing.assert_array_equal(np.asarray(cache.history_k)[:, [0, 1, 3]], other)
    cache = runner.extend(cache, {2: documents})
    hidden, _ = runner.decode(cache, np.full((G, 1), last[0]), active)
    expected = runner.full(np.concatenate([prompt, turn, documents, last]))[-1]
    np.testing.assert_allclose(hidden[2, 0], expected, rtol=1e-5, atol=1e-5)


def test_several_candidates_cannot_be_committed(runner):
    with pytest.raises(ValueError, match="group of 5 candidates has no one turn"):
        commit_turns(runner.cache(), np.array([0]))


def test_copied_prefix_continues_like_its_own(runner):
    rng = np.random.default_rng(13)
    text, own = random_ids(rng, 12), random_ids(rng, 4)
    cache = runner.prefill(runner.cache(), 0, text)
    cache = runner.prefill(cache, 3, own)
    kept = np.array(cache.history_k)[:, [0, 3]]
    # Group 1 takes 8 tokens of group 0, group 2 then 5 of group 1; the last row is padding.
    rows = np.array([[0, 1, 2], [1, 2, G], [8, 5, 9]])
    cache = jax.jit(copy_history, donate_argnums=0)(cache, *rows)
    np.testing.assert_array_equal(cache.history_length, [12, 8, 5, 4])
    np.testing.assert_array_equal(np.asarray(cache.history_k)[:, [0, 3]], kept)
    cache = runner.extend(cache, {1: own, 2: own})
    hidden, _ = runner.decode(cache, np.full((G, C), 9), np.ones((G, C), bool))
    for group, shared in ((1, 8), (2, 5)):
        expected = runner.full(np.concatenate([text[:shared], own, [9]]))[-1]
        np.testing.assert_allclose(hidden[group, 0], expected, rtol=1e-5, atol=1e-5)


def test_a_history_is_parked_and_taken_back_bit_for_bit(runner):
    """Three groups behind the slots: nothing that decodes reads or writes them."""
    rng, parked = np.random.default_rng(15), G + 1
    text, other = random_ids(rng, 12), random_ids(rng, 7)
    padding = G + 3

    def copy(cache: KVCache, source: int, target: int) -> KVCache:
        rows = np.array([[source, 0], [target, padding], [12, 3]])
        return jax.jit(copy_history, donate_argnums=0)(cache, *rows)

    def decode(cache: KVCache) -> tuple[np.ndarray, KVCache]:
        hidden, cache = runner.decode(cache, np.full((G, C), 9), np.ones((G, C), bool))
        return np.asarray(hidden), cache

    cache = runner.prefill(runner.cache(parked=3), 2, text)
    expected, _ = decode(jax.tree.map(jnp.copy, cache))
    cache = copy(cache, 2, parked)
    cache = runner.prefill(set_history(cache, np.array([2]), np.array([0])), 2, other)
    hidden, cache = decode(cache)
    assert (hidden[2] != expected[2]).any()
    np.testing.assert_array_equal(cache.history_length, [0, 0, 7, 0, 0, 12, 0])
    assert not np.asarray(cache.history_k)[:, [G, G + 2]].any()
    hidden, _ = decode(copy(cache, parked, 1))
    np.testing.assert_array_equal(hidden[1], expected[2])


def test_cut_history_forgets_what_was_behind(runner):
    rng = np.random.default_rng(14)
    old, new = random_ids(rng, 14), random_ids(rng, 3)
    cache = runner.prefill(runner.cache(), 0, old)
    _, cache = runner.decode(cache, random_ids(rng, G, C), np.ones((G, C), bool))
    cache = set_history(cache, np.array([0, G]), np.array([6, 2]))
    np.testing.assert_array_equal(cache.history_length, [6, 0, 0, 0])
    np.testing.assert_array_equal(cache.turn_length, [[0] * C] + [[1] * C] * 3)
    cache = runner.extend(cache, {0: new})
    hidden, _ = runner.decode(cache, np.full((G, C), 9), np.ones((G, C), bool))
    expected = runner.full(np.concatenate([old[:6], new, [9]]))[-1]
    np.testing.assert_allclose(hidden[0, 0], expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_cache_holds_the_rounded_keys(runner, params):
    """A bfloat16 model through a bfloat16 cache is itself without a cache, up to the order of sums."""
    half = Runner(make_model(dtype=jnp.bfloat16), params)
    text = random_ids(np.random.default_rng(15), 10)
    cache = half.prefill(half.cache(dtype=jnp.bfloat16), 0, text[:9])
    hidden, _ = half.decode(cache, np.full((G, C), text[9]), np.ones((G, C), bool))
    assert hidden.dtype == jnp.bfloat16
    found, expected, exact = (
        np.asarray(x, np.float32) for x in (hidden[0, 0], half.full(text)[-1], runner.full(text)[-1])
    )
    # The cache may add as much rounding as bfloat16 brings without it; that much, and not none.
    rounding = np.abs(expected - exact).max()
    assert 1e-4 < rounding / np.abs(exact).max() < 5e-2
    assert np.abs(found - expected).max() <= 2 * rounding


# ---- memory


@pytest.mark.parametrize(
    "program, dtype",
    [
        ("decode", jnp.float32),
        ("decode", jnp.bfloat16),
        ("extend", jnp.bfloat16),
        ("copy", jnp.bfloat16),
        ("commit", jnp.bfloat16),
    ],
)
def test_cache_is_updated_in_place(program, dtype):
    """Over 24 layers no program holds more than a few layers' worth of the cache beside the cache."""
    L = 24
    model = make_model(num_layers=L, dtype=dtype)
    candidates = 1 if program == "commit" else C
    cache = jax.eval_shape(lambda: init_cache(model.config, 8, candidates, 512, 16, dtype))
    params = jax.eval_shape(lambda: make_params(model))

    def ids(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    functions = {
        "decode": (
            functools.partial(model.apply, method="decode"),
            ids(8, C),
            jax.ShapeDtypeStruct((8, C), bool),
        ),
        "extend": (functools.partial(model.apply, method="extend"), ids(2, 4), ids(2), ids(2)),
        "copy": (lambda _, cache, *rows: copy_history(cache, *rows), ids(3), ids(3), ids(3)),
        "commit": (lambda _, cache, groups: commit_turns(cache, groups), ids(3)),
    }
    function, *rest = functions[program]
    compiled = jax.jit(function, donate_argnums=1).lower({"params": params}, cache, *rest).compile()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < 6 * size / L


def test_candidates_share_their_history_in_memory(model):
    one, five = (
        sum(
            x.size * 4
            for x in jax.tree.leaves(
                jax.eval_shape(lambda c=c: init_cache(model.config, G, c, P, S, jnp.float32))
            )
        )
        for c in (1, 5)
    )
    turn = 2 * model.config.num_layers * G * S * 2 * 8 * 4  # keys and values of one candidate per group
    assert five - one == 4 * turn + 4 * G * 4  # and its turn_length
