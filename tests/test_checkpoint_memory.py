"""Loading and saving a checkpoint take little host memory beside the arrays themselves."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from mopd_jax.model import hf_save
from mopd_jax.model.qwen3 import Qwen3, Qwen3Config
from mopd_jax.model.sharding import init_params, make_mesh

SIZES = {"vocab_size": 32_768, "hidden_size": 512, "intermediate_size": 4096, "num_layers": 6}
CONFIG = Qwen3Config(
    **SIZES,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    rope_theta=1e6,
    tie_word_embeddings=True,
    max_position_embeddings=128,
)
"""60 million parameters. As in Qwen3-0.6B the embedding is larger than any stacked leaf."""
STACKED, TENSOR = 6 * 512 * 4096, 32_768 * 512
"""Parameters of the largest stacked leaf, and of the largest tensor, the embedding."""


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_host_memory_beside_the_arrays(tmp_path, stored):
    """Loading: at most 1.2 × the largest stacked leaf; saving: 2.5 × the largest tensor, as gathered and as
    written. For files and arrays of both types, on one device and on eight."""
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    params = init_params(Qwen3(CONFIG), jax.random.key(0), mesh, jnp.dtype(stored))
    hf_save.save(tmp_path / "saved", CONFIG, params, shard_bytes=100_000_000)
    del params
    command = [sys.executable, "-m", "tests.checkpoint_memory", str(tmp_path / "saved")]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    cases = [json.loads(line) for line in lines]
    assert len(cases) == 4
    for case in cases:
        size = jnp.dtype(case["dtype"]).itemsize
        assert case["load"] <= 1.2 * STACKED * size, case
        assert case["save"] <= 2.5 * TENSOR * size, case
