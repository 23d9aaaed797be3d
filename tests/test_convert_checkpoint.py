"""Weights from Hugging Face folders into Orbax checkpoints and back, and out of a run's steps."""

import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from mopd_jax.config import ArchitectureConfig, Config, Precision
from mopd_jax.learn.learner import Learner
from mopd_jax.model import hf, hf_save, sharding
from mopd_jax.model.qwen3 import Qwen3
from mopd_jax.model.tokens import Tokens
from mopd_jax.refusal import Refusal
from mopd_jax.run import parts
from mopd_jax.run.checkpoint import (
    CheckpointError,
    Checkpoints,
    config_from_dict,
    config_to_dict,
    resume_meta,
)
from tests import tiny
from tests.fixtures import GOLDEN, random_params, tiny_config, write_tokenizer
from tools import convert_checkpoint


def convert(source: pathlib.Path, target: pathlib.Path, *more: str) -> pathlib.Path:
    convert_checkpoint.main(["--from", str(source), "--to", str(target), *more])
    return target


def tensors(folder: pathlib.Path) -> dict[str, bytes]:
    files = folder.glob("*.safetensors")
    return {name: x.tobytes() for file in files for name, x in load_file(file).items()}


def assert_same(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """A Hugging Face folder in bfloat16 with tokenizer and a run's language, not to be changed."""
    config = tiny_config(vocab_size=320, tie_word_embeddings=False)
    source = write_tokenizer(tmp_path_factory.mktemp("source"))
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), random_params(config))
    target = tmp_path_factory.mktemp("saved") / "folder"
    hf_save.save(target, config, params, source, {"team.json": '{"searcher": "You search."}'})
    return target


@pytest.fixture(scope="module")
def converted(folder, tmp_path_factory) -> pathlib.Path:
    """The same with its weights as an Orbax checkpoint, not to be changed."""
    return convert(folder, tmp_path_factory.mktemp("converted") / "orbax")


# ---------------------------------------------------------------- Hugging Face → Orbax → Hugging Face


def test_there_and_back_every_byte_is_the_same(folder, converted, tmp_path):
    assert not list(converted.glob("*.safetensors"))
    back = convert(converted, tmp_path / "back")
    assert tensors(back) == tensors(folder)
    assert {file.name for file in back.iterdir()} == {file.name for file in folder.iterdir()}
    for name in ("config.json", "tokenizer.json", "generation_config.json", "team.json"):
        assert (back / name).read_bytes() == (folder / name).read_bytes() == (converted / name).read_bytes()


def test_float32_files_come_back_too(tmp_path):
    orbax = convert(GOLDEN / "qwen3_tied", tmp_path / "orbax")
    assert tensors(convert(orbax, tmp_path / "back")) == tensors(GOLDEN / "qwen3_tied")


def test_the_type_can_be_chosen_on_either_way(folder, converted, tmp_path):
    config = hf.read_config(folder)
    expected = hf.load_params(folder, config, dtype=jnp.float32)
    wide = convert(converted, tmp_path / "wide", "--dtype", "float32")
    assert hf.stored_dtype(wide, config) == np.float32
    assert_same(hf.load_params(wide, config), expected)
    wide_orbax = convert(folder, tmp_path / "wide_orbax", "--dtype", "float32")
    assert json.loads((wide_orbax / "config.json").read_text())["torch_dtype"] == "float32"
    assert tensors(convert(wide_orbax, tmp_path / "again")) == tensors(wide)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 2)])
@pytest.mark.parametrize("stored", Precision)
def test_a_run_starts_from_it_as_from_the_folder(folder, converted, shape, stored):
    mesh = sharding.make_mesh(shape, jax.devices()[: np.prod(shape)])
    opened = [parts.open_model(str(spec), Config()) for spec in (folder, converted)]
    assert opened[0].model == opened[1].model
    assert opened[0].tokens.fingerprint == opened[1].tokens.fingerprint
    expected, found = (parts.load_params(model, mesh, stored, seed=0) for model in opened)
    assert_same(found, expected)
    assert jax.tree.map(lambda x: (x.sharding, x.dtype), found) == jax.tree.map(
        lambda x: (x.sharding, x.dtype), expected
    )


def test_other_weights_have_another_fingerprint(converted, tmp_path):
    config = tiny_config(vocab_size=320, tie_word_embeddings=False)
    hf_save.save(tmp_path / "other", config, random_params(config, seed=1), dtype=jnp.bfloat16)
    other = convert(tmp_path / "other", tmp_path / "orbax")
    (other / "config.json").write_bytes((converted / "config.json").read_bytes())
    copy = shutil.copytree(converted, tmp_path / "copy")
    assert hf.fingerprint(copy) == hf.fingerprint(converted) != hf.fingerprint(other)


