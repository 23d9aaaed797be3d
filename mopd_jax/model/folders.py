"""Folders of checkpoints that stand whole or not at all, on a disk or in a bucket (gs://)."""

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from etils import epath

from mopd_jax.refusal import Refusal

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
"""The files of a Hugging Face folder that say how text is encoded; the last six are optional."""

ORBAX = "checkpoints"
"""Where a folder keeps Orbax checkpoints."""
_WEIGHTS = rf"model.*\.safetensors(\.index\.json)?|{ORBAX}"


def is_remote(folder: epath.PathLike) -> bool:
    """Returns whether files of the folder have to be copied before they can be mapped into memory."""
    return "://" in os.fspath(folder)


def refuse_foreign_files(folder: epath.PathLike, others: Collection[str] = ()) -> None:
    """Checks that nothing but an earlier checkpoint would be replaced; `others` are names of further files.

    Raises:
      Refusal: names a file that is no part of a checkpoint.
    """
    folder = epath.Path(folder)
    for name in [file.name for file in folder.iterdir()] if folder.exists() else []:
        if name not in (*FILES, *others) and not re.fullmatch(_WEIGHTS, name):
            raise Refusal(
                f"{folder} holds {name}, expected no folder or one with nothing but an earlier checkpoint. "
                "Choose another folder: this one would be replaced."
            )


def read_json(path: epath.Path) -> dict[str, Any]:
    """Returns the JSON object that a file of a checkpoint holds.

    Raises:
      Refusal: the file is missing, torn or something else.
    """
    if not path.exists():
        raise Refusal(f"{path} is missing; expected a Hugging Face checkpoint folder.")
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise Refusal(f"{path} is torn or no JSON ({error}); copy it again.") from error
    if not isinstance(found, dict):
        raise Refusal(f"{path} holds a JSON {type(found).__name__}, expected an object; copy it again.")
    return found


@contextlib.contextmanager
def staging(folder: epath.PathLike) -> Iterator[Path]:
    """Yields a new local folder whose content becomes `folder`, in place of an earlier one, if no error
    occurs; after one nothing is left of it."""
    folder = epath.Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if is_remote(folder):
        with tempfile.TemporaryDirectory() as local:
            yield Path(local)
            _upload(Path(local), folder)
        return
    partial, earlier = (Path(folder.parent) / f".{folder.name}.{kind}" for kind in ("partial", "earlier"))
    with contextlib.ExitStack() as cleaning:
        cleaning.callback(shutil.rmtree, partial, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        # The earlier checkpoint goes only when the new one stands in its place.
        shutil.rmtree(earlier, ignore_errors=True)
        if folder.exists():
            Path(folder).rename(earlier)
        partial.rename(folder)
        shutil.rmtree(earlier, ignore_errors=True)


def _upload(local: Path, folder: epath.Path) -> None:
    if folder.exists():
        folder.rmtree()
    # config.json last: without it the folder is no checkpoint.
    files = [file.relative_to(local) for file in local.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda file: str(file) == "config.json"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        epath.Path(local / file).copy(folder / file, overwrite=True)
