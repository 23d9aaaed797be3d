"""Reading JSON from outside: what is not as it should be is refused with file, line and reason."""

import json
from collections.abc import Iterator
from typing import Any

from etils import epath

from mopd_jax.refusal import Refusal


def parse_json(data: bytes) -> Any:
    """Returns the value of JSON in UTF-8. Half of a surrogate pair (an escape like `\\ud800`), which no
    tokenizer and no file takes, becomes "?".

    Raises:
      ValueError: it is not JSON, not UTF-8, or nested too deeply.
    """
    try:
        value = json.loads(data.decode("utf-8-sig"))
        if b"\\ud" in data.lower():
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def read_jsonl(path: epath.PathLike) -> Iterator[tuple[str, dict]]:
    """Yields `("PATH, line N", record)` for each line of a UTF-8 file; blank lines are passed over.

    A byte-order mark and CRLF ends are read as what they are. `path` may be a gs:// path.

    Raises:
      Refusal: there is no such file, or a line is not UTF-8 or not a JSON object; the message names file,
        line and reason.
    """
    if not epath.Path(path).is_file():
        raise Refusal(f"Found no file {path}, expected one of JSON objects, one per line.")
    with epath.Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                place = f"{path}, line {number}"
                yield place, parse_line(line, place)


def parse_line(line: bytes, place: str) -> dict:
    """Returns the object of one JSON line.

    Raises:
      ValueError: it is not UTF-8 or not a JSON object; the message begins with `place`.
    """
    try:
        record = parse_json(line)
    except ValueError as error:
        raise Refusal(f"{place}: not JSON ({error}). Expected one JSON object per line.") from error
    if not isinstance(record, dict):
        raise Refusal(f"{place}: found a JSON {type(record).__name__}, expected one object per line.")
    return record


def text_field(record: dict, name: str, place: str) -> str:
    """Returns the non-blank string `record[name]` as it stands.

    Raises:
      Refusal: it is missing, not a string, or blank.
    """
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise Refusal(
            f'{place}: field "{name}" is {_found(record, name)}, expected a non-empty string. '
            f"The record's fields are {sorted(record)}."
        )
    return value


def id_field(record: dict, place: str) -> str:
    """Returns `record["id"]` as a string; whole numbers are accepted, as some published files have them.

    Raises:
      Refusal: it is missing, or neither a non-blank string nor a whole number.
    """
    value = record.get("id")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return text_field(record, "id", place)


def _found(record: dict, name: str) -> str:
    return f"{record[name]!r:.80}" if name in record else "missing"
