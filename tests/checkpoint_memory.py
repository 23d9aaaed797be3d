"""Measures the host memory that loading and saving a checkpoint take beside its arrays.

`python -m tests.checkpoint_memory FOLDER` prints one JSON line per case: type of the arrays, mesh, and by how
many bytes anonymous memory rose above what it was before plus what the arrays occupy.
"""

import ctypes
import gc
import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp

from mopd_jax.model import hf, hf_save
from mopd_jax.model.qwen3 import Qwen3
from mopd_jax.model.sharding import make_mesh, param_shardings
from tests.memory import Peak, anonymous_bytes

MESHES = ((1, 1, 1), (1, 4, 2))


def rise(work: Callable[[], Any]) -> tuple[int, Any]:
    """Returns by how much anonymous memory rises while `work` is done, and what that returns."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed before leaves the process
    before, peak = anonymous_bytes(), Peak()
    peak.start()
    result = work()
    return peak.stop() - before, result


def measure(folder: str, dtype: str, shape: tuple[int, int, int]) -> dict:
    """Loads the folder, saves it elsewhere, and returns what is printed."""
    config = hf.read_config(folder)
    mesh = make_mesh(shape, jax.devices()[: math.prod(shape)])
    shardings = param_shardings(Qwen3(config), mesh)
    load, params = rise(
        lambda: jax.block_until_ready(hf.load_params(folder, config, shardings, jnp.dtype(dtype)))
    )
    # Norms are whole on every device; what eight emulated ones hold of them is counted as arrays, too.
    held = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    with tempfile.TemporaryDirectory() as target:
        save, _ = rise(lambda: hf_save.save(target, config, params))
    return {"dtype": dtype, "mesh": shape, "load": load - held, "save": save}


if __name__ == "__main__":
    for case in itertools.product(("bfloat16", "float32"), MESHES):
        print(json.dumps(measure(sys.argv[1], *case)), flush=True)
