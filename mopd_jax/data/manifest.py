"""The fixed questions of an evaluation: a file that names each of them, so that results can be compared."""

import hashlib
import json
from collections.abc import Sequence

from etils import epath

from mopd_jax.data.questions import fingerprint, key_of
from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.jsonl import read_jsonl
from mopd_jax.team.episode import Question

FIELDS = ("dataset", "split", "id", "sha256")


def write_manifest(questions: Sequence[Question], path: epath.PathLike) -> str:
    """Writes a JSONL file: the number of questions and their fingerprint (dataset, split, id, text and
    answers, in order) in the first line, then dataset, split, id and sha256 of the text of each.

    Returns the fingerprint: the same that every result over these questions carries.
    """
    head = {"questions": len(questions), "fingerprint": fingerprint(questions)}
    entries = [dict(zip(FIELDS, (*key_of(q), _sha256(q)), strict=True)) for q in questions]
    lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in (head, *entries)]
    epath.Path(path).write_text("".join(lines))
    return head["fingerprint"]


def pick(questions: Sequence[Question], path: epath.PathLike) -> list[Question]:
    """Returns the questions that a manifest names, in its order.

    Raises:
      Refusal: it is no manifest, a question is missing or has another text, or their answers differ
        from those of the manifest.
    """
    (place, head), *entries = list(read_jsonl(path)) or [(str(path), {})]
    if set(head) != {"questions", "fingerprint"} or head["questions"] != len(entries):
        raise Refusal(
            f"{place}: found {json.dumps(head):.80} and {len(entries)} lines below it, expected a manifest "
            "of tools/prepare_data: the number of questions and their fingerprint, then a line for each."
        )
    by_key = {key_of(question): question for question in questions}
    chosen = [_find(entry, by_key, place) for place, entry in entries]
    if (found := fingerprint(chosen)) != head["fingerprint"]:
        raise Refusal(
            f"{path}: the questions it names have the fingerprint {found}, expected {head['fingerprint']}: "
            "their answers or their order have changed. Take the files that it was made from."
        )
    return chosen


def _find(entry: dict, by_key: dict[tuple[str, ...], Question], place: str) -> Question:
    if set(entry) != set(FIELDS):
        raise Refusal(f"{place}: found the fields {sorted(entry)}, expected {sorted(FIELDS)}.")
    key = entry["dataset"], entry["split"], entry["id"]
    if key not in by_key:
        raise Refusal(f"{place}: {key} is not among the {len(by_key)} questions of data.test: add it.")
    if _sha256(by_key[key]) != entry["sha256"]:
        raise Refusal(
            f"{place}: {key} is {by_key[key].text!r:.80} in data.test, the manifest was made from another "
            "text. Take the files that it was made from."
        )
    return by_key[key]


def _sha256(question: Question) -> str:
    return hashlib.sha256(question.text.encode()).hexdigest()
