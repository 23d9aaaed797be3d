"""Index folders: whole or absent, and made from the very corpus that they are opened with."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.corpus import fingerprint

META = "index.json"
FORMATS = {"bm25": 2, "dense": 1}
"""Of each kind of index, the version of its files."""
GB = 1e9


@contextlib.contextmanager
def building(folder: str) -> Iterator[Path]:
    """Yields a new folder that becomes `folder`, in place of an earlier index, if no error occurs.

    Raises:
      Refusal: `folder` is a file or holds something else.
    """
    final = Path(folder)
    if final.exists() and not final.is_dir():
        raise Refusal(f"{folder} is a file, expected a folder that can be replaced, or none: choose another.")
    if final.exists() and any(final.iterdir()) and not (final / META).exists():
        raise Refusal(f"{folder} holds files and no {META}: choose a folder that can be replaced.")
    partial = final.absolute().with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with contextlib.ExitStack() as cleaning:
        cleaning.callback(shutil.rmtree, partial, ignore_errors=True)
        yield partial
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)


def seal(folder: Path, kind: str, corpus: str, **settings: Any) -> None:
    """Writes what the index is, last of all: kind, the corpus' fingerprint, settings, sizes of its files."""
    files = {str(f.relative_to(folder)): f.stat().st_size for f in sorted(folder.rglob("*")) if f.is_file()}
    meta = {"kind": kind, "format": FORMATS[kind], "corpus": fingerprint(corpus), **settings, "files": files}
    (folder / META).write_text(json.dumps(meta, indent=2) + "\n")


def kind_of(folder: str) -> str:
    """Returns which kind of index a folder holds. Raises as `unseal`."""
    return _read_meta(Path(folder))["kind"]


def unseal(folder: str, kind: str, corpus: str) -> dict[str, Any]:
    """Returns what `seal` wrote of a whole index of this kind and this corpus.

    Raises:
      Refusal: there is no index, or it is torn, of another kind, format or corpus.
    """
    meta = _read_meta(Path(folder))
    if meta["kind"] != kind:
        raise Refusal(
            f"{folder} is a {meta['kind']} index, expected {kind}. Set retrieval.backend = {meta['kind']}, "
            "or build the other one with tools/build_index."
        )
    if (found := meta.get("format", 1)) != FORMATS[kind]:  # the first versions did not say theirs
        raise Refusal(
            f"{folder} is a {kind} index of format {found}, expected {FORMATS[kind]}. Build it again with "
            "tools/build_index."
        )
    for name, size in meta["files"].items():
        found = (Path(folder) / name).stat().st_size if (Path(folder) / name).exists() else "nothing"
        if found != size:
            raise Refusal(
                f"{folder} is torn: found {found} of the {size} bytes of {name}. Build it again with "
                "tools/build_index."
            )
    if (found := fingerprint(corpus)) != meta["corpus"]:
        raise Refusal(
            f"{folder} was made from another corpus: its fingerprint is {meta['corpus']}, that of {corpus} "
            f"is {found}. Name the corpus it was made from, or build it again with tools/build_index."
        )
    return meta


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / META
    if not path.exists():
        raise Refusal(f"{folder} holds no {META}: it is no index. Make one with tools/build_index.")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise Refusal(f"{path} is torn ({error}): build the index again with tools/build_index.") from error


def available_bytes() -> int:
    """Returns how much memory this machine has free for use, caches that can be dropped included."""
    return psutil.virtual_memory().available


def require_memory(what: str, need: float, have: float, otherwise: str) -> None:
    """Refuses what would not fit: `what` needs so many bytes, `otherwise` says what to do instead.

    Raises:
      Refusal: with need and have.
    """
    if need > have:
        raise Refusal(f"{what} needs {need / GB:.2f} GB, {have / GB:.2f} GB are free: {otherwise}.")
