"""One of two processes that load a checkpoint together and save it again.

`python -m tests.two_hosts_hf PORT PROCESS FROM TO` prints as JSON how many elements of each tensor it read.
"""

import collections
import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax

from mopd_jax.model import hf, hf_save
from mopd_jax.model.qwen3 import Qwen3
from mopd_jax.model.sharding import make_mesh, param_shardings
from tests.reads import counted


def main(port: str, process: str, source: str, target: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(process))
    counts = collections.Counter()
    hf.safe_open = counted(counts)
    config = hf.read_config(source)
    params = hf.load_params(source, config, param_shardings(Qwen3(config), make_mesh((1, 2, 2))))
    hf_save.save(target, config, params, source=source, notes={"team.json": "{}"}, shard_bytes=20_000)
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
