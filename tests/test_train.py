"""The program as its users run it: whole chains, interruptions, repetitions."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.fixtures import read_metrics

ROOT = pathlib.Path(__file__).resolve().parents[1]
ONE_DEVICE = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
TIMES = ("seconds/", "tokens_per_s/", "search/", "compile/")
"""What the clock says, and what a process has been asked, or has compiled, before."""


def measured(folder: pathlib.Path) -> list[dict]:
    """The metrics of a run without those of the process that measured them."""
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in read_metrics(folder)]


def command(config: str, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "mopd_jax.train", f"--config={config}", *overrides]


def start(config: str, *overrides: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        command(config, *overrides),
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": ONE_DEVICE} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_lines(folder: pathlib.Path, count: int, process: subprocess.Popen, seconds: int = 300) -> None:
    path = folder / "metrics.jsonl"
    for _ in range(10 * seconds):
        if path.exists() and len(path.read_text().splitlines()) >= count:
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    raise AssertionError(f"{path} did not reach {count} lines")


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> pathlib.Path:
    """A tiny run, never interrupted: two steps of imitation twice, four of a distilled team."""
    folder = tmp_path_factory.mktemp("straight")
    process = start(
        "tests/tiny.py", f"--config.run.dir={folder}", JAX_COMPILATION_CACHE_DIR=str(folder / "cache")
    )
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return folder


def test_a_run_leaves_metrics_checkpoint_and_export(straight):
    lines = read_metrics(straight / "team")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    expected = (
        "loss grad_norm clip_fraction outcome em searches no_search input_tokens output_tokens gap lr "
        "malformed/searcher truncated_length/searcher entropy/searcher reward/answerer kl/answerer "
        "em/answerer seconds/rollout tokens_per_s/update seconds/remaining episodes_crc32"
    )
    assert set(expected.split()) <= lines[0].keys()
    assert {"grad_norm/searcher"} <= lines[0].keys() & lines[2].keys()
    assert lines[0]["compile/programs"] > lines[-1]["compile/programs"] and lines[0]["seconds/compile"] > 0
    assert lines[0]["gap"] < 1e-5, "sampler and learner disagree on unchanged weights"
    assert all(line["grad_norm"] > 0 for line in lines)
    assert lines[0]["log_ratio/searcher"] != lines[-1]["log_ratio/searcher"], "the student has not moved"
    assert {"config.json", "model.safetensors", "tokenizer.json", "team.json"} <= {
        p.name for p in (straight / "team" / "export").iterdir()
    }


def test_sampler_and_learner_agree_step_after_step_where_nothing_is_learnt(straight, tmp_path):
    """Kind 18."""
    overrides = "--config.team.optim.lr=0", "--config.team.train.steps=5", f"--config.run.dir={tmp_path}"
    process = start("tests/tiny.py", *overrides, JAX_COMPILATION_CACHE_DIR=str(straight / "cache"))
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    lines = read_metrics(tmp_path / "team")
    assert len({line["episodes_crc32"] for line in lines}) == 5
    assert all(0 < line["gap"] < 1e-5 for line in lines)


def test_same_seed_gives_the_same_run_bit_for_bit(straight, tmp_path):
    # The schedule is constant: a shorter run is the beginning of a longer one.
    output, _ = start(
        "tests/tiny.py", f"--config.run.dir={tmp_path}", "--config.team.train.steps=2"
    ).communicate()
    for phase in ("start", "teacher", "team"):
        assert measured(tmp_path / phase) == measured(straight / phase)[:2], output
    assert all(line["episodes_crc32"] for line in measured(tmp_path / "team"))


def test_killed_and_stopped_runs_continue_without_losing_or_repeating_a_step(straight, tmp_path):
    arguments = ("tests/tiny.py", f"--config.run.dir={tmp_path}")
    cache = {"JAX_COMPILATION_CACHE_DIR": str(straight / "cache")}

    killed = start(*arguments, **cache)
    wait_for_lines(tmp_path / "team", 1, killed)
    killed.kill()
    killed.communicate()

    stopped = start(*arguments, **cache)
    wait_for_lines(tmp_path / "team", 2, stopped)
    stopped.send_signal(signal.SIGTERM)
    output, _ = stopped.communicate(timeout=600)
    assert stopped.returncode == 143, output
    finished = (tmp_path / "team" / "finished.json").exists()  # the signal may arrive during the last step
    assert finished or re.search(r"Stopped after step \d of 4", output), output

    output, _ = start(*arguments, **cache).communicate(timeout=600)
    assert "Continuing" not in output if finished else "Continuing" in output
    for phase in ("start", "teacher", "team"):
        assert measured(tmp_path / phase) == measured(straight / phase)


INTERRUPTED = """
import signal, sys
from mopd_jax import flags, train
from mopd_jax.run import console

def step_line(phase, step, steps, metrics, shown=console.step_line):
    if (phase, step) == ("start", steps):
        signal.raise_signal(signal.SIGTERM)
    return shown(phase, step, steps, metrics)

console.step_line = step_line
train.main(flags.load(sys.argv[1:]))
"""


def test_a_run_stopped_in_the_last_step_of_a_phase_does_not_start_the_next(straight, tmp_path):
    arguments = ("--config=tests/tiny.py", f"--config.run.dir={tmp_path}")
    environment = {"XLA_FLAGS": ONE_DEVICE, "JAX_COMPILATION_CACHE_DIR": str(straight / "cache")}
    stopped = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert stopped.returncode == 143, stopped.stderr
    assert (tmp_path / "start" / "finished.json").exists() and not (tmp_path / "teacher").exists()
    assert measured(tmp_path / "start") == measured(straight / "start")


def test_a_finished_run_with_another_config_is_refused(straight):
    process = start("tests/tiny.py", f"--config.run.dir={straight}", "--config.team.optim.lr=1e-3")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 2 and "Traceback" not in output
    assert "optim.lr: 0.0005 → 0.001" in output
    assert "allow_changes" in output


def test_the_chain_runs_whole_and_prints_one_table(tmp_path):
    """The README's main job, cut down: every phase, two steps each, few questions."""
    steps = {"facts": 2, "warmup": 2, "stage1": 2, "stage2": 2}
    overrides = [f"--config.{phase}.train.steps={count}" for phase, count in steps.items()]
    for phase in steps:
        overrides.append(f"--config.{phase}.train.questions=2")
    for phase in ("base_c_mas", "base_h_mas", "stage1_c_mas", "stage2_h_mas"):
        overrides += [f"--config.{phase}.eval.questions=3", f"--config.{phase}.eval.attempts=2"]
    overrides.append(f"--config.run.dir={tmp_path}")
    output, _ = (process := start("configs/mini.py", *overrides)).communicate(timeout=900)
    assert process.returncode == 0, output
    report, _, settings = (tmp_path / "report.md").read_text().partition("\n\n## Departures")
    assert report in output
    assert "stage2.learn.beta" in settings and "- learn.clip = 0.2" in settings
    assert all(f"| {name}" in report for name in ("base_c_mas", "base_h_mas", "stage1_c_mas", "stage2_h_mas"))
    head, *records = map(json.loads, (tmp_path / "stage2_h_mas" / "results.jsonl").read_text().splitlines())
    assert len(records) == 3 * 2
    assert head["system"] == "stage2_h_mas"
    teacher = read_metrics(tmp_path / "stage2")[0]
    assert "log_ratio/leader" in teacher and "kl/leader" in teacher, "stage 1 was not scored"

    again, _ = start("configs/mini.py", *overrides).communicate(timeout=600)
    assert report in again and "facts is finished already" in again
