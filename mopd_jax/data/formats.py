"""Question files in the formats in which they are published: each record is read right, or refused.

FlashRAG lines, the native formats of NQ-open, EfficientQA, TriviaQA, HotpotQA, 2WikiMultihopQA, MuSiQue and
Bamboogle, and those in which others pass them on (verl, R1-Searcher, T2RAG). The fields of a record say
which one it is.
"""

import csv
import dataclasses
import io
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow
import pyarrow.parquet
from etils import epath

from mopd_jax.data.questions import check_unused, from_flashrag
from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.jsonl import parse_line
from mopd_jax.team.episode import Question

Record = bytes | dict
"""What a file holds: JSON not parsed yet, or the row of a table."""

_DOCUMENT = re.compile(r'\s*(?:\{\s*"Data"\s*:\s*)?\[')
"""How a JSON list begins, or TriviaQA's list inside an object."""
_BETWEEN = re.compile(r"[\s,]*")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
"""What "surrogateescape" makes of bytes that are not UTF-8."""
_IDS = ("id", "_id", "idx", "item_id")


@dataclass
class Reading:
    """What the files of one set came to."""

    questions: list[Question] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """File, line and reason of each record that was left out."""


def read_set(paths: Sequence[str], dataset: str, split: str) -> Reading:
    """Returns the questions of files as those of (dataset, split), and why records were refused.

    A record without an id is called SPLIT_NUMBER, its position in its file counted from 0, as FlashRAG does.

    Raises:
      Refusal: a whole file is not what its name says (not JSON, a table without questions).
    """
    reading, first_seen = Reading(), {}
    for path in paths:
        for number, (place, record) in enumerate(read_records(path)):
            try:
                question = _question(record, f"{split}_{number}", place)
                question = dataclasses.replace(question, dataset=dataset, split=split)
                check_unused(question, place, first_seen)
                reading.questions.append(question)
            except Refusal as error:
                reading.refused.append(str(error))
    return reading


# ---------------------------------------------------------------- files


def read_records(path: str) -> Iterator[tuple[str, Record]]:
    """Yields (place, record) of each record of a .parquet, .csv, .tsv, .json or .jsonl file.

    The place is the file and, where it has them, the line. What .json holds is found out: a list, TriviaQA's
    object, or one object per line.

    Raises:
      Refusal: there is no such file, it is cut off or damaged, a list is not the last of its file, or a
        table has no columns Question and Answer.
    """
    if not epath.Path(path).is_file():
        raise Refusal(f"Found no file {path}, expected one of questions.")
    suffix = pathlib.PurePath(path).suffix
    if suffix == ".parquet":
        yield from _rows(path)
    elif suffix in (".csv", ".tsv"):
        yield from _table(path)
    else:
        data = epath.Path(path).read_bytes()
        text = data.decode("utf-8-sig", "surrogateescape")
        yield from _document(text, path) if _DOCUMENT.match(text) else _lines(data, path)


def _lines(data: bytes, path: str) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield f"{path}, line {number}", line


def _document(text: str, path: str) -> Iterator[tuple[str, bytes]]:
    opened = _DOCUMENT.match(text)
    at = _BETWEEN.match(text, opened.end()).end()
    line, last, number = 1, 0, 0
    while not text.startswith("]", at):
        line, last, number = line + text.count("\n", last, at), at, number + 1
        place = f"{path}, line {line}, record {number}"
        end = _end_of_value(text, at, place)
        yield place, text[at:end].encode("utf-8", "surrogateescape")
        at = _BETWEEN.match(text, end).end()
    _check_end(text, at + 1, "{" in opened[0], path)


def _end_of_value(text: str, at: int, place: str) -> int:
    try:
        _, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", error)
        raise Refusal(f"{place}: not JSON ({reason}). Is the file cut off?") from error
    return end


def _check_end(text: str, at: int, inside: bool, path: str) -> None:
    """Raises Refusal unless a list that ends at `at` is the last of its file, but for the object it may be
    inside."""
    rest = ('{"Data": []' if inside else "[]") + text[at:]
    found = rest[_end_of_value(rest, 0, f"{path}, behind the list") :].strip()
    if found:
        line = text.count("\n", 0, text.rindex(found)) + 1
        raise Refusal(
            f"{path}, line {line}: found {found[:40]!r} behind the list, expected its end. "
            "Give each list a file of its own."
        )


def _rows(path: str) -> Iterator[tuple[str, dict]]:
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip()
        raise Refusal(f"{path}: no parquet file, or a damaged one ({reason}). Copy it again.") from error
    yield from ((f"{path}, record {number}", row) for number, row in enumerate(rows, 1))


