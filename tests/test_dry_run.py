"""`--dry_run`: what it says, and that it says it on any machine."""

import pathlib
import re
import subprocess
import sys

import pytest

from mopd_jax import flags
from mopd_jax.published import CHIPS
from mopd_jax.run import dry_run

ROOT = pathlib.Path(__file__).resolve().parents[1]


def lines(config: str, *overrides: str, chip: str = "v5e") -> list[str]:
    loaded = flags.load([f"--config={ROOT / config}", *overrides])
    return list(dry_run.dry_run(loaded, "qwen3-4b", chip))


def seconds(text: str, part: str) -> float:
    line = next(line for line in text.splitlines() if line.startswith("time"))
    return float(re.search(rf"{part} ([\d.e+-]+)", line)[1])


@pytest.fixture(scope="module")
def stage2() -> str:
    return "\n".join(lines("configs/stage2.py"))


def test_stage2_is_planned_without_its_checkpoint(stage2):
    assert "checkpoints/Qwen3-4B-Instruct-2507: 4,022,468,096 parameters" in stage2
    assert "runs/stage1: 4,022,468,096 parameters" in stage2 and "sizes from --sizes=qwen3-4b" in stage2
    assert "256 × 2,048, 128 × 4,096, 64 × 8,192 tokens" in stage2
    assert "4 groups of 8,192 tokens, each with 5 × 64 of its own turn" in stage2


def test_memory_of_stage2_by_kind(stage2):
    """4.022e9 parameters over 64 devices, and over the engine's 4; 144 KiB per token of cache."""
    found = {kind: float(size) for size, kind in re.findall(r"([\d.]+) GB per device  ([^(]+) \(", stage2)}
    assert found == {
        "master weights": 0.252,
        "gradient": 0.252,
        "Adam moments": 0.504,
        "frozen runs/stage1": 0.126,
        "engine's weights": 2.012,
        "cache, 1 candidate": pytest.approx(147456 * (24 * 8192 + 12 * 256) / 4e9, abs=1e-3),
        "cache, 5 candidates": pytest.approx(147456 * 4 * (8192 + 5 * 64) / 4e9, abs=1e-3),
    }
    sampling, updating = map(
        float, re.search(r"([\d.]+) GB while sampling, ([\d.]+) GB while updating", stage2).groups()
    )
    assert sampling == pytest.approx(sum(found.values()) - 0.252, abs=2e-3)
    assert updating == pytest.approx(4 * 0.252 + 0.126, abs=2e-3)


def test_time_of_a_step(stage2):
    """By hand: 320 workflows leave 320 · (1,040 + 2 · 3,216 + 5 · 688) tokens; products alone are 6 N for
    each in the layers, at 40 % of 64 · 197 TFLOP/s."""
    tokens = 320 * (1040 + 2 * 3216 + 5 * 688)
    layers = 6 * 3.6333e9 * tokens / (0.4 * 64 * 197e12)
    assert layers < seconds(stage2, "update") < 1.25 * layers
    assert seconds(stage2, "score") == pytest.approx(2 / 3 * seconds(stage2, "update"), rel=0.01)
    assert "one step" in stage2 and f"{dry_run.FLOPS_SHARE:.0%} of its peak" in stage2


def test_a_faster_chip_is_faster(stage2):
    v6e = "\n".join(lines("configs/stage2.py", chip="v6e"))
    ratio = CHIPS["v6e"].flops / CHIPS["v5e"].flops
    assert seconds(v6e, "update") == pytest.approx(seconds(stage2, "update") / ratio, rel=0.01)
    ratio = CHIPS["v6e"].bandwidth / CHIPS["v5e"].bandwidth
    assert seconds(v6e, "decode") == pytest.approx(seconds(stage2, "decode") / ratio, rel=0.01)


def test_a_searcher_of_its_own_is_counted():
    """Two engines of 12 slots share the memory of one with 24 groups. 12 workflows are under way instead of
    the 6 of one engine with 12 slots: half the steps, each of them in both engines."""
    apart = "\n".join(lines("configs/teacher_as_searcher.py"))
    assert "GB per device  engine's weights, Searcher (sampling)" in apart
    (sampling,) = re.findall(r"([\d.]+) GB while sampling", apart)
    cache = 147456 * 12 * (8192 + 256) / 4e9
    assert float(sampling) == pytest.approx(2 * (2.012 + cache), abs=2e-3)
    together = "\n".join(lines("configs/stage1_in_hierarchy.py", "--config.rollout.parked=0"))
    for part in ("prefill", "decode"):
        assert seconds(apart, part) == pytest.approx(seconds(together, part), rel=0.02)


def test_a_chain_is_planned_phase_by_phase():
    found = lines("configs/mini.py")
    titles = [line.removeprefix("== ") for line in found if line.startswith("==")]
    assert titles == "facts warmup stage1 stage2 base_c_mas base_h_mas stage1_c_mas stage2_h_mas".split()
    models = [line for line in found if line.startswith("model")]
    assert all("sizes from model.architecture" in line for line in models), "sizes follow from phase to phase"
    text = "\n".join(found)
    assert text.count("s for 64 demonstrations, one step") == 2
    assert text.count("s for 1200 workflows (") == 4


def test_the_flag_needs_no_data_and_leaves_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mopd_jax.train", f"--config={ROOT}/configs/stage2.py", "--dry_run"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "time" in done.stdout and "4,022,468,096 parameters" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_unknown_sizes_are_refused_with_those_there_are(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mopd_jax.train", f"--config={ROOT}/configs/stage2.py", "--dry_run"),
            "--sizes=qwen3-5b",
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "qwen3-0.6b|qwen3-1.7b|qwen3-4b|qwen3-8b" in done.stderr
