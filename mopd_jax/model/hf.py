"""Qwen3 checkpoints as Hugging Face folders: config.json and safetensors, in and out.

One table (`_layout`) says for each parameter of ours which tensors hold it and how their axes relate; reading
and writing both follow it. Shape letters: L layers, D width, F mlp, N query heads, K key/value heads,
H head dim, V vocab.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Sharding, SingleDeviceSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mopd_jax.model.qwen3 import Qwen3Config
from mopd_jax.model.tokens import FILES

Params = dict[str, Any]

_MIB = 2**20
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "max_position_embeddings": "max_position_embeddings",
}
"""Our field → the one of config.json."""
_SUPPORTED = {
    "model_type": ["qwen3"],
    "architectures": [["Qwen3ForCausalLM"], None],
    "hidden_act": ["silu"],
    "attention_bias": [False, None],
    "use_sliding_window": [False, None],
}
"""Field of config.json → the values that the model implements."""


@dataclass(frozen=True)
class _Leaf:
    """How one parameter is stored."""

    name: str
    """Name of the tensor; with `{}` there is one per layer."""
    axes: tuple[tuple[int, ...], ...]
    """The tensor's axes, each as the sizes that are merged in it: ((N, H), (D,))."""
    order: tuple[int, ...]
    """Our axes as positions in the flattened `axes`."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(axis) for axis in self.axes)

    def shape(self, layers: int) -> tuple[int, ...]:
        """Our shape, with the leading axis of the layers where there is one tensor per layer."""
        sizes = [size for axis in self.axes for size in axis]
        return (layers,) * self.stacked + tuple(sizes[i] for i in self.order)

    @property
    def stacked(self) -> bool:
        return "{}" in self.name

    def names(self, layers: Sequence[int]) -> list[str]:
        return [self.name.format(layer) for layer in layers] if self.stacked else [self.name]

    def read(self, tensor, ranges: Sequence[range]) -> np.ndarray:
        """Reads the part of a tensor that `ranges` select on our axes (without that of the layers)."""
        wanted = dict(zip(self.order, ranges, strict=True))
        rows, sizes, position = [], [], 0
        for axis in self.axes:
            # Of a merged axis (heads, head_dim) only the first is ever split, so a part is one stretch of it.
            first, inner = wanted[position], math.prod(axis[1:])
            rows.append(slice(first.start * inner, first.stop * inner))
            sizes += [len(first), *axis[1:]]
            position += len(axis)
        return tensor[tuple(rows)].reshape(sizes).transpose(self.order)

    def write(self, param: np.ndarray) -> np.ndarray:
        """Returns one layer's parameter as the stored tensor."""
        return np.ascontiguousarray(param.transpose(np.argsort(self.order)).reshape(self.stored_shape))


def _layout(config: Qwen3Config) -> dict[str, _Leaf]:
    D, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    attention, mlp = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
    layout = {
        "embed/embedding": _Leaf("model.embed_tokens.weight", ((V,), (D,)), (0, 1)),
        "layers/attn_norm/scale": _Leaf("model.layers.{}.input_layernorm.weight", ((D,),), (0,)),
        "layers/attention/q/kernel": _Leaf(attention + "q_proj.weight", ((N, H), (D,)), (0, 2, 1)),
        "layers/attention/k/kernel": _Leaf(attention + "k_proj.weight", ((K, H), (D,)), (0, 2, 1)),
        "layers/attention/v/kernel": _Leaf(attention + "v_proj.weight", ((K, H), (D,)), (0, 2, 1)),
        "layers/attention/o/kernel": _Leaf(attention + "o_proj.weight", ((D,), (N, H)), (1, 2, 0)),
        "layers/attention/q_norm/scale": _Leaf(attention + "q_norm.weight", ((H,),), (0,)),
        "layers/attention/k_norm/scale": _Leaf(attention + "k_norm.weight", ((H,),), (0,)),
        "layers/mlp_norm/scale": _Leaf("model.layers.{}.post_attention_layernorm.weight", ((D,),), (0,)),
        "layers/mlp/gate/kernel": _Leaf(mlp + "gate_proj.weight", ((F,), (D,)), (1, 0)),
        "layers/mlp/up/kernel": _Leaf(mlp + "up_proj.weight", ((F,), (D,)), (1, 0)),
        "layers/mlp/down/kernel": _Leaf(mlp + "down_proj.weight", ((D,), (F,)), (1, 0)),
        "final_norm/scale": _Leaf("model.norm.weight", ((D,),), (0,)),
    }
    if not config.tie_word_embeddings:
        layout["head/kernel"] = _Leaf("lm_head.weight", ((V,), (D,)), (1, 0))
    return layout


