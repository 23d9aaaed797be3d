"""Passages on disk: a JSONL file that is checked once, and then read one passage at a time."""

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import rich.progress
from etils import epath

from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.jsonl import id_field, parse_line, text_field
from mopd_jax.retrieval.search import Document

T = TypeVar("T")
PIECES, PIECE = 1024, 2**16
"""A file of more bytes than all pieces together is told from others by so many pieces of it."""


def scan(path: str, progress: str = "") -> Iterator[tuple[int, Document]]:
    """Yields (offset in bytes, passage) of a `{"id", "contents"}` JSONL file, in the file's order.

    Args:
      path: a file on this machine, since passages are read from it by offset; blank lines are passed over.
      progress: what a bar on the terminal says of it; none for "".

    Raises:
      Refusal: there is no such file on this machine, a line is no JSON object, a field is missing or empty,
        an id comes twice, or the file holds no passage; the message names file, line and reason.
    """
    if not Path(path).is_file():
        raise Refusal(f"Found no file {path} on this machine's disk, expected one of passages.")
    first_seen, offset = {}, 0
    with rich.progress.open(path, "rb", description=progress, disable=not progress) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                document = _read(line, f"{path}, line {number}")
                first = first_seen.setdefault(document.id, number)
                if first != number:
                    raise Refusal(
                        f"{path}, line {number}: id {document.id!r} was already used in line {first}."
                    )
                yield offset, document
            offset += len(line)
    if not first_seen:
        raise Refusal(f'{path}: found no passage, expected lines of {{"id", "contents"}}.')


def _read(line: bytes, place: str, score: float | None = None) -> Document:
    record = parse_line(line, place)
    return Document(id_field(record, place), text_field(record, "contents", place), score)


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yields the items in lists of `size`, the last one shorter (`itertools.batched` of Python 3.12)."""
    items = iter(items)
    while batch := list(itertools.islice(items, size)):
        yield batch


class Corpus:
    """The passages of a scanned file by their number; none of them is kept in memory."""

    def __init__(self, path: str, starts: np.ndarray):
        """Takes the file and the offsets at which its passages start."""
        self._path, self._starts = path, starts
        self._file = Path(path).open("rb")  # noqa: SIM115
        self._size = os.fstat(self._file.fileno()).st_size

    def __len__(self) -> int:
        return len(self._starts)

    def document(self, number: int, score: float | None = None) -> Document:
        """Returns passage `number`, from 0, with the score it was found by."""
        start = int(self._starts[number])
        end = int(self._starts[number + 1]) if number + 1 < len(self) else self._size
        line = os.pread(self._file.fileno(), end - start, start)
        return _read(line, f"{self._path}, byte {start}", score)


def fingerprint(path: epath.PathLike) -> str:
    """Returns 16 hex digits that tell a file from others.

    Up to 64 MiB they begin its sha256; of a larger file they cover its size and 1,024 pieces of 64 KiB,
    spread evenly from the first byte to the last, since it has to be opened in seconds.
    """
    size = epath.Path(path).stat().length
    with epath.Path(path).open("rb") as file:
        if size <= PIECES * PIECE:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
        digest = hashlib.sha256(str(size).encode())
        for i in range(PIECES):
            file.seek(i * (size - PIECE) // (PIECES - 1))
            digest.update(file.read(PIECE))
    return digest.hexdigest()[:16]
