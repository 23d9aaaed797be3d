"""The published sizes of Qwen3, read from the config.json of each checkpoint, counted and laid out."""

import json
import math

import jax
import pytest
from flax.traverse_util import flatten_dict

from mopd_jax.model import hf
from mopd_jax.model.hf_layout import layout
from mopd_jax.model.qwen3 import Qwen3, Qwen3Config
from mopd_jax.model.sharding import abstract_params, make_mesh, param_shardings

COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def published(hidden: int, intermediate: int, layers: int, heads: int, **changes) -> dict:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate}
    return COMMON | sizes | {"num_hidden_layers": layers, "num_attention_heads": heads} | changes


SIZES = {
    "Qwen3-0.6B": (published(1024, 3072, 28, 16), 596_049_920),
    "Qwen3-1.7B": (published(2048, 6144, 28, 16), 1_720_574_976),
    "Qwen3-4B-Instruct-2507": (
        published(2560, 9728, 36, 32, max_position_embeddings=262_144, rope_theta=5_000_000),
        4_022_468_096,
    ),
    "Qwen3-8B": (published(4096, 12_288, 36, 32, tie_word_embeddings=False), 8_190_735_360),
}


@pytest.fixture(params=SIZES)
def size(request, tmp_path) -> tuple[Qwen3Config, int]:
    """Config as read from a folder, and the published number of parameters."""
    config, count = SIZES[request.param]
    (tmp_path / "config.json").write_text(json.dumps(config))
    return hf.read_config(tmp_path), count


def test_number_of_parameters(size):
    config, count = size
    assert config.rope_theta == (5e6 if config.max_position_embeddings == 262_144 else 1e6)
    table = layout(config)
    assert sum(math.prod(leaf.shape(config.num_layers)) for leaf in table.values()) == count
    stored = {name: leaf for leaf in table.values() for name in leaf.names(range(config.num_layers))}
    assert sum(math.prod(leaf.stored_shape) for leaf in stored.values()) == count
    assert len(stored) == 11 * config.num_layers + (2 if config.tie_word_embeddings else 3)
    shapes = {path: x.shape for path, x in flatten_dict(abstract_params(Qwen3(config)), sep="/").items()}
    assert shapes == {path: leaf.shape(config.num_layers) for path, leaf in table.items()}


@pytest.mark.parametrize("shape", [(1, 8, 1), (1, 4, 2), (1, 1, 8)])
def test_every_size_is_split_evenly(size, shape):
    """Each of eight devices holds an eighth of everything but the norms, whatever the mesh."""
    config, count = size
    model = Qwen3(config)
    shardings = param_shardings(model, make_mesh(shape))
    shards = jax.tree.map(
        lambda x, layout: math.prod(layout.shard_shape(x.shape)), abstract_params(model), shardings
    )
    norms = sum(n for path, n in flatten_dict(shards).items() if path[-1] == "scale")
    assert norms == config.num_layers * 2 * (config.hidden_size + config.head_dim) + config.hidden_size
    assert sum(jax.tree.leaves(shards)) == (count - norms) // 8 + norms