def read_config(folder: epath.PathLike) -> Qwen3Config:
    """Returns the sizes in a folder's config.json; how they are computed is left at its defaults.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: a field is missing, or asks for what the model does not implement (another architecture,
        scaled rotary positions, attention bias, sliding window, another activation).
    """
    path = epath.Path(folder) / "config.json"
    found = _read_json(path)
    for field, values in _SUPPORTED.items():
        if found.get(field) not in values:
            raise _unsupported(path, field, found.get(field), values[0])
    if set(found.get("layer_types") or ()) - {"full_attention"}:
        raise _unsupported(path, "layer_types", found["layer_types"], "full_attention only")
    for field in _SIZES.values():
        if field not in found:
            raise _unsupported(path, field, "nothing", "a value")
    sizes = {ours: found[theirs] for ours, theirs in _SIZES.items()}
    return Qwen3Config(**sizes, rope_theta=_rope_theta(path, found))


def fingerprint(folder: epath.PathLike) -> str:
    """Returns a hash (hex) that tells other weights or sizes: of config.json, and of each weight file's size,
    first and last MiB, since training changes every tensor and whole files are large."""
    folder, digest = epath.Path(folder), hashlib.sha256()
    digest.update((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("model*.safetensors")):
        size = file.stat().length
        with file.open("rb") as stream:
            digest.update(f"{file.name} {size}".encode() + stream.read(_MIB))
            stream.seek(max(0, size - _MIB))
            digest.update(stream.read(_MIB))
    return digest.hexdigest()[:16]


def load_params(
    folder: epath.PathLike,
    config: Qwen3Config,
    shardings: Params | None = None,
    dtype: jnp.dtype = jnp.float32,
) -> Params:
    """Returns the parameters of a Hugging Face folder, single or sharded file, cast to `dtype`.

    Each parameter is placed by its entry in `shardings` (a tree like the parameters; None: one device) and
    each device's part is read on its own. A tied model may hold an lm_head.weight; it is not read.

    Raises:
      FileNotFoundError: no weights, or a file of the index is missing.
      ValueError: a missing, unexpected or wrongly shaped tensor (named, with expected and found), or a
        torn file.
    """
    layout = _layout(config)
    flat_shardings = flatten_dict(shardings, sep="/") if shardings is not None else {}
    default = SingleDeviceSharding(jax.local_devices()[0])
    with _local_weights(epath.Path(folder)) as files:
        tensors = _open_tensors(files)
        _check_tensors(tensors, layout, config)
        flat = {}
        for path, leaf in layout.items():
            sharding = flat_shardings.get(path, default)
            flat[path] = _load_leaf(tensors, leaf, config.num_layers, sharding, np.dtype(dtype))
    return unflatten_dict(flat, sep="/")


def save(
    folder: epath.PathLike,
    config: Qwen3Config,
    params: Params,
    source: epath.PathLike | None = None,
    notes: Mapping[str, str] | None = None,
    shard_bytes: int = 5_000_000_000,
):
    """Writes a Hugging Face folder that transformers' Qwen3ForCausalLM loads, in the parameters' own type.

    Files of at most `shard_bytes` (one tensor at least) hold the weights. Tokenizer, template and generation
    files are copied from the folder `source`; `notes` are further text files by name. Everything is written
    beside `folder` first and moved at the end; an earlier checkpoint there is replaced.

    Raises:
      FileExistsError: `folder` holds a file that is no part of a checkpoint.
    """
    folder = epath.Path(folder)
    notes = notes or {}
    _refuse_foreign_files(folder, notes)
    with _staging(folder) as staging:
        flat = {path: np.asarray(leaf) for path, leaf in flatten_dict(params, sep="/").items()}
        _write_weights(staging, config, flat, shard_bytes)
        dtype = flat["embed/embedding"].dtype.name
        (staging / "config.json").write_text(json.dumps(_config_json(config, dtype), indent=2) + "\n")
        for name in FILES:
            if source is not None and name != "config.json" and (epath.Path(source) / name).exists():
                (staging / name).write_bytes((epath.Path(source) / name).read_bytes())
        for name, text in notes.items():
            (staging / name).write_text(text)


def _load_leaf(
    tensors: Mapping[str, Any], leaf: _Leaf, layers: int, sharding: Sharding, dtype: np.dtype
) -> jax.Array:
    shape = leaf.shape(layers)

    def read(index: tuple[slice, ...]) -> np.ndarray:
        ranges = [range(size)[part] for size, part in zip(shape, index, strict=True)]
        out = np.empty([len(r) for r in ranges], dtype)
        names = leaf.names(ranges[0])
        for name, target in zip(names, out if leaf.stacked else [out], strict=True):
            target[...] = leaf.read(tensors[name].get_slice(name), ranges[leaf.stacked :])
        return out

    return jax.make_array_from_callback(shape, sharding, read)


@contextlib.contextmanager
def _local_weights(folder: epath.Path) -> Iterator[list[Path]]:
    """Yields the weight files; those of a remote folder as temporary copies, since they are memory-mapped."""
    if (folder / _INDEX).exists():
        names = sorted(set(_read_json(folder / _INDEX)["weight_map"].values()))
    else:
        names = [_WEIGHTS]
    for name in names:
        if not (folder / name).exists():
            raise FileNotFoundError(
                f"{folder / name} is missing; expected {_WEIGHTS}, or {_INDEX} and its files."
            )
    if not _is_remote(folder):
        yield [Path(folder / name) for name in names]
        return
    with tempfile.TemporaryDirectory() as local:
        yield [Path((folder / name).copy(Path(local) / name)) for name in names]


def _open_tensors(files: list[Path]) -> dict[str, Any]:
    """Returns tensor name → the open file that holds it."""
    tensors = {}
    for file in files:
        try:
            opened = safe_open(file, framework="numpy")
        except SafetensorError as error:
            raise ValueError(f"{file} is torn or no safetensors file ({error}); copy it again.") from error
        tensors |= dict.fromkeys(opened.keys(), opened)
    return tensors


def _check_tensors(tensors: Mapping, layout: dict[str, _Leaf], config: Qwen3Config):
    shapes = {
        name: leaf.stored_shape for leaf in layout.values() for name in leaf.names(range(config.num_layers))
    }
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise ValueError(
            f"Found no tensor {missing[0]}, expected shape {shapes[missing[0]]} ({len(missing)} missing)."
        )
    if unexpected := sorted(tensors.keys() - shapes.keys() - ignored):
        raise ValueError(
            f"Found tensor {unexpected[0]} ({len(unexpected)} unexpected), expected none of that name for "
            f"{config.num_layers} layers and tie_word_embeddings = {config.tie_word_embeddings}."
        )
    for name, shape in shapes.items():
        part = tensors[name].get_slice(name)
        if tuple(part.get_shape()) != shape or part.get_dtype() not in ("F32", "BF16", "F16"):
            raise ValueError(
                f"Found tensor {name} of shape {tuple(part.get_shape())} and type {part.get_dtype()}, "
                f"expected {shape} and F32, BF16 or F16. Does config.json belong to these weights?"
            )


def _write_weights(staging: Path, config: Qwen3Config, flat: Mapping[str, np.ndarray], shard_bytes: int):
    slots = _slots(config)
    shards = _split(slots, [flat[path][layer].nbytes for path, _, layer in slots.values()], shard_bytes)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = _WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            path, leaf, layer = slots[name]
            tensors[name] = leaf.write(flat[path][layer])
        save_file(tensors, staging / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(x.nbytes for x in flat.values())}, "weight_map": weight_map}
        (staging / _INDEX).write_text(json.dumps(index, indent=2))


