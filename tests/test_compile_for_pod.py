"""The pod report: verdicts and advice in words, and a scaled-down pod compiled for real."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from mopd_jax.config import Attention, Precision, Remat
from mopd_jax.published import CHIPS
from mopd_jax.run import plan
from mopd_jax.run.estimate import Lane, Work
from tests import test_plan
from tools import compile_for_pod
from tools.compile_for_pod import Fit, Refused

ROOT = pathlib.Path(__file__).resolve().parents[1]
V5E = CHIPS["v5e"]


def fit(name: str, peak: float, beside: float = 0.0, lane: Lane | None = None, **found) -> Fit:
    """A result in GB."""
    program = plan.Program(name, None, 8, Work(6e15, 8e15), int(beside * 1e9), lane)
    return Fit(program, int(peak * 1e9), 61.4, **found)


@pytest.fixture
def config():
    return test_plan.make_config()


# ---------------------------------------------------------------- verdicts


def test_the_verdict_names_program_excess_and_what_to_change(config):
    config.learn.micro_batch_tokens = 12 * 208
    found = compile_for_pod.verdict(fit("update: accumulate", 20.3), test_plan.make_plan(config), V5E)
    assert found.startswith(
        "update: accumulate does not fit: 20.30 GB on a device, the limit is 16.91 GB, 3.39 GB too much. "
    )
    changes = found.split("Change: ")[1].removesuffix(".").split("; ")
    assert changes == [
        "model.attention = splash",
        "model.remat = full",
        "model.compute = bfloat16",
        "learn.micro_batch_tokens = 832, one row on a device (now 3)",
        "a larger fsdp axis (mesh.shape is (1, 4, 2))",
        "more devices (now 8)",
        "shorter rows (team.row_tokens, learn.row_buckets)",
    ]


def test_only_changes_that_are_left_are_advised(config):
    config.model.attention, config.model.remat = Attention.SPLASH, Remat.FULL
    config.model.compute = Precision.BFLOAT16
    found = compile_for_pod.advice(fit("score", 20), test_plan.make_plan(config))
    assert [change.split(" (")[0] for change in found] == [
        "a larger fsdp axis",
        "more devices",
        "shorter rows",
    ]
    config.model.frozen = Precision.FLOAT32
    assert "model.frozen = bfloat16" in compile_for_pod.advice(fit("score", 20), test_plan.make_plan(config))


def test_what_stays_beside_a_program_counts(config):
    found = fit("decode, 8 × 1", 12, beside=6, lane=Lane(8, 1, 208, 8))
    verdict = compile_for_pod.verdict(found, test_plan.make_plan(config), V5E)
    assert "12.00 GB on a device beside 6.00 GB that stay allocated" in verdict
    assert "1.09 GB too much" in verdict and "fewer rollout.conversations (now 8)" in verdict
    assert "bfloat16" not in verdict, "the engine samples in bfloat16 already"


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
    with pytest.raises(Refused, match="RESOURCE_EXHAUSTED: vmem"):
        compile_for_pod.used_bytes("RESOURCE_EXHAUSTED: vmem")


# ---------------------------------------------------------------- tables


def test_the_table_of_fits():
    fits = [
        fit("score", 2.64, beside=0.5, arguments=10**9, kernels=3),
        fit("update: accumulate", 20.3, refused=True),
    ]
    head, rule, *rows = compile_for_pod.format_fits(fits, V5E).splitlines()
    assert len({len(line) for line in (head, rule, *rows)}) == 1, "columns are aligned"
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    # 6e15 FLOPs on 8 devices of 197 TFLOP/s take 3.81 s, three quarters of all it computes
    assert cells[0] == ["score", "1.00", "2.64", "3.14", "fits", "6e+03", "3.81", "75%", "3", "61"]
    assert cells[1][:5] == ["update: accumulate", "–", "20.30", "20.30", "refused"]


def test_decode_programs_are_measured_against_their_cache(config):
    lane = Lane(2, 5, 208, 6)
    found = fit("decode, 2 × 5", 1, lane=lane, temporaries=100)
    decode, shared = compile_for_pod.format_sampling([found], test_plan.make_plan(config), V5E)
    token = 2 * 3 * 4 * 6 * 2  # keys and values, 3 layers, 4 heads of 6, bfloat16
    cache = token * 2 * (208 + 5 * 6) / 8
    assert f"({100 / cache:.2%})" in decode
    assert shared.startswith("5 candidates share their prefix") and "with a copy for each" in shared


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
        Refused, match=f"rollout_tensor = {tensor}, a host has 8 devices: choose one of {choice}"
    ):
        pod.engine_devices(tensor)


@pytest.mark.parametrize("name", ["v7x:2x2", "v5litepod-16", "v5e", "v5e:16"])
def test_an_unknown_topology_is_refused(name):
    with pytest.raises(Refused, match=f"{name}: expected one of v4, v5e, v5p, v6e, then e.g. :4x4"):
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
    arguments = ["--config=configs/stage2.py", "--topology=v5e:2x2", *SMALL, *models, *overrides]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "tools.compile_for_pod", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


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
    shares = [float(share) for share in re.findall(r"temporaries [\d.]+ MB \(([\d.]+)%\)", done.stdout)]
    assert len(shares) == 2
    assert "Involuntary full rematerialization" not in done.stderr


@needs_libtpu
def test_what_does_not_fit_is_refused_with_a_verdict(checkpoint):
    done = run(checkpoint, "--config.train.kind=evaluate", "--config.rollout.conversations=40000")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(
        r"decode, 40000 × 1 does not fit: .* too much\. Change: fewer rollout\.conv", done.stdout
    )
    assert rows(done.stdout)["decode, 40000 × 1"][3] == "refused"