def _table(path: str) -> Iterator[tuple[str, dict]]:
    rows = _table_rows(path)
    _, columns = next(rows, (1, []))
    if not {"Question", "Answer"} <= set(columns):
        raise Refusal(
            f"{path}, line 1: found the columns {columns!s:.80}, expected Question and Answer. "
            "A table of passages holds no questions."
        )
    for line, row in rows:
        yield f"{path}, line {line}", dict(zip(columns, row, strict=False))


def _table_rows(path: str) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(2**24)  # a whole page; Python's own limit is 2**17 characters
    text = epath.Path(path).read_bytes().decode("utf-8-sig", "surrogateescape")
    rows = csv.reader(io.StringIO(text, newline=""))
    try:
        yield from ((rows.line_num, row) for row in rows)
    except csv.Error as error:
        raise Refusal(
            f"{path}, line {rows.line_num}: no row of a table ({error}). Is a quotation mark not closed?"
        ) from error


# ---------------------------------------------------------------- records


def _question(record: Record, id_: str, place: str) -> Question:
    """Returns a record as a question, `id_` standing in for a missing id; raises Refusal with a reason."""
    if isinstance(record, bytes):
        record = parse_line(record, place)
    convert = next((convert for names, convert in FORMATS.items() if record.keys() >= set(names)), None)
    if convert is None:
        expected = ", or ".join(" and ".join(names) for names in FORMATS)
        passage = " It is a passage, for retrieval.corpus." if "contents" in record else ""
        raise Refusal(f"{place}: found the fields {sorted(record)}, expected {expected}.{passage}")
    flashrag = {"id": id_} | convert(record)
    if flashrag["golden_answers"] in ([], None):
        raise Refusal(f"{place}: found no gold answer; the record's fields are {sorted(record)}.")
    question = from_flashrag(flashrag, "", place)
    if any(map(_NOT_UTF8.search, (question.text, *question.answers))):
        raise Refusal(f"{place}: the text is damaged, it is not UTF-8.")
    return question


def _flashrag(record: dict) -> dict:
    return {name: record[name] for name in ("id", "question", "golden_answers") if name in record}


def _plain(record: dict) -> dict:
    """NQ-open, EfficientQA, HotpotQA, 2WikiMultihopQA, MuSiQue, R1-Searcher: `answer` is a text or a list.

    T2RAG's PopQA, which has no other fields, joins its answers with "|".
    """
    answers = [*_listed(record.get("answer")), *_listed(record.get("answer_aliases"))]
    if record.keys() == {"_id", "question", "answer"}:
        answers = [part for text in answers for part in str(text).split("|")]
    return _id(record) | {"question": record["question"], "golden_answers": answers}


def _prompt_target(record: dict) -> dict:
    return _id(record) | {"question": record["prompt"], "golden_answers": _listed(record["target"])}


def _triviaqa(record: dict) -> dict:
    """The answers that TriviaQA's own evaluation accepts: its value, the aliases, what people answered."""
    answers = [
        answer
        for name in ("Value", "Aliases", "HumanAnswers")
        for answer in _listed(_at(record, "Answer", name))
    ]
    return {"id": record["QuestionId"], "question": record["Question"], "golden_answers": answers}


def _sheet(record: dict) -> dict:
    answers = [record[name] for name in ("Answer", "Answer 2") if record.get(name)]
    return {"question": record["Question"], "golden_answers": answers}


def _verl(record: dict) -> dict:
    split, index = _at(record, "extra_info", "split"), _at(record, "extra_info", "index")
    return {
        "id": f"{split}_{index}",
        "question": _at(record, "extra_info", "question"),
        "golden_answers": _listed(_at(record, "reward_model", "ground_truth")),
    }


def _id(record: dict) -> dict:
    return {"id": next(record[name] for name in _IDS if name in record)} if record.keys() & set(_IDS) else {}


def _listed(value: Any) -> list:
    """Returns a list as it is, one value as a list of it, nothing as an empty list."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _at(record: Any, *names: str) -> Any:
    """Returns what lies under a path of names, None if anything on it is missing."""
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record


FORMATS: dict[tuple[str, ...], Callable[[dict], dict]] = {
    ("golden_answers",): _flashrag,
    ("Question", "QuestionId"): _triviaqa,
    ("Question", "Answer"): _sheet,
    ("reward_model", "extra_info"): _verl,
    ("prompt", "target"): _prompt_target,
    ("question",): _plain,
}
"""Fields that tell a format → what makes a FlashRAG record of it. The first that fits is taken."""
