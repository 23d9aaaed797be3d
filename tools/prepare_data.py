"""Question files → one checked data set, the fixed questions of the evaluation, and a report.

    python -m tools.prepare_data --out data --set nq:train=nq/train.jsonl --set nq:test=nq/test.jsonl \\
        --set hotpotqa:train=hotpot_train_v1.1.json --set bamboogle:test="Bamboogle Prerelease - Sheet1.csv"

Each --set names a dataset, its split (train, dev or test) and a file, in any of the formats of
mopd_jax/data/formats.py; several files of one set are joined. OUT/questions/NAME gets the set as
array_record files, which a config names as OUT/questions/NAME:SPLIT. OUT/manifest.jsonl fixes --fixed
questions of the evaluation, spread evenly over the datasets: of each the test split, or dev where it has no
test; a dev split beside a test split is left to the validation during training. OUT/report.json says of
each set how many records were read, which were refused and why, which questions come twice, which gold
answers normalise to nothing, and which questions of an evaluation are trained on too (questions are compared
normalised).
"""

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from absl import logging
from etils import epath

from mopd_jax.data.answers import normalise
from mopd_jax.data.formats import Reading, read_set
from mopd_jax.data.manifest import write_manifest
from mopd_jax.data.prepared import write_set
from mopd_jax.data.questions import fingerprint, select
from mopd_jax.refusal import Refusal, in_words
from mopd_jax.team.episode import Question

PUBLISHED = {
    ("nq", "train"): 79168,
    ("hotpotqa", "train"): 90447,
    ("nq", "dev"): 8757,
    ("nq", "test"): 3610,
    ("triviaqa", "test"): 11313,
    ("popqa", "test"): 14267,
    ("hotpotqa", "dev"): 7405,
    ("2wikimultihopqa", "dev"): 12576,
    ("musique", "dev"): 2417,
    ("bamboogle", "test"): 125,
}
"""Questions of the full-scale configs' sets, as FlashRAG publishes them; the report sets them beside ours."""

SHOWN = 5
"""Examples of each finding that are printed; the report file has all."""

