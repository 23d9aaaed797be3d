"""Qwen3-4B in bfloat16 beside transformers: load, run, save. The same steps on a tiny model come first.

`python -m pytest -m slow tests/test_real_size.py -s` prints time and memory of each step.
"""

import json
import pathlib
import shutil
import subprocess
import sys

import ml_dtypes
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

    compare_logits(size, tmp_path)
    before, after = tensors(tmp_path / "original"), tensors(tmp_path / "saved")
    assert before.keys() == after.keys()
    for name in before:
        written, original = after[name].get_tensor(name), before[name].get_tensor(name)
        assert written.dtype == original.dtype == ml_dtypes.bfloat16 and written.shape == original.shape
        assert np.array_equal(written.view(np.uint16), original.view(np.uint16)), name
    print(f"{size}, saved: all {len(before)} tensors are byte for byte the same")


def compare_logits(size: str, folder: pathlib.Path) -> None:
    """Two computations in bfloat16 differ by its rounding: ours is no farther from float32 than the other."""
    ours, theirs, exact = (np.load(folder / f"{name}.npy") for name in ("ours", "theirs", "exact"))
    std, mean = exact.std(), {}
    for name, pair in {
        "ours − theirs": (ours, theirs),
        "ours − float32": (ours, exact),
        "theirs − float32": (theirs, exact),
    }.items():
        difference = np.abs(pair[0] - pair[1]) / std
        same = (pair[0].argmax(-1) == pair[1].argmax(-1)).mean()
        mean[name] = difference.mean()
        print(
            f"{size}, logits, {name}: {difference.mean():.4f} standard deviations ({std:.3f}) on average, "
            f"{difference.max():.4f} at most; same most likely token at {same:.0%} of positions"
        )
    assert mean["ours − float32"] < max(0.01, 1.1 * mean["theirs − float32"])
    assert mean["ours − theirs"] < 0.05
