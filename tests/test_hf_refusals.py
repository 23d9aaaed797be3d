"""Checkpoints that are torn, incomplete or broken are refused, with what was found and what was expected."""

import json
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mopd_jax.model import hf
from mopd_jax.model.qwen3 import Qwen3
from mopd_jax.model.sharding import make_mesh, param_shardings
from mopd_jax.refusal import Refusal
from tests.fixtures import GOLDEN

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM, UP = "model.norm.weight", "model.layers.2.mlp.up_proj.weight"


@pytest.fixture
def tied(tmp_path) -> pathlib.Path:
    """A checkpoint in one file, to be tampered with."""
    return pathlib.Path(shutil.copytree(GOLDEN / "qwen3_tied", tmp_path / "checkpoint"))


@pytest.fixture
def untied(tmp_path) -> pathlib.Path:
    """A checkpoint in two files, to be tampered with."""
    return pathlib.Path(shutil.copytree(GOLDEN / "qwen3_untied", tmp_path / "checkpoint"))


def load(folder: pathlib.Path) -> dict:
    return hf.load_params(folder, hf.read_config(folder))


def edit_index(folder: pathlib.Path, **changes: str | None) -> None:
    index = json.loads((folder / INDEX).read_text())
    moved = index["weight_map"] | changes
    index["weight_map"] = {name: file for name, file in moved.items() if file is not None}
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "kept", ["nothing", "half the length", "half the header", "the header", "half", "all but 1"]
)
def test_file_truncated_anywhere(tied, kept):
    content = (tied / FILE).read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    sizes = {"nothing": 0, "half the length": 4, "half the header": header // 2, "the header": header}
    sizes |= {"half": len(content) // 2, "all but 1": len(content) - 1}
    (tied / FILE).write_bytes(content[: sizes[kept]])
    with pytest.raises(ValueError, match=rf"{FILE} is torn or no safetensors file .*copy it again"):
        load(tied)


def test_file_that_is_something_else(tied):
    (tied / FILE).write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 8044982080\n"
    )
    with pytest.raises(ValueError, match=rf"{FILE} is torn or no safetensors file"):
        load(tied)


def test_one_of_several_files_is_torn(untied):
    last = sorted(untied.glob("model-*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{last.name} is torn"):
        load(untied)


def test_index_names_a_file_that_is_not_there(untied):
    edit_index(untied, **{NORM: "model-00003-of-00002.safetensors"})
    with pytest.raises(Refusal, match=r"model-00003-of-00002\.safetensors is missing"):
        load(untied)


def test_index_names_the_wrong_file(untied):
    files = [file.name for file in sorted(untied.glob("model-*.safetensors"))]
    (wrong,) = [file for file in files if NORM not in load_file(untied / file)]
    edit_index(untied, **{NORM: wrong})
    with pytest.raises(ValueError, match=rf"no tensor {NORM} in .*{wrong}, expected it there by {INDEX}"):
        load(untied)


def test_index_lacks_a_tensor(untied):
    edit_index(untied, **{UP: None})
    with pytest.raises(ValueError, match=rf"no tensor {UP}, expected shape \(24, 16\) \(1 missing\)"):
        load(untied)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_that_is_no_object(untied, name):
    (untied / name).write_text("[1, 2]")
    with pytest.raises(Refusal, match=rf"{name} holds a JSON list, expected an object"):
        load(untied)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": ["model.safetensors"]}'])
def test_index_without_a_map(untied, content):
    (untied / INDEX).write_text(content)
    with pytest.raises(ValueError, match=rf"{INDEX} has no weight_map"):
        load(untied)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("name", [NORM, UP, "model.embed_tokens.weight"])
def test_number_that_is_none(tied, name, value, dtype):
    tensors = {key: tensor.astype(dtype) for key, tensor in load_file(tied / FILE).items()}
    tensors[name].reshape(-1)[-1] = value
    save_file(tensors, tied / FILE)
    with pytest.raises(ValueError, match=rf"NaN or infinity in tensor {name} as float32, expected finite"):
        load(tied)
    config = hf.read_config(tied)
    shardings = param_shardings(Qwen3(config), make_mesh((1, 4, 2)))
    with pytest.raises(ValueError, match=f"NaN or infinity in tensor {name}"):
        hf.load_params(tied, config, shardings)


def test_type_is_refused(tied):
    save_file(load_file(tied / FILE) | {NORM: np.ones(16)}, tied / FILE)
    with pytest.raises(ValueError, match=rf"{NORM} of shape \(16,\) and type F64, expected .* BF16"):
        load(tied)
