"""Two processes load a checkpoint, each its own slices, and save it together."""

import json
import math
import shutil
import socket
import subprocess
import sys

import numpy as np
from safetensors.numpy import load_file

from mopd_jax.model import hf
from mopd_jax.model.hf_layout import layout
from tests.fixtures import GOLDEN, write_tokenizer


def load_all(folder) -> dict[str, np.ndarray]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def test_two_processes_load_and_save(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "qwen3_untied", source)
    write_tokenizer(source)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    commands = [
        [sys.executable, "-m", "tests.two_hosts_hf", port, process, str(source), str(tmp_path / "saved")]
        for process in "01"
    ]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    printed = [process.communicate(timeout=240)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]

    before, after = load_all(source), load_all(tmp_path / "saved")
    assert before.keys() == after.keys() and len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    names = {file.name for file in (tmp_path / "saved").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "team.json"} <= names
    assert hf.read_config(tmp_path / "saved") == hf.read_config(source)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]

    # On the mesh (data 1, fsdp 2, tensor 2) a process' two devices hold half of every matrix, and all norms.
    config = hf.read_config(source)
    for output in printed:
        counts = json.loads(output.splitlines()[-1])
        for leaf in layout(config).values():
            size = math.prod(leaf.stored_shape)
            expected = size if len(leaf.stored_shape) == 1 else size // 2
            assert {counts[name] for name in leaf.names(range(config.num_layers))} == {expected}
