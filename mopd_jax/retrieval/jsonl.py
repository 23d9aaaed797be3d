"""Reading JSON lines: a file that is not what it should be is refused with file, line and reason."""

import json
from collections.abc import Iterator

from etils import epath

from mopd_jax.refusal import Refusal


def read_jsonl(path: str) -> Iterator[tuple[str, dict]]:
    """Yields `("PATH, line N", record)` for each line of a UTF-8 file; blank lines are passed over.

    A byte-order mark and CRLF ends are read as what they are. `path` may be a gs:// path.

    Raises:
      Refusal: a line is not UTF-8 or not a JSON object; the message names file, line and reason.
    """
    with epath.Path(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                place = f"{path}, line {number}"
                yield place, _parse(line, place)


def _parse(line: bytes, place: str) -> dict:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are both ValueErrors
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
