"""Qwen3-4B in bfloat16 beside transformers: load, run, save. The same steps on a tiny model come first.

`python -m pytest -m slow tests/test_real_size.py -s` prints time and memory of each step.
"""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors import safe_open

GIB = 2**30
DISK, MEMORY = 20 * GIB, 14 * GIB


def available_memory() -> int:
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def run(step: str, size: str, folder: pathlib.Path) -> None:
    """Runs a step in its own process and prints what it took."""
    command = [sys.executable, "-m", "tests.real_size", step, size, str(folder)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(output.splitlines()[-1])
    seconds = ", ".join(f"{part} {value:.1f} s" for part, value in found["seconds"].items())
    peaks = " and ".join(f"{found[kind] / GIB:.2f} GiB {kind}" for kind in ("anonymous", "resident"))
    print(f"{size}, {step}: {seconds}; at most {peaks}")


def tensors(folder: pathlib.Path) -> dict:
    """Returns the open file of each tensor."""
    files = [safe_open(file, framework="numpy") for file in folder.glob("*.safetensors")]
    assert len(files) > 1 or folder.name == "saved"
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("size", ["tiny", pytest.param("4B", marks=pytest.mark.slow)])
def test_load_run_and_save_beside_transformers(tmp_path, size):
    pytest.importorskip("torch")
    free = shutil.disk_usage(tmp_path).free
    if size == "4B" and (free < DISK or available_memory() < MEMORY):
        pytest.skip(
            f"needs {DISK / GIB} GiB of disk and {MEMORY / GIB} of memory, found {free / GIB:.0f} and "
            f"{available_memory() / GIB:.0f}"
        )
    for step in ("make", "theirs", "ours"):
        run(step, size, tmp_path)

    expected, found = np.load(tmp_path / "theirs.npy"), np.load(tmp_path / "ours.npy")
    difference, std = np.abs(found - expected), expected.std()
    same = (found.argmax(-1) == expected.argmax(-1)).mean()
    print(
        f"{size}, logits: |difference| {difference.mean() / std:.4f} of their standard deviation {std:.3f} "
        f"on average, {difference.max() / std:.4f} at most; same most likely token at {same:.0%} of positions"
    )
    assert difference.mean() < 0.05 * std and difference.max() < 0.5 * std

    before, after = tensors(tmp_path / "original"), tensors(tmp_path / "saved")
    assert before.keys() == after.keys()
    for name in before:
        ours, theirs = before[name].get_tensor(name), after[name].get_tensor(name)
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert np.array_equal(ours.view(np.uint16), theirs.view(np.uint16)), name
    print(f"{size}, saved: all {len(before)} tensors are byte for byte the same")
