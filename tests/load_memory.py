"""Measures the host memory that loading a checkpoint takes beside the arrays it returns.

`python -m tests.load_memory FOLDER` prints one JSON line per case: target type, mesh, and by how many bytes
anonymous memory rose above what it was before plus what the arrays occupy.
"""

import ctypes
import gc
import itertools
import json
import math
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp

from mopd_jax.model import hf
from mopd_jax.model.qwen3 import Qwen3
from mopd_jax.model.sharding import make_mesh, param_shardings
from tests.memory import Peak, anonymous_bytes

MESHES = ((1, 1, 1), (1, 4, 2))


def measure(folder: str, dtype: str, shape: tuple[int, int, int]) -> dict:
    """Loads the folder and returns what is printed."""
    config = hf.read_config(folder)
    mesh = make_mesh(shape, jax.devices()[: math.prod(shape)])
    shardings = param_shardings(Qwen3(config), mesh)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the case before has given back leaves the process
    before, peak = anonymous_bytes(), Peak()
    peak.start()
    params = jax.block_until_ready(hf.load_params(folder, config, shardings, jnp.dtype(dtype)))
    highest = peak.stop()
    leaves = jax.tree.leaves(params)
    # Norms are whole on every device; what eight emulated ones hold of them is counted as arrays, too.
    held = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    return {"dtype": dtype, "mesh": shape, "beside": highest - before - held}


if __name__ == "__main__":
    for case in itertools.product(("bfloat16", "float32"), MESHES):
        print(json.dumps(measure(sys.argv[1], *case)), flush=True)
