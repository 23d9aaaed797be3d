"""Measures the host memory that loading a checkpoint takes beside the arrays it returns.

`python -m tests.load_memory FOLDER` prints one JSON line per case: target type, mesh, the largest leaf, and
by how much anonymous memory rose above what it was before plus what the arrays occupy, in bytes.
"""

import itertools
import json
import math
import os
import re
import sys
import threading
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp

from mopd_jax.model import hf
from mopd_jax.model.qwen3 import Qwen3
from mopd_jax.model.sharding import make_mesh, param_shardings

MESHES = ((1, 1, 1), (1, 8, 1), (1, 4, 2))


def anonymous_bytes() -> int:
    """Returns this process' resident memory that no file backs."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


class Peak(threading.Thread):
    """Samples `anonymous_bytes` until it is told to stop."""

    def __init__(self):
        super().__init__(daemon=True)
        self.highest, self._stop_now = 0, threading.Event()

    def run(self):
        while not self._stop_now.is_set():
            self.highest = max(self.highest, anonymous_bytes())
            time.sleep(0.0005)

    def stop(self) -> int:
        self._stop_now.set()
        self.join()
        return max(self.highest, anonymous_bytes())


def measure(folder: str, dtype: str, shape: tuple[int, int, int]) -> dict:
    """Loads the folder and returns what is printed."""
    config = hf.read_config(folder)
    mesh = make_mesh(shape, jax.devices()[: math.prod(shape)])
    shardings = param_shardings(Qwen3(config), mesh)
    before, peak = anonymous_bytes(), Peak()
    peak.start()
    params = jax.block_until_ready(hf.load_params(folder, config, shardings, jnp.dtype(dtype)))
    highest = peak.stop()
    leaves = jax.tree.leaves(params)
    # Norms are whole on every device; what eight emulated ones hold of them is counted as arrays, too.
    held = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    largest = max(leaf.nbytes for leaf in leaves)
    return {"dtype": dtype, "mesh": shape, "largest": largest, "beside": highest - before - held}


if __name__ == "__main__":
    for case in itertools.product(("bfloat16", "float32"), MESHES):
        print(json.dumps(measure(sys.argv[1], *case)), flush=True)