Sets = Mapping[tuple[str, str], Reading]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` defaults to the process' own arguments."""
    args = _parse(argv)
    out = epath.Path(args.out)
    logging.set_verbosity(logging.ERROR)  # tensorflow-datasets warns of every name that is not its own
    if out.is_file() or (out.exists() and any(out.iterdir())):
        raise Refusal(f"--out {out} is no empty folder: name another one, or remove it.")
    sets = read_all(args.set)
    report = make_report(sets, args.set)
    out.mkdir(parents=True, exist_ok=True)
    for dataset in dict.fromkeys(dataset for dataset, _ in sets):
        splits = {split: reading.questions for (name, split), reading in sets.items() if name == dataset}
        write_set(dataset, splits, out)
    if exam := examined(sets):
        chosen = select(exam, args.fixed)
        written = write_manifest(chosen, out / "manifest.jsonl")
        report["manifest"] = {"questions": len(chosen), "fingerprint": written}
    (out / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(describe(report, out))


def read_all(files: Mapping[tuple[str, str], Sequence[str]]) -> dict[tuple[str, str], Reading]:
    """Returns what each set's files came to.

    Raises:
      Refusal: a file is not there or not what its name says, or a set has no question; says which.
    """
    sets = {name: read_set(paths, *name) for name, paths in files.items()}
    for name, reading in sets.items():
        if not reading.questions:
            reasons = "".join(f"\n- {reason}" for reason in reading.refused[:SHOWN])
            refused = f"{len(reading.refused)} were refused:{reasons}"
            raise Refusal(f"{':'.join(name)} has no question, {refused}")
    return sets


def examined(sets: Sets) -> list[Question]:
    """Returns the questions that the manifest draws from: of each dataset those of its test split, or of dev
    where it has no test [D]."""
    tested = {dataset for dataset, split in sets if split == "test"}
    return [
        question
        for (dataset, split), reading in sets.items()
        if split == "test" or (split == "dev" and dataset not in tested)
        for question in reading.questions
    ]


# ---------------------------------------------------------------- the report


def make_report(sets: Sets, files: Mapping[tuple[str, str], Sequence[str]]) -> dict:
    """Returns what `report.json` holds: "sets" by DATASET:SPLIT, and "leaks"."""
    return {"sets": {":".join(name): _set_report(sets[name], files[name], name) for name in sets}} | {
        "leaks": find_leaks(sets)
    }


def _set_report(reading: Reading, files: Sequence[str], name: tuple[str, str]) -> dict:
    questions = reading.questions
    return {
        "files": list(files),
        "records": len(questions) + len(reading.refused),
        "questions": len(questions),
        "published": PUBLISHED.get(name),
        "fingerprint": fingerprint(questions),
        "refused": reading.refused,
        "repeated": find_repeated(questions),
        "empty_golds": {q.id: empty for q in questions if (empty := _empty(q.answers))},
    }


def _empty(golds: Iterable[str]) -> list[str]:
    """Gold answers that only an equal raw text matches, see `exact_match`."""
    return [gold for gold in golds if not normalise(gold)]


def find_repeated(questions: Iterable[Question]) -> list[list[str]]:
    """Returns the ids of questions that are the same when normalised, a list for each such question."""
    return [[q.id for q in same] for same in _by_text(questions).values() if len(same) > 1]


def find_leaks(sets: Sets) -> list[dict]:
    """Returns each normalised question of both a training and an evaluation split, with its places."""
    train, exam = (
        _by_text(q for (_, split), r in sets.items() if (split == "train") is trained for q in r.questions)
        for trained in (True, False)
    )
    return [
        {"question": text, "train": _places(train[text]), "evaluation": _places(exam[text])}
        for text in train
        if text in exam
    ]


def _by_text(questions: Iterable[Question]) -> dict[str, list[Question]]:
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(normalise(question.text) or question.text, []).append(question)
    return groups


def _places(questions: Iterable[Question]) -> list[str]:
    return [f"{q.dataset}:{q.split} {q.id}" for q in questions]


def describe(report: Mapping, out: epath.Path) -> str:
    """Returns the report in words: a line for each set, some of what was found, what to put into a config."""
    columns = ("records", "questions", "published", "refused", "repeated", "empty_golds")
    lines = [f"{'set':24}" + "".join(f"{column:>12}" for column in columns)]
    for name, found in report["sets"].items():
        counts = (len(n) if isinstance(n := found[column], list | dict) else n for column in columns)
        lines.append(f"{name:24}" + "".join(f"{'-' if n is None else n:>12}" for n in counts))
        lines += [f"    refused: {reason}" for reason in found["refused"][:SHOWN]]
    lines.append(f"{len(report['leaks']):,d} questions are in a training and in an evaluation split")
    lines += [f"    {' and '.join(leak['train'] + leak['evaluation'])}" for leak in report["leaks"][:SHOWN]]
    if manifest := report.get("manifest"):
        lines.append(
            f"{out / 'manifest.jsonl'}: {manifest['questions']:,d} questions, {manifest['fingerprint']}"
        )
    lines.append("In a config: " + " ".join(f'"{out}/questions/{name}"' for name in report["sets"]))
    return "\n".join(lines)


# ---------------------------------------------------------------- the command line


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--set", action="append", required=True, type=_set, help="NAME:SPLIT=FILE; may be given several times"
    )
    add("--out", required=True, help="folder to write, must be empty or new")
    add("--fixed", type=int, default=5000, help="questions of the manifest; 0: all that it may draw from")
    args = parser.parse_args(argv)
    if args.fixed < 0:
        parser.error(f"--fixed {args.fixed}: expected a number of questions, or 0 for all.")
    files: dict[tuple[str, str], list[str]] = {}
    for name, path in args.set:
        files.setdefault(name, []).append(path)
    args.set = files
    return args


def _set(text: str) -> tuple[tuple[str, str], str]:
    found = re.fullmatch(r"([a-z0-9_]+):(train|dev|test)=(.+)", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected NAME:SPLIT=FILE, a name of small letters, digits and _, "
            "the split train, dev or test, e.g. nq:train=nq/train.jsonl"
        )
    return (found[1], found[2]), found[3]


if __name__ == "__main__":
    with in_words():
        main()
