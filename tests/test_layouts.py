"""Every compiled program lies as the table says: no constraint was dropped without a word."""

import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from mopd_jax.config import LearnConfig, OptimConfig
from mopd_jax.learn.learner import Learner
from mopd_jax.learn.loss import Streams, Sums
from mopd_jax.learn.packing import Packed
from mopd_jax.learn.score import Frozen, Scorer
from mopd_jax.model import sharding
from mopd_jax.model.cache import CACHE_AXES
from mopd_jax.rollout.sampler import BLOCKS, Sampler
from tests.tiny_qwen3 import make_model

B, T, M = 8, 10, 6
LEARN = LearnConfig(logit_chunk=8)


@pytest.fixture(scope="module")
def mesh():
    return sharding.make_mesh((2, 2, 2))


@pytest.fixture(scope="module")
def model():
    return make_model(num_layers=2, vocab_size=40)


@pytest.fixture(scope="module")
def learner(model, mesh):
    return Learner(model, LEARN, OptimConfig(), 10, mesh)


@pytest.fixture(scope="module")
def rows(mesh):
    """A micro-batch and its streams, without values."""

    def array(width: int, dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((B, width), dtype, sharding=sharding.batch_sharding(mesh))

    return (
        Packed(*[array(T, np.int32)] * 3, *[array(M, np.int32)] * 2),
        Streams(*[array(M, np.float32)] * 4),
    )


def assert_lies(found, expected, arrays) -> None:
    """Compares the shardings of a program with those that the table gives for its arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    for (path, array), a, b in zip(leaves, jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.is_equivalent_to(b, len(array.shape)), (
            f"{jax.tree_util.keystr(path)}: {a}, the table says {b}"
        )


def layout(arrays):
    return jax.tree.map(lambda x: x.sharding, arrays)


def with_layout(arrays, shardings):
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), arrays, shardings)


def shapes_in(compiled) -> set[tuple[int, ...]]:
    """Returns the shapes of all float arrays in a compiled program, as one device holds them."""
    return {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())}


def test_a_micro_batch_leaves_gradients_where_the_weights_lie(learner, mesh, rows):
    state = learner.abstract_state()
    figure = jax.ShapeDtypeStruct((), np.float32, sharding=sharding.replicated(mesh))
    total = state.params, Sums(figure, figure, figure)
    with sharding.on_mesh(mesh):
        compiled = learner._accumulate.lower(state.params, total, *rows).compile()
    assert_lies(
        compiled.input_shardings[0], layout((state.params, total, *rows)), (state.params, total, *rows)
    )
    assert_lies(compiled.output_shardings, layout(total), total)
    # Residual stream, heads, MLP, each as [rows of one device, T, part of one device].
    found = shapes_in(compiled)
    assert {(2, T, 16), (2, T, 2, 8), (2, T, 12)} <= found
    assert found & {(B, T, 16), (B // 2, T, 16), (B, T, 4, 8), (2, T, 4, 8), (2, T, 24)} == set()


def test_the_heads_gradient_is_summed_over_the_shards_once(learner, mesh, rows):
    """After the last chunk of positions, not after each: it is as large as the head."""
    with sharding.on_mesh(mesh):
        text = learner.lower(*rows)["accumulate"].compile().as_text()
    assert rows[0].source.size // (B // 4) > LEARN.logit_chunk  # several chunks
    head = r"f32\[16,20\].* all-reduce\("  # the width × half of the vocabulary
    sums = [c.splitlines()[0] for c in re.split(r"\n(?=\S)", text) if re.search(head, c)]
    assert len(sums) == 1 and sums[0].startswith("ENTRY")


def test_an_update_leaves_weights_and_moments_where_they_were(learner, mesh):
    state = learner.abstract_state()
    with sharding.on_mesh(mesh):
        compiled = learner._apply.lower(state, state.params).compile()
    assert_lies(compiled.input_shardings[0], layout((state, state.params)), (state, state.params))
    assert_lies(compiled.output_shardings[0], learner.state_shardings(), state)


def test_scores_are_whole_on_every_device(learner, model, mesh, rows):
    params = learner.abstract_state().params
    scorer = Scorer(model, {"teacher": Frozen(model, params)}, LEARN.logit_chunk, mesh)
    with sharding.on_mesh(mesh):
        compiled = scorer._score.lower(params, {"teacher": params}, rows[0]).compile()
    assert all(s.is_fully_replicated for s in jax.tree.leaves(compiled.output_shardings))
    found = shapes_in(compiled)
    assert {(2, T, 16), (2, T, 2, 8), (2, T, 12)} <= found
    assert found & {(B, T, 16), (B // 2, T, 16), (B, T, 4, 8), (2, T, 4, 8), (2, T, 24)} == set()


@pytest.mark.parametrize("program", ["decode", "extend"])
def test_the_cache_stays_where_it_lies(model, program):
    local = sharding.local_mesh(2)
    sampler = Sampler(model, (1,), 4, local)
    state = sampler.init(groups=4, candidates=2, history=24, turn=8)
    params = with_layout(sharding.abstract_params(model), sharding.param_shardings(model, local))
    prompt = [np.zeros(shape, np.int32) for shape in ((3, 5), (3,), (3,))]
    arguments = {"decode": [1], "extend": prompt}[program]
    with sharding.on_mesh(local):
        compiled = getattr(sampler, f"_{program}").lower(state, params, *arguments).compile()
    by_axes = jax.tree.map(
        lambda axes: NamedSharding(local, sharding.spec(axes)), CACHE_AXES, is_leaf=lambda x: type(x) is tuple
    )
    (before, held, *_), _ = compiled.input_shardings
    assert_lies(before.cache, by_axes, state.cache)
    assert_lies(compiled.output_shardings.cache, by_axes, state.cache)
    if program == "decode":  # extending reads no head
        assert_lies(held, layout(params), params)


def test_no_device_holds_the_logits_of_the_whole_vocabulary():
    """Each draws from its own part of it."""
    vocabulary, slots, local = 7 * BLOCKS, 4 * 3, sharding.local_mesh(2)
    model = make_model(vocab_size=vocabulary)
    params = with_layout(sharding.abstract_params(model), sharding.param_shardings(model, local))
    sampler = Sampler(model, (1,), 4, local)
    state = sampler.abstract_state(groups=4, candidates=3, history=24, turn=8)
    compiled = sampler.lower(state, params, rows=2, tokens=8)["decode"].compile()
    sizes = {math.prod(shape) for shape in shapes_in(compiled)}
    assert slots * vocabulary // 2 in sizes and slots * vocabulary not in sizes


def test_parking_places_are_neither_copied_nor_read_to_decode(model):
    """The temporaries of the compiled program do not grow with them."""
    mesh = sharding.local_mesh(1)
    sampler = Sampler(model, (1,), 4, mesh)
    params = with_layout(sharding.abstract_params(model), sharding.param_shardings(model, mesh))

    def temporaries(parked: int) -> int:
        state = sampler.abstract_state(groups=4, candidates=1, history=64, turn=8, parked=parked)
        compiled = sampler.lower(state, params, rows=2, tokens=8)["decode"].compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(100) <= temporaries(0)