def _slots(config: Qwen3Config) -> dict[str, tuple[str, _Leaf, Any]]:
    """Returns tensor name → (path of the parameter, leaf, index of its layer in it)."""
    layers = range(config.num_layers)
    return {
        name: (path, leaf, layer if leaf.stacked else ...)
        for path, leaf in _layout(config).items()
        for layer, name in enumerate(leaf.names(layers))
    }


def _split(names: Mapping, sizes: list[int], limit: int) -> list[list[str]]:
    shards, filled = [[]], 0
    for name, size in zip(names, sizes, strict=True):
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _config_json(config: Qwen3Config, dtype: str) -> dict[str, Any]:
    rope_theta = float(config.rope_theta)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        # Both spellings: transformers 5 reads the second, earlier versions and other programs the first.
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "torch_dtype": dtype,
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
    }


def _rope_theta(path: epath.Path, found: dict[str, Any]) -> float:
    rope = found.get("rope_parameters") or {}
    scaling = found.get("rope_scaling") or rope
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise _unsupported(path, "rope_type", kind, "default")
    thetas = {float(x["rope_theta"]) for x in (found, rope) if x.get("rope_theta") is not None}
    if len(thetas) != 1:
        raise _unsupported(path, "rope_theta", sorted(thetas) or "nothing", "one value")
    return thetas.pop()