# ---------------------------------------------------------------- a run → Hugging Face


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[pathlib.Path, dict[int, dict]]:
    """A run with two saved steps, not to be changed, and the weights of each."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny.team()
    config.run.dir, config.model.init = str(folder), "random"
    config.model.architecture = ArchitectureConfig(
        hidden_size=16, intermediate_size=24, num_layers=1, head_dim=4
    )
    student = parts.open_model("random", config)
    mesh = sharding.make_mesh((1, 2, 1), jax.devices()[:2])
    learner = Learner(student.model, config.learn, config.optim, 4, mesh)
    store, weights = Checkpoints(folder / "checkpoints", keep=2), {}
    for step in (2, 10):
        params = parts.load_params(student, mesh, Precision.FLOAT32, seed=step)
        weights[step] = jax.tree.map(np.asarray, params)
        store.save(step, learner.init_state(params), resume_meta(config, {}))
    store.close()
    return folder, weights


@pytest.mark.parametrize(("step", "more"), [(10, ()), (2, ("--step", "2"))])
def test_a_step_of_a_run_becomes_a_folder(run, tmp_path, step, more):
    source, weights = run
    target = convert(source, tmp_path / "saved", *more)
    config = hf.read_config(target)
    assert_same(hf.load_params(target, config), weights[step])
    assert Tokens.from_folder(target).fingerprint == Tokens.from_folder(source / "tokenizer").fingerprint
    parts.check_language(target, tiny.team().team)
    assert Qwen3(config).config.hidden_size == 16


def test_a_run_may_have_moved(run, tmp_path):
    moved = shutil.copytree(run[0], tmp_path / "moved")
    assert tensors(convert(moved, tmp_path / "saved")) == tensors(convert(run[0], tmp_path / "expected"))


def test_a_config_survives_its_json():
    config = tiny.team()
    assert config_from_dict(Config, json.loads(json.dumps(config_to_dict(config)))) == config
    assert config_from_dict(Config, {"run": {"seed": 3, "colour": "red"}, "later": {}}).run.seed == 3


# ---------------------------------------------------------------- what is refused, before anything is written


def tear(step: pathlib.Path) -> None:
    for file in step.rglob("d/*"):
        os.truncate(file, 10)


@pytest.mark.parametrize(
    ("spoil", "more", "complaint"),
    [
        (lambda run: None, ("--step", "3"), r"found steps \[2, 10\], expected 3"),
        (lambda run: shutil.rmtree(run / "checkpoints"), (), r"found steps \[\], expected any"),
        (lambda run: tear(run / "checkpoints" / "10"), (), r"checkpoints/10 is torn .*take another step"),
        (lambda run: os.truncate(run / "checkpoints" / "10" / "layout" / "metadata", 5), (), "10 is torn"),
    ],
)
def test_a_run_without_such_a_step_is_refused(run, tmp_path, spoil, more, complaint):
    source = pathlib.Path(shutil.copytree(run[0], tmp_path / "run"))
    spoil(source)
    with pytest.raises(CheckpointError, match=complaint):
        convert(source, tmp_path / "target", *more)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_weights_of_other_sizes_are_refused(converted, tmp_path):
    source = pathlib.Path(shutil.copytree(converted, tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"intermediate_size": 20}))
    with pytest.raises(CheckpointError, match=r"'gate'.*kernel'.: \[3, 16, 24\] → \[3, 16, 20\]"):
        convert(source, tmp_path / "target")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_broken_folder_is_refused(folder, tmp_path):
    source = pathlib.Path(shutil.copytree(folder, tmp_path / "source"))
    os.truncate(source / "model.safetensors", 1000)
    with pytest.raises(ValueError, match="torn"):
        convert(source, tmp_path / "target")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize(
    ("target", "more", "complaint"),
    [
        ("notes", (), "holds mine.txt, expected no folder or one with nothing but"),
        ("folder", (), "--from and --to are both"),
        ("target", ("--step", "1"), "has no steps: leave --step out"),
    ],
)
def test_a_wrong_command_is_refused(folder, tmp_path, target, more, complaint):
    source = pathlib.Path(shutil.copytree(folder, tmp_path / "folder"))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    before = tensors(source)
    with pytest.raises(Refusal, match=complaint):
        convert(source, tmp_path / target, *more)
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "notes"}
    assert tensors(source) == before


def test_an_earlier_checkpoint_is_replaced(folder, converted, run, tmp_path):
    target = convert(run[0], tmp_path / "target")
    convert(converted, target)
    assert tensors(target) == tensors(folder)
    convert(folder, target)
    assert not list(target.glob("*.safetensors")) and (target / "checkpoints").is_dir()
