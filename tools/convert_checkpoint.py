"""Converts weights between Hugging Face folders and Orbax checkpoints.

    python -m tools.convert_checkpoint --from runs/stage2 --step 200 --to exported/stage2_200
    python -m tools.convert_checkpoint --from Qwen3-4B-Instruct-2507 --to gs://bucket/qwen3-4b

A run's folder (its latest checkpoint, or that of --step) becomes a Hugging Face folder that transformers
loads. A Hugging Face folder becomes one of the same files with an Orbax checkpoint in place of safetensors:
every field of a config that names a model takes it like any other, each host reads only its own slices of
it, and the first form of the command turns it back. What does not fit is refused before anything is
written; the target appears whole or not at all.
"""

import argparse
import functools
import math
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import rich.progress
from etils import epath
from jax.sharding import Mesh

from mopd_jax.config import Config
from mopd_jax.model import folders, hf, hf_save
from mopd_jax.model.qwen3 import Qwen3
from mopd_jax.model.sharding import make_mesh, param_shardings
from mopd_jax.refusal import Refusal, in_words
from mopd_jax.run import parts, weights
from mopd_jax.run.checkpoint import config_from_dict


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` defaults to the process' own arguments."""
    args = _parse(argv)
    source, target = epath.Path(args.source), epath.Path(args.to)
    if source.resolve() == target.resolve():
        raise Refusal(f"--from and --to are both {source}; expected another folder to write to.")
    folders.refuse_foreign_files(target, [parts.LANGUAGE_FILE])
    started = time.monotonic()
    is_model = (source / "config.json").exists()
    if is_model and not weights.has_orbax(source):
        if args.step is not None:
            raise Refusal(f"{source} is a Hugging Face folder and has no steps: leave --step out.")
        params = to_orbax(source, target, args.dtype)
    else:
        params = to_hugging_face(source, target, args.step, args.dtype)
    count, kind = sum(x.size for x in jax.tree.leaves(params)), args.dtype or "their own type"
    print(f"{target}: {count:,} parameters in {kind}, {time.monotonic() - started:.0f} s")


def to_orbax(source: epath.Path, target: epath.Path, dtype: str | None) -> hf.Params:
    """Writes the weights of a Hugging Face folder as an Orbax checkpoint, and returns them.

    Raises:
      Refusal: as `hf.read_config` and `hf.load_params`.
    """
    config = hf.read_config(source)
    stored = jnp.dtype(dtype or hf.stored_dtype(source, config))
    layout = param_shardings(Qwen3(config), _mesh(config.hidden_size))
    params = hf.load_params(source, config, layout, stored, _progress("Reading parameters"))
    with folders.staging(target) as staging:
        print("Writing the Orbax checkpoint …", flush=True)
        weights.save(staging, params)
        hf_save.copy_files(source, staging)
        for name, text in _notes(source).items():
            (staging / name).write_text(text)
        hf_save.write_config(staging, config, stored)
    return params


def to_hugging_face(source: epath.Path, target: epath.Path, step: int | None, dtype: str | None) -> hf.Params:
    """Writes the weights of a run or a model in Orbax's format as a Hugging Face folder, and returns them.

    Raises:
      CheckpointError: there is no such step, it is torn, or its parameters have other sizes.
      Refusal: what the run started from (`model.init`), and with it the tokenizer, is gone.
    """
    step = weights.find_step(source, step)
    if (source / "config.json").exists():
        folder, model, notes = source, Qwen3(hf.read_config(source)), _notes(source)
    else:
        config = config_from_dict(Config, weights.read_meta(source, step)["config"])
        config.run.dir = str(source)
        start = parts.open_model(config.model.init, config)
        folder, model, notes = start.folder, start.model, parts.notes(config.team)
    print(f"Reading step {step} …", flush=True)
    mesh = _mesh(model.config.hidden_size)
    stored = jnp.dtype(dtype or weights.stored_dtype(source, step))
    params = weights.load(source, step, model, mesh, stored)
    hf_save.save(target, model.config, params, folder, notes, track=_progress("Writing tensors"))
    return params


def _mesh(width: int) -> Mesh:
    """As many of this process' devices as the width of the weights can be split over."""
    count = math.gcd(width, jax.local_device_count())
    return make_mesh((1, count, 1), jax.local_devices()[:count])


def _notes(folder: epath.Path) -> dict[str, str]:
    path = folder / parts.LANGUAGE_FILE
    return {path.name: path.read_text()} if path.exists() else {}


def _progress(what: str) -> hf.Track:
    return functools.partial(rich.progress.track, description=what)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--from", dest="source", required=True, help="Hugging Face, run or converted folder")
    parser.add_argument("--to", required=True, help="folder to write")
    parser.add_argument("--step", type=int, help="of a run; default: the latest")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as it is stored")
    return parser.parse_args(argv)


if __name__ == "__main__":
    with in_words():
        main()