def _unsupported(path: epath.Path, field: str, found: Any, expected: Any) -> ValueError:
    return ValueError(
        f"{path}: found {field} = {found!r}, expected {expected!r}. Only plain Qwen3ForCausalLM checkpoints "
        "are supported."
    )


def _read_json(path: epath.Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; expected a Hugging Face checkpoint folder.")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is torn or no JSON ({error}); copy it again.") from error


def _refuse_foreign_files(folder: epath.Path, notes: Mapping[str, str]):
    names = [file.name for file in folder.iterdir()] if folder.exists() else []
    for name in names:
        if name not in (*FILES, *notes) and not re.fullmatch(r"model.*\.safetensors(\.index\.json)?", name):
            raise FileExistsError(
                f"{folder} holds {name}, expected no folder or one with nothing but an earlier checkpoint. "
                "Choose another folder: this one would be replaced."
            )


def _is_remote(folder: epath.Path) -> bool:
    return "://" in os.fspath(folder)


@contextlib.contextmanager
def _staging(folder: epath.Path) -> Iterator[Path]:
    """Yields a new local folder whose content becomes `folder` if no error occurs."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if _is_remote(folder):
        with tempfile.TemporaryDirectory() as local:
            yield Path(local)
            if folder.exists():
                folder.rmtree()
            folder.mkdir(parents=True)
            # config.json last: without it the folder is no checkpoint.
            for file in sorted(Path(local).iterdir(), key=lambda file: file.name == "config.json"):
                epath.Path(file).copy(folder / file.name, overwrite=True)
        return
    partial = Path(folder.parent) / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    yield partial
    # The earlier checkpoint goes only when the new one stands in its place.
    earlier = Path(folder.parent) / f".{folder.name}.earlier"
    shutil.rmtree(earlier, ignore_errors=True)
    if folder.exists():
        Path(folder).rename(earlier)
    partial.rename(folder)
    shutil.rmtree(earlier, ignore_errors=True)
