"""The pod report: which pods there are, and a scaled-down one compiled for real."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from mopd_jax.published import CHIPS
from mopd_jax.refusal import Refusal
from tests import test_plan
from tools import compile_for_pod

ROOT = pathlib.Path(__file__).resolve().parents[1]
V5E = CHIPS["v5e"]


@pytest.fixture
def config():
    return test_plan.make_config()


def test_used_bytes_of_a_refusal():
    """Both ways in which the compiler says it."""
    first = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used "
    )
    first += "20.30G of 15.75G hbm. Exceeded hbm capacity by 4.55G."
    second = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    second += "(1.50T) exceeds available HBM (15.75G)."
    assert compile_for_pod.used_bytes(first) == int(20.30 * 2**30)
    assert compile_for_pod.used_bytes(second) == int(1.5 * 2**40)
    with pytest.raises(Refusal, match="RESOURCE_EXHAUSTED: vmem"):
        compile_for_pod.used_bytes("RESOURCE_EXHAUSTED: vmem")


# ---------------------------------------------------------------- meshes


def test_a_mesh_for_another_number_of_devices_is_replaced_and_said(config, capsys):
    config.mesh.shape = (1, 64, 1)
    found = compile_for_pod.on_pod(config, 16)
    assert found.mesh.shape == (1, 16, 1) and found.mesh.rollout_tensor == 4
    assert "--config.mesh.shape=(1,16,1)" in capsys.readouterr().out
    assert config.mesh.shape == (1, 64, 1), "the config itself is not changed"


def test_a_fitting_mesh_is_kept(config, capsys):
    assert compile_for_pod.on_pod(config, 8) is config
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("tensor", "choice"), [(16, "1, 2, 4, 8"), (3, "1, 2, 4, 8")])
def test_an_engine_stays_on_one_host(tensor, choice):
    pod = compile_for_pod.Pod("v5e:2x4", V5E, jax.devices())
    with pytest.raises(
        Refusal, match=f"rollout_tensor = {tensor}, a host has 8 devices: choose one of {choice}"
    ):
        pod.engine_devices(tensor)


@pytest.mark.parametrize("name", ["v7x:2x2", "v5litepod-16", "v5e", "v5e:16"])
def test_an_unknown_topology_is_refused(name):
    with pytest.raises(Refusal, match=f"{name}: expected one of v4, v5e, v5p, v6e, then e.g. :4x4"):
        compile_for_pod.open_pod(name)


# ---------------------------------------------------------------- a scaled-down pod

needs_libtpu = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"), reason='libtpu is not installed: pip install "jax[tpu]"'
)
SMALL = (
    "--config.team.row_tokens=1024",
    "--config.team.document_tokens=256",
    "--config.learn.row_buckets=(1024,)",
    "--config.learn.micro_batch_tokens=4096",
    "--config.rollout.prefill_tokens=128",
    "--config.mesh.shape=(1,4,1)",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> pathlib.Path:
    """Sizes of a model of 2 layers, no weights."""
    sizes = {"model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 5e6}
    sizes |= {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
    sizes |= {"tie_word_embeddings": True, "max_position_embeddings": 4096}
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


def run(checkpoint: pathlib.Path, *overrides: str) -> subprocess.CompletedProcess:
    models = [f"--config.model.{name}={checkpoint}" for name in ("init", "teacher", "reference")]
    return run_tool("--config=configs/stage2.py", "--topology=v5e:2x2", *SMALL, *models, *overrides)


def run_tool(*arguments: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "tools.compile_for_pod", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def temporaries(output: str) -> list[float]:
    """Shares of the cache, in %, that the decode programs take beside it."""
    return [float(share) for share in re.findall(r"temporaries [\d.]+ MB \(([\d.]+)%\)", output)]


def rows(output: str) -> dict[str, list[str]]:
    """Cells of the table by program."""
    table = [line.strip("|").split("|") for line in output.splitlines() if line.startswith("|")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in table[2:]}


@needs_libtpu
def test_a_small_stage2_compiles_for_a_host(checkpoint):
    done = run(checkpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Everything fits v5e:2x2." in done.stdout
    found = rows(done.stdout)
    assert len(found) == 11 and all(cells[3] == "fits" for cells in found.values())
    assert int(found["score"][7]) >= 2, "one kernel for the student, one for the frozen model"
    assert int(found["update: accumulate"][7]) >= 3, "forward, recomputed forward, backward"
    assert len(temporaries(done.stdout)) == 2
    assert "Involuntary full rematerialization" not in done.stderr


@needs_libtpu
def test_decoding_at_the_real_size_takes_less_than_a_hundredth_of_its_cache():
    done = run_tool("--config=configs/h_mas.py", "--topology=v5e:4x4")
    assert done.returncode == 0, done.stdout + done.stderr
    shares = temporaries(done.stdout)
    assert shares and max(shares) < 1


@needs_libtpu
def test_what_does_not_fit_is_refused_with_a_verdict(checkpoint):
    done = run(checkpoint, "--config.train.kind=evaluate", "--config.rollout.conversations=40000")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"decode, 40000 × 1 does not fit: .* GB too much\.", done.stdout)
    assert re.search(r"For .*decode, 40000 × 1.*: fewer rollout\.conversations \(now 40000\)", done.stdout)
    assert rows(done.stdout)["decode, 40000 × 1"][3] == "refused"
