"""Qwen3 checkpoints as Hugging Face folders: reads config.json and safetensors (`hf_save` writes them)."""

import collections
import hashlib
import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Sharding, SingleDeviceSharding
from safetensors import SafetensorError, safe_open

from mopd_jax.model import folders
from mopd_jax.model.hf_layout import Leaf, layout
from mopd_jax.model.qwen3 import Qwen3Config
from mopd_jax.refusal import Refusal

Params = dict[str, Any]
Track = Callable[[Collection], Iterable]
"""Passes the elements of a collection on, and may show how far it is (`rich.progress.track`)."""

_MIB = 2**20
_ALIGNMENT = 64
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""What safetensors calls a type → what NumPy does."""
SIZES = {
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


def read_config(folder: epath.PathLike) -> Qwen3Config:
    """Returns the sizes in a folder's config.json; how they are computed is left at its defaults.

    Raises:
      Refusal: there is no config.json, a field is missing, or asks for what the model does not implement
        (another architecture, scaled rotary positions, attention bias, sliding window, another activation).
    """
    path = epath.Path(folder) / "config.json"
    found = folders.read_json(path)
    for field, values in _SUPPORTED.items():
        if found.get(field) not in values:
            raise _unsupported(path, field, found.get(field), values[0])
    if set(found.get("layer_types") or ()) - {"full_attention"}:
        raise _unsupported(path, "layer_types", found["layer_types"], "full_attention only")
    for field in SIZES.values():
        if field not in found:
            raise _unsupported(path, field, "nothing", "a value")
    sizes = {ours: found[theirs] for ours, theirs in SIZES.items()}
    return Qwen3Config(**sizes, rope_theta=_rope_theta(path, found))


def fingerprint(folder: epath.PathLike) -> str:
    """Returns a hash (hex) that tells other weights or sizes: of config.json, and of each weight file's size,
    first and last MiB, since training changes every tensor and whole files are large."""
    folder, digest = epath.Path(folder), hashlib.sha256()
    digest.update((folder / "config.json").read_bytes())
    patterns = (
        "model*.safetensors",
        f"{folders.ORBAX}/*/state/manifest.ocdbt",
        f"{folders.ORBAX}/*/state/d/*",
    )
    for file in sorted(file for pattern in patterns for file in folder.glob(pattern)):
        size = file.stat().length
        with file.open("rb") as stream:
            digest.update(f"{file.relative_to(folder)} {size}".encode() + stream.read(_MIB))
            stream.seek(max(0, size - _MIB))
            digest.update(stream.read(_MIB))
    return digest.hexdigest()[:16]


def stored_dtype(folder: epath.PathLike, config: Qwen3Config) -> np.dtype:
    """Returns the type of a folder's weights (of its embedding; the others have the same). Raises as
    `load_params`."""
    name = layout(config)["embed/embedding"].name
    with _checked_tensors(folder, config) as tensors:
        return np.dtype(TYPES[tensors[name].get_slice(name).get_dtype()])


def load_params(
    folder: epath.PathLike,
    config: Qwen3Config,
    shardings: Params | None = None,
    dtype: jnp.dtype = jnp.float32,
    track: Track = iter,
) -> Params:
    """Returns the parameters of a Hugging Face folder, single or sharded file, cast to `dtype`.

    Each parameter is placed by its entry in `shardings` (a tree like the parameters; None: one device). A
    process reads what its own devices hold and no more, each slice once however many of them hold it. A tied
    model may hold an lm_head.weight; it is not read.

    Raises:
      Refusal: no weights, a missing or torn file, or a missing, unexpected, wrongly shaped or not finite
        tensor (named, with expected and found).
    """
    flat_shardings = flatten_dict(shardings, sep="/") if shardings is not None else {}
    default = SingleDeviceSharding(jax.local_devices()[0])
    flat = {}
    with _checked_tensors(folder, config) as tensors:
        for path, leaf in track(layout(config).items()):
            sharding = flat_shardings.get(path, default)
            flat[path] = _load_leaf(tensors, leaf, config.num_layers, sharding, np.dtype(dtype))
    return unflatten_dict(flat, sep="/")


def _load_leaf(
    tensors: Mapping[str, Any], leaf: Leaf, layers: int, sharding: Sharding, dtype: np.dtype
) -> jax.Array:
    shape = leaf.shape(layers)
    holders = collections.defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        holders[tuple(range(size)[part] for size, part in zip(shape, index, strict=True))].append(device)
    arrays = []
    for ranges, devices in holders.items():
        part = _read_part(tensors, leaf, ranges, dtype)
        # Before the next part is read this one has left the host.
        arrays += jax.block_until_ready([jax.device_put(part, device) for device in devices])
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read_part(
    tensors: Mapping[str, Any], leaf: Leaf, ranges: Sequence[range], dtype: np.dtype
) -> np.ndarray:
    out = _aligned_empty([len(r) for r in ranges], dtype)
    layers = ranges[0] if leaf.stacked else range(1)
    for name, target in zip(leaf.names(layers), out if leaf.stacked else [out], strict=True):
        if not leaf.read(tensors[name].get_slice(name), ranges[leaf.stacked :], target):
            raise Refusal(
                f"Found NaN or infinity in tensor {name} as {dtype}, expected finite numbers. Take an "
                "earlier checkpoint, or save it again."
            )
    return out


def _aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns an array that JAX takes over as it is where the device is the host's own CPU."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


@contextmanager
def _checked_tensors(folder: epath.PathLike, config: Qwen3Config) -> Iterator[dict[str, Any]]:
    """Yields tensor name → the open file that holds it, names, shapes and types checked."""
    folder = epath.Path(folder)
    index = _read_index(folder) if (folder / INDEX).exists() else {}
    names = sorted(set(index.values())) or [WEIGHTS]
    for name in names:
        if not (folder / name).exists():
            raise Refusal(f"{folder / name} is missing; expected {WEIGHTS}, or {INDEX} and its files.")
    with tempfile.TemporaryDirectory() as local:  # stays empty for a local folder: its files are mapped
        opened = {name: _open(_local_copy(folder / name, Path(local))) for name in names}
        held = {name: set(file.keys()) for name, file in opened.items()}
        index = index or dict.fromkeys(held[WEIGHTS], WEIGHTS)
        for tensor, name in index.items():
            if tensor not in held[name]:
                raise Refusal(
                    f"Found no tensor {tensor} in {folder / name}, expected it there by {INDEX}. Do the "
                    "files belong together?"
                )
        tensors = {tensor: opened[name] for tensor, name in index.items()}
        _check_tensors(tensors, config)
        yield tensors


def _read_index(folder: epath.Path) -> dict[str, str]:
    found = folders.read_json(folder / INDEX).get("weight_map")
    if not found or not isinstance(found, dict):
        raise Refusal(f"{folder / INDEX} has no weight_map, expected one from tensors to files.")
    return found


def _local_copy(file: epath.Path, local: Path) -> Path:
    return Path(file.copy(local / file.name)) if folders.is_remote(file) else Path(file)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise Refusal(f"{file} is torn or no safetensors file ({error}); copy it again.") from error


def _check_tensors(tensors: Mapping[str, Any], config: Qwen3Config) -> None:
    table, layers = layout(config).values(), range(config.num_layers)
    shapes = {name: leaf.stored_shape for leaf in table for name in leaf.names(layers)}
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise Refusal(
            f"Found no tensor {missing[0]}, expected shape {shapes[missing[0]]} ({len(missing)} missing)."
        )
    if unexpected := sorted(tensors.keys() - shapes.keys() - ignored):
        raise Refusal(
            f"Found tensor {unexpected[0]} ({len(unexpected)} unexpected), expected none of that name for "
            f"{config.num_layers} layers and tie_word_embeddings = {config.tie_word_embeddings}."
        )
    for name, shape in shapes.items():
        part = tensors[name].get_slice(name)
        if tuple(part.get_shape()) != shape or part.get_dtype() not in TYPES:
            raise Refusal(
                f"Found tensor {name} of shape {tuple(part.get_shape())} and type {part.get_dtype()}, "
                f"expected {shape} and F32, BF16 or F16. Does config.json belong to these weights?"
            )


def _rope_theta(path: epath.Path, found: dict[str, Any]) -> float:
    rope = found.get("rope_parameters") or {}
    for scaling in (rope, found.get("rope_scaling") or {}):
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default" or "factor" in scaling:
            raise _unsupported(path, "rope_type", kind, "default, without a factor")
    thetas = {float(x["rope_theta"]) for x in (found, rope) if x.get("rope_theta") is not None}
    if len(thetas) != 1:
        raise _unsupported(path, "rope_theta", sorted(thetas) or "nothing", "one value")
    return thetas.pop()


def _unsupported(path: epath.Path, field: str, found: Any, expected: Any) -> Refusal:
    return Refusal(
        f"{path}: found {field} = {found!r}, expected {expected!r}. Only plain Qwen3ForCausalLM checkpoints "
        "are supported."
    )
