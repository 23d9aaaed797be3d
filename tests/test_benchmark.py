"""The benchmark's contestants compute the same; the command on sizes that say nothing about speed."""

import dataclasses
import importlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.test_train import ONE_DEVICE, ROOT
from tools import benchmark
from tools.bench import inputs
from tools.bench.cases import (
    DTYPES,
    LOGPROBS,
    OURS,
    PADDED,
    PURE,
    RAGGED,
    SAMPLE,
    SCALES,
    SORTED,
    STEP,
    TRANSFORMERS,
    TUNIX,
    UPDATE,
    Job,
    recipes,
    variants,
)
from tools.bench.flops import model_flops
from tools.bench.measure import Line

needs_torch = pytest.mark.skipif(
    not importlib.util.find_spec("torch"), reason='torch is not installed: pip install ".[parity]"'
)
LENGTHS = (9, 31, 4, 17, 17, 2, 25)
"""Of ragged rows, of each of which the last third is learnt."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """A checkpoint that transformers wrote, and episodes of known lengths."""
    made = tmp_path_factory.mktemp("benchmark")
    inputs.make(made, SCALES["tiny"], [SAMPLE])
    rng = np.random.default_rng(0)
    np.savez(
        made / "episodes.npz",
        ids=rng.integers(0, 640, sum(LENGTHS)).astype(np.int32),
        masks=np.concatenate([np.arange(n) >= max(1, 2 * n // 3) for n in LENGTHS]),
        lengths=LENGTHS,
    )
    return made


def job(folder: pathlib.Path, work: str, dtype: str = "float32") -> Job:
    return Job(OURS, work, dtype, 2, "tiny", str(folder), micro_batch=2)


def run(job: Job, contestant: str, recipe: str = "", times: int = 1) -> tuple[Job, list[dict]]:
    """Does the work in this process."""
    modules = {OURS: "tools.bench.ours", TRANSFORMERS: "tools.bench.torch_peer"}
    job = dataclasses.replace(job, contestant=contestant, recipe=recipe)
    work = importlib.import_module(modules[contestant]).DO[job.work](job)
    return job, [work() for _ in range(times)]


# ---------------------------------------------------------------- the same results


@needs_torch
def test_all_sample_the_same_number_of_tokens(folder):
    scale, work = SCALES["tiny"], job(folder, SAMPLE)
    expected = scale.prompts * scale.samples * scale.new_tokens
    _, replies = run(work, OURS, times=2)
    assert [reply["tokens"] for reply in replies] == [expected, expected]
    for recipe in recipes(TRANSFORMERS, SAMPLE, "float32"):
        _, (reply,) = run(work, TRANSFORMERS, recipe)
        assert reply["tokens"] == expected, recipe


@needs_torch
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_log_probabilities_agree(folder, dtype, tolerance):
    work = job(folder, LOGPROBS, dtype)
    ours, (reply,) = run(work, OURS)
    theirs, _ = run(work, TRANSFORMERS)
    found, expected = np.load(ours.file), np.load(theirs.file)
    assert reply["tokens"] == 4 * 32 and found.shape == (4 * 31,)
    np.testing.assert_allclose(found, expected, 0, tolerance)
    assert expected.std() > 0.05, "rows differ, so that a wrong order would show"


@needs_torch
@pytest.mark.parametrize("work", [UPDATE, RAGGED])
def test_losses_agree_from_update_to_update(folder, work):
    """The second loss depends on the first gradient, its clipping and the optimizer."""
    work = job(folder, work)
    _, ours = run(work, OURS, times=3)
    losses = [reply["loss"] for reply in ours]
    assert abs(losses[2] - losses[0]) > 1e-5, "the weights moved"
    for recipe in recipes(TRANSFORMERS, work.work, "float32"):
        _, theirs = run(work, TRANSFORMERS, recipe, times=3)
        np.testing.assert_allclose([reply["loss"] for reply in theirs], losses, 1e-4, err_msg=recipe)
        assert [reply["tokens"] for reply in theirs] == [reply["tokens"] for reply in ours]


@needs_torch
@pytest.mark.parametrize("recipe", recipes(TRANSFORMERS, UPDATE, "bfloat16"))
def test_losses_agree_in_bfloat16(folder, recipe):
    work = job(folder, UPDATE, "bfloat16")
    _, (ours,) = run(work, OURS)
    _, (theirs,) = run(work, TRANSFORMERS, recipe)
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=2e-2)


# ---------------------------------------------------------------- inputs


@needs_torch
def test_padding_and_order_of_the_peers_rows(folder):
    rows = inputs.rows(job(folder, RAGGED))
    assert tuple(map(len, rows.ids)) == LENGTHS and rows.tokens == sum(LENGTHS)
    assert rows.learnt == sum(n - max(1, 2 * n // 3) for n in LENGTHS)
    padded = inputs.rectangles(rows, 2, by_length=False)
    assert [micro.ids.shape for micro in padded] == [(2, 31)] * 4
    assert padded[3].mask[1].sum() == 0, "the last micro-batch is filled up"
    by_length = inputs.rectangles(rows, 2, by_length=True)
    assert [micro.ids.shape for micro in by_length] == [(2, 31), (2, 17), (2, 9), (1, 2)]
    for micros in (padded, by_length):
        assert sum(micro.mask.sum() for micro in micros) == rows.learnt
    np.testing.assert_array_equal(by_length[0].ids[1, :25], rows.ids[6])
    assert by_length[0].advantages[:, 0].tolist() == [rows.advantages[1], rows.advantages[6]]


def test_every_recipe_takes_part_with_the_micro_batches_that_are_tried():
    base = Job(TRANSFORMERS, RAGGED, "float32", 1, "full", "")
    lines = variants(base)
    assert [[(j.recipe, j.micro_batch) for j in jobs] for jobs in lines] == [
        [(recipe, n) for n in (4, 8, 16, 32)] for recipe in (PADDED, SORTED)
    ]
    assert [j.recipe for (j,) in variants(dataclasses.replace(base, work=SAMPLE))] == list(
        recipes(TRANSFORMERS, SAMPLE, "float32")
    )
    assert PURE in recipes(TRANSFORMERS, UPDATE, "bfloat16")
    assert not recipes(TRANSFORMERS, STEP, "float32") and not recipes(TUNIX, STEP, "float32")
    assert {len(jobs) for dtype in DTYPES for jobs in variants(Job(OURS, UPDATE, dtype, 1, "full", ""))} == {
        1
    }


@needs_torch
def test_flops_of_a_repetition(folder):
    """By hand for the tiny model: 2 layers of width 32, MLP 48, 4 + 2 heads of 8, 640 words."""
    layer = 32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 48
    tokens, square = 4 * 32, 4 * 32**2
    forward = 2 * 2 * layer * tokens + 2 * 2 * 4 * 8 * square + 2 * 32 * 640 * 4 * 31
    assert model_flops(job(folder, LOGPROBS)) == forward
    assert model_flops(job(folder, UPDATE)) == 3 * forward
    ragged = sum(
        2 * 2 * layer * n + 2 * 2 * 4 * 8 * n**2 + 2 * 32 * 640 * (n - max(1, 2 * n // 3)) for n in LENGTHS
    )
    assert model_flops(job(folder, RAGGED)) == 3 * ragged
    assert model_flops(job(folder, STEP)) is None


def test_medians():
    replies = [{"seconds": s, "tokens": 60, "peak": p} for s, p in ((1, 5), (4, 7), (2, 6))]
    line = Line(Job(OURS, SAMPLE, "float32", 1, "tiny", ""), replies=replies)
    assert (line.speed, line.peak, line.median("seconds")) == (30, 7, 2)


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("--work=sampling", "found 'sampling', expected some of sample,logprobs,update"),
        ("--work=sample,sample", "each once"),
        ("--contestants=ours,trl", "expected some of ours,transformers,tunix"),
        ("--dtype=float16", "expected some of float32,bfloat16"),
        ("--threads=0", "expected numbers from 1 to"),
        ("--threads=1000", "the cores of this machine"),
        ("--repetitions=0", "expected a number from 1 on"),
        ("--work=load --contestants=tunix", "done by ours alone: add it to --contestants"),
        ("--scale=huge", "invalid choice: 'huge'"),
    ],
)
def test_bad_options_are_refused_in_words(option, complaint, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(option.split())
    assert complaint in capsys.readouterr().err


def tables(folder: pathlib.Path, *options: str) -> str:
    command = [sys.executable, "-m", "tools.benchmark", "--scale", "tiny", "--folder", str(folder)]
    command += ["--contestants", "ours,transformers", "--threads", "1", *options]
    environment = os.environ | {"XLA_FLAGS": ONE_DEVICE}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cells(output: str, name: str) -> list[str]:
    """The cells of the table's line that begins with a name."""
    (line,) = (line for line in output.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@needs_torch
def test_the_command_prints_a_table(tmp_path):
    output = tables(tmp_path, "--work", "update", "--dtype", "float32", "--repetitions", "2")
    assert "### Update (clipped policy gradient, AdamW): 4 rows × 32 tokens; float32, 1 thread\n" in output
    for name, rows, compared in ((OURS, "", ""), (TRANSFORMERS, "2", r"[\d.]+")):
        tried, speed, ratio, memory, share = cells(output, name)
        assert tried == rows and re.fullmatch(compared, ratio) and re.fullmatch(r"[\d,]+ \(.* – .*\)", speed)
        assert 100 < int(memory.replace(",", "")) < 3000 and share.endswith("%")
    losses = re.findall(r"Losses of the first two updates, (\w+): ([-\d.]+), ([-\d.]+)\.", output)
    assert [name for name, *_ in losses] == [OURS, TRANSFORMERS]
    np.testing.assert_allclose(*(list(map(float, values)) for _, *values in losses), 1e-4)
    assert re.search(r"GFLOP/s: jax [\d,.]+, torch/transformers [\d,.]+\.", output)
    assert "2 interleaved repetitions" in output and "torch 2" in output


@pytest.mark.slow
@needs_torch
def test_recorded_episodes_a_step_and_load(tmp_path):
    options = ["--dtype", "float32", "--repetitions", "1"]
    output = tables(tmp_path, "--work", "ragged,step,load", *options)
    assert re.search(r"\d+ rows of \d+ to \d+ tokens .* of them sampled\.", output)
    assert cells(output, f"{TRANSFORMERS}, {PADDED}")[1].startswith(tuple("123456789"))
    steps, load = output.split("by phase")[1].split("###")
    for multiple in (1, 2):
        seconds = cells(steps, f"{OURS}, × {multiple}")
        rollout, score, update, whole = map(float, seconds[:4])
        assert rollout + score + update - 0.1 < whole < rollout + score + update + 60 and "%" in seconds[4]
        assert "%" in cells(load, f"{OURS}, × {multiple}")[2]
