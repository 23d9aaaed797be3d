"""The table, what it refuses, and that eight devices compute what one computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mopd_jax.model import sharding
from mopd_jax.model.cache import CACHE_AXES, commit_turns, copy_history
from mopd_jax.model.logprobs import token_logprobs
from mopd_jax.model.qwen3 import init_cache
from tests.tiny_qwen3 import assert_trees_close, make_model, make_params, packed, random_ids


@pytest.fixture(scope="module")
def mesh():
    return sharding.make_mesh((2, 2, 2))


@pytest.fixture(scope="module")
def model():
    return make_model(vocab_size=38)  # even, so that two devices split it


@pytest.fixture(scope="module")
def params(model):
    return make_params(model)


# ---- the table


def test_names_become_mesh_axes():
    assert sharding.spec(("vocab", "embed")) == PartitionSpec("tensor", "fsdp")
    assert sharding.spec(("batch", "length", "heads", "head_dim")) == PartitionSpec(
        ("data", "fsdp"), None, "tensor", None
    )


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"logical axis 'hedas' .* known are .*'heads'"):
        sharding.spec(("embed", "hedas"))


@pytest.mark.parametrize("axes, taken", [(("heads", "mlp"), "tensor"), (("batch", "embed"), "fsdp")])
def test_two_axes_on_one_mesh_axis_are_refused_and_both_named(axes, taken):
    with pytest.raises(ValueError, match=f"'{axes[0]}' and '{axes[1]}' .* mesh axis '{taken}'"):
        sharding.spec(axes)


def test_constraint_checks_its_names_without_a_mesh_too():
    with pytest.raises(ValueError, match="'tokens'"):
        sharding.constrain(jnp.zeros((2, 2)), "batch", "tokens")


@pytest.mark.parametrize("shape", [(2, 2, 1), (3, 3, 1), (8, 1)])
def test_mesh_that_does_not_use_every_device_is_refused(shape):
    with pytest.raises(ValueError, match=r"needs \d devices, found 8: change mesh\.shape"):
        sharding.make_mesh(shape)


def test_axis_that_does_not_divide_is_refused_in_words(model):
    with pytest.raises(ValueError, match=r"\['k'\]\['kernel'\]: axis 'kv_heads' of size 2 .* tensor = 4"):
        sharding.param_shardings(make_model(vocab_size=40), sharding.make_mesh((2, 1, 4)))


# ---- parameters


def test_tree_has_the_names_and_shapes_that_checkpoints_are_read_into():
    model = make_model()
    V, D, F, N, K, H, L = 37, 16, 24, 4, 2, 8, 3
    expected = {
        "embed": {"embedding": (V, D)},
        "layers": {
            "attn_norm": {"scale": (L, D)},
            "attention": {
                "q": {"kernel": (L, N, D, H)},
                "k": {"kernel": (L, K, D, H)},
                "v": {"kernel": (L, K, D, H)},
                "o": {"kernel": (L, N, H, D)},
                "q_norm": {"scale": (L, H)},
                "k_norm": {"scale": (L, H)},
            },
            "mlp_norm": {"scale": (L, D)},
            "mlp": {
                "gate": {"kernel": (L, D, F)},
                "up": {"kernel": (L, D, F)},
                "down": {"kernel": (L, F, D)},
            },
        },
        "final_norm": {"scale": (D,)},
        "head": {"kernel": (D, V)},
    }
    assert jax.tree.map(lambda x: x.shape, sharding.abstract_params(model)) == expected
    del expected["head"]
    tied = sharding.abstract_params(make_model(tie_word_embeddings=True))
    assert jax.tree.map(lambda x: x.shape, tied) == expected


@pytest.fixture(scope="module")
def initial(model, mesh):
    return sharding.init_params(model, jax.random.key(0), mesh, jnp.bfloat16)


def test_initial_weights_lie_as_the_table_says(initial, mesh):
    params = initial
    attention, mlp = params["layers"]["attention"], params["layers"]["mlp"]
    found = [
        params["embed"]["embedding"],
        params["head"]["kernel"],
        attention["q"]["kernel"],
        attention["k"]["kernel"],
        attention["o"]["kernel"],
        attention["q_norm"]["scale"],
        mlp["up"]["kernel"],
        mlp["down"]["kernel"],
        params["final_norm"]["scale"],
    ]
    expected = [
        ("tensor", "fsdp"),
        ("fsdp", "tensor"),
        (None, "tensor", "fsdp", None),
        (None, "tensor", "fsdp", None),
        (None, "tensor", None, "fsdp"),
        (None, None),
        (None, "fsdp", "tensor"),
        (None, "tensor", "fsdp"),
        (None,),
    ]
    for array, axes in zip(found, expected, strict=True):
        assert array.dtype == jnp.bfloat16
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*axes)), array.ndim)
    assert found[0].addressable_shards[0].data.shape == (19, 8)


def test_initial_weights_do_not_depend_on_the_mesh(model, initial):
    one_device = sharding.make_mesh((1, 1, 1), jax.devices()[:1])
    one = jax.device_get(sharding.init_params(model, jax.random.key(0), one_device, jnp.bfloat16))
    jax.tree.map(np.testing.assert_array_equal, one, jax.device_get(initial))
    assert (one["layers"]["attn_norm"]["scale"] == 1).all()
    kernels = one["layers"]["attention"]["o"]["kernel"], one["layers"]["mlp"]["up"]["kernel"]
    for kernel, fan_in in zip(kernels, (4 * 8, 16), strict=True):
        assert kernel.astype(np.float32).std() == pytest.approx(fan_in**-0.5, rel=0.1)


# ---- programs


def test_constraint_takes_effect_on_a_mesh_and_only_there(mesh):
    constrain = jax.jit(lambda x: sharding.constrain(x, "batch", "length", "heads", "head_dim"))
    x = np.zeros((4, 3, 2, 8), np.float32)
    assert constrain(x).sharding.num_devices == 1
    with sharding.on_mesh(mesh):
        found = constrain(x).sharding
    assert found.is_equivalent_to(NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, "tensor")), 4)


def test_no_constraint_of_the_model_is_ignored(model, params, mesh):
    """Each `constrain` of the forward pass is in the traced program with the layout of the table."""
    rows = [np.ones((4, 6), np.int32)] * 3
    with sharding.on_mesh(mesh):
        text = str(jax.make_jaxpr(lambda p: model.apply({"params": p}, *rows, method="logits"))(params))
    rows_spec = "('data', 'fsdp')"
    assert text.count("sharding_constraint[") == 8
    for layout in (f"{rows_spec}, None, None", f"{rows_spec}, None, 'tensor', None", "'tensor', None"):
        assert layout in text


def test_eight_devices_compute_what_one_computes(model, params, mesh):
    """Log-probabilities and gradients, on one device from all logits at once; gradients lie where
    their parameters lie."""
    rng = np.random.default_rng(0)
    texts = [packed(random_ids(rng, 5), random_ids(rng, 3), length=9) for _ in range(4)]
    rows = tuple(np.concatenate(x) for x in zip(*texts, strict=True))
    source, targets = rng.integers(0, 8, (4, 5)).astype(np.int32), random_ids(rng, 4, 5)
    weights = rng.normal(size=(4, 5)).astype(np.float32)

    def plain(params):
        logits = model.apply({"params": params}, *rows, method="logits")
        logps = jax.nn.log_softmax(logits)[np.arange(4)[:, None], source, targets]
        return (logps * weights).sum(), logps

    def sharded(params, *batch):
        logps, _ = token_logprobs(model, params, *batch, chunk=2)
        return (logps * weights).sum(), logps

    (_, logps), gradient = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
    layout = sharding.param_shardings(model, mesh)
    batch = jax.device_put((*rows, source, targets), sharding.batch_sharding(mesh))
    with sharding.on_mesh(mesh):
        step = jax.jit(jax.value_and_grad(sharded, has_aux=True), out_shardings=(None, layout))
        (_, logps_8), gradient_8 = step(jax.device_put(params, layout), *batch)
    np.testing.assert_allclose(logps_8, logps, rtol=1e-5, atol=1e-5)
    assert_trees_close(gradient_8, gradient, 1e-5)
    for array, where in zip(jax.tree.leaves(gradient_8), jax.tree.leaves(layout), strict=True):
        assert array.sharding.is_equivalent_to(where, array.ndim)


def test_sampler_programs_on_a_mesh_are_those_of_one_device(model, params, mesh):
    rng = np.random.default_rng(1)
    G, R = 4, 4
    chunk, groups, lengths = random_ids(rng, R, 5), jnp.array([2, 0, G, 1]), jnp.array([5, 3, 4, 2])
    ids, active = random_ids(rng, G, 1), np.array([[True], [True], [True], [False]])

    def turn(params, cache):
        cache = model.apply({"params": params}, cache, chunk, groups, lengths, method="extend")
        hidden, cache = model.apply({"params": params}, cache, ids, active, method="decode")
        cache = copy_history(
            commit_turns(cache, jnp.array([0, 2])), jnp.array([2]), jnp.array([3]), jnp.array([4])
        )
        return hidden, cache

    cache = init_cache(model.config, G, 1, 12, 3, jnp.float32)
    expected = jax.jit(turn)(params, cache)
    layout = jax.tree.map(
        lambda axes: NamedSharding(mesh, sharding.spec(axes)),
        CACHE_AXES,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    placed = jax.device_put(params, sharding.param_shardings(model, mesh)), jax.device_put(cache, layout)
    with sharding.on_mesh(mesh):
        found = jax.jit(turn, donate_argnums=1, out_shardings=(None, layout))(*placed)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[1].history_length, [4, 2, 6, 4])
