"""Writes Qwen3's parameters as a Hugging Face folder: tensor after tensor, from one or many processes."""

import collections
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mopd_jax.model import folders
from mopd_jax.model.hf import INDEX, SIZES, TYPES, WEIGHTS, Params, Track
from mopd_jax.model.hf_layout import Leaf, layout
from mopd_jax.model.qwen3 import Qwen3Config


def save(
    folder: epath.PathLike,
    config: Qwen3Config,
    params: Params,
    source: epath.PathLike | None = None,
    notes: Mapping[str, str] | None = None,
    shard_bytes: int = 5_000_000_000,
    dtype: jnp.dtype | None = None,
    track: Track = iter,
) -> None:
    """Writes a Hugging Face folder that transformers' Qwen3ForCausalLM loads.

    Parameters may span several processes: then all of them call this. One tensor after the other is made
    whole, in the same order everywhere; process 0 writes it, and all return when the folder stands.

    Args:
      folder: appears whole or not at all; an earlier checkpoint there is replaced.
      config: the model's sizes.
      params: a tree of arrays.
      source: tokenizer, template and generation files are copied from this folder.
      notes: further text files by name.
      shard_bytes: files of at most this size (one tensor at least) hold the weights.
      dtype: of the written weights; None: each parameter's own.
      track: over the tensors.

    Raises:
      FileExistsError: `folder` holds a file that is no part of a checkpoint.
      ValueError: a parameter is missing or has another shape.
    """
    notes, flat = notes or {}, flatten_dict(params, sep="/")
    _check_params(flat, config)
    folders.refuse_foreign_files(folder, notes)
    slots = _slots(flat, config, dtype)
    tensors = (_whole(slot) for slot in track(slots.values()))
    if jax.process_index() == 0:
        with folders.staging(folder) as staging:
            _write_weights(staging, slots, tensors, shard_bytes)
            write_config(staging, config, slots["model.embed_tokens.weight"].dtype)
            copy_files(source, staging)
            for name, text in notes.items():
                (staging / name).write_text(text)
    collections.deque(tensors, maxlen=0)  # the other processes': making a tensor whole takes them all
    multihost_utils.sync_global_devices(f"{folder} is saved")


def write_config(folder: Path, config: Qwen3Config, dtype: np.dtype) -> None:
    """Writes config.json for weights of this type."""
    (folder / "config.json").write_text(json.dumps(_config_json(config, dtype.name), indent=2) + "\n")


def copy_files(source: epath.PathLike | None, folder: Path) -> None:
    """Copies tokenizer, template and generation files; config.json is not among them."""
    for name in folders.FILES:
        if source is not None and name != "config.json" and (epath.Path(source) / name).exists():
            (folder / name).write_bytes((epath.Path(source) / name).read_bytes())


class _Slot(NamedTuple):
    """A tensor to be written."""

    leaf: Leaf
    array: jax.Array
    """The parameter that holds it."""
    layer: int | None
    """Which part of the parameter it is; None: all of it."""
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.leaf.stored_shape) * self.dtype.itemsize


def _check_params(flat: Mapping[str, Any], config: Qwen3Config) -> None:
    expected = {path: leaf.shape(config.num_layers) for path, leaf in layout(config).items()}
    found = {path: tuple(array.shape) for path, array in flat.items()}
    for path in sorted(expected.keys() | found.keys()):
        if expected.get(path) != found.get(path):
            raise ValueError(
                f"Found parameter {path} of shape {found.get(path, 'nothing')}, expected "
                f"{expected.get(path, 'nothing')}: these sizes do not belong to these weights."
            )


def _slots(flat: Mapping[str, Any], config: Qwen3Config, dtype: jnp.dtype | None) -> dict[str, _Slot]:
    """Returns what is to be written, by the tensors' names."""
    slots = {}
    for path, leaf in layout(config).items():
        array = jnp.asarray(flat[path])
        for layer, name in enumerate(leaf.names(range(config.num_layers))):
            slots[name] = _Slot(leaf, array, layer if leaf.stacked else None, np.dtype(dtype or array.dtype))
    return slots


def _whole(slot: _Slot) -> np.ndarray:
    """Brings one tensor's parameter together; every process that holds a part of it has to take part."""
    found = _fetch(slot.array.sharding, slot.dtype)(slot.array, slot.layer)
    if found.is_fully_replicated:
        return np.asarray(found)
    whole = np.empty(found.shape, found.dtype)
    for part in found.addressable_shards:  # one by one: JAX would hold a copy of each on the host, too
        whole[part.index] = part.data
    return whole


@functools.cache
def _fetch(sharding: Sharding, dtype: np.dtype) -> Callable[[jax.Array, int | None], jax.Array]:
    def fetch(array, layer):
        return (array if layer is None else array[layer]).astype(dtype)

    # What other processes hold comes through the devices; the rest is put together in the host's memory.
    whole = None if sharding.is_fully_addressable else NamedSharding(sharding.mesh, PartitionSpec())
    return jax.jit(fetch, out_shardings=whole)


def _write_weights(
    staging: Path, slots: Mapping[str, _Slot], tensors: Iterator[np.ndarray], shard_bytes: int
) -> None:
    shards, weight_map = _split(slots, shard_bytes), {}
    for number, names in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(staging / file, {name: slots[name] for name in names}, tensors)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(slot.nbytes for slot in slots.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (staging / INDEX).write_text(json.dumps(index, indent=2))


def _split(slots: Mapping[str, _Slot], limit: int) -> list[list[str]]:
    shards, filled = [[]], 0
    for name, slot in slots.items():
        if shards[-1] and filled + slot.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += slot.nbytes
    return shards


def _write_file(path: Path, slots: Mapping[str, _Slot], tensors: Iterator[np.ndarray]) -> None:
    """Writes one safetensors file: its header's length, the header, and the tensors as they come.

    The library's own writer wants all tensors of a file in memory at once.
    """
    ends = list(itertools.accumulate(slot.nbytes for slot in slots.values()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for (name, slot), end in zip(slots.items(), ends, strict=True):
        kind = next(theirs for theirs, ours in TYPES.items() if ours == slot.dtype.name)
        offsets = [end - slot.nbytes, end]
        header[name] = {"dtype": kind, "shape": slot.leaf.stored_shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for slot in slots.values():
            file.write(slot.leaf.write(next(tensors)).reshape(-1).view(np.uint8))


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
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
    }
