"""From question files to a data set, a manifest and a report."""

import json
from collections import Counter

import pytest

from configs import stage1
from mopd_jax.config import Kind
from mopd_jax.data.manifest import pick
from mopd_jax.data.questions import Joined, load_questions, open_sets
from mopd_jax.refusal import Refusal
from mopd_jax.run import parts
from mopd_jax.run.preflight import missing_inputs
from tools import prepare_data


def write(path, *records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def files(tmp_path):
    train = write(
        tmp_path / "train.jsonl",
        {"id": "train_0", "question": "who sang It?", "golden_answers": ["Ada"]},
        {"id": "train_1", "question": "Who sang it", "golden_answers": ["x", "*", "The"]},
        {"id": "train_2", "question": "where", "golden_answers": []},
    )
    test = write(tmp_path / "test.jsonl", *({"question": f"q{i}", "answer": "a"} for i in range(4)))
    dev = write(
        tmp_path / "dev.json",
        {"_id": "x", "question": "The: who sang it", "answer": "b", "type": ""},
        {"_id": "y", "question": "when?", "answer": "c", "type": ""},
    )
    return ["--set", f"nq:train={train}", "--set", f"nq:test={test}", "--set", f"hotpotqa:dev={dev}"]


def test_files_become_a_set_a_manifest_and_a_report(tmp_path, files, capsys):
    out = tmp_path / "data"
    prepare_data.main([*files, "--out", str(out), "--fixed", "3"])
    report = json.loads((out / "report.json").read_text())
    train = report["sets"]["nq:train"]
    assert [train[name] for name in ("records", "questions", "published")] == [3, 2, 79168]
    (reason,) = train["refused"]
    assert "train.jsonl, line 3: found no gold answer" in reason
    assert (train["repeated"], train["empty_golds"]) == ([["train_0", "train_1"]], {"train_1": ["*", "The"]})
    assert report["leaks"] == [
        {
            "question": "who sang it",
            "train": ["nq:train train_0", "nq:train train_1"],
            "evaluation": ["hotpotqa:dev x"],
        }
    ]
    sources = [f"{out}/questions/{name}" for name in ("nq:test", "hotpotqa:dev")]
    chosen = pick(Joined(open_sets(sources)), out / "manifest.jsonl")
    assert [q.dataset for q in chosen] == ["nq", "nq", "hotpotqa"]
    assert report["manifest"]["questions"] == 3
    assert [q.text for q in load_questions(f"{out}/questions/nq:train")] == ["who sang It?", "Who sang it"]
    shown = capsys.readouterr().out
    assert reason in shown and report["manifest"]["fingerprint"] in shown and sources[1] in shown


def test_the_full_scale_configs_name_what_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = stage1.get_config()
    sources = config.data.train + config.data.validation + config.data.test
    arguments = ["--out", "data", "--fixed", "11"]
    for name in (source.removeprefix("data/questions/") for source in sources):
        records = [{"id": f"{name}_{i}", "question": f"{name} {i}", "golden_answers": ["a"]} for i in (0, 1)]
        arguments += ["--set", f"{name}={write(tmp_path / f'{name}.jsonl', *records)}"]
    prepare_data.main(arguments)
    assert [len(parts.load_questions([source], "", config)) for source in sources] == [2] * 10
    missing = [*missing_inputs(config, Kind.REINFORCE, ()), *missing_inputs(config, Kind.EVALUATE, ())]
    assert {field for field, _ in missing} == {"model.init", "model.reference"}
    asked = Counter(f"data/questions/{q.dataset}:{q.split}" for q in parts.load_test(config))
    assert asked == dict(zip(config.data.test, (2, 2, 2, 2, 1, 1, 1), strict=True))


def test_without_an_evaluation_set_there_is_no_manifest(tmp_path, files):
    prepare_data.main([*files[:2], "--out", str(tmp_path / "data")])
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["questions", "report.json"]


def test_nothing_is_written_over_and_nothing_made_of_nothing(tmp_path, files):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(Refusal, match="full is no empty folder"):
        prepare_data.main([*files, "--out", str(tmp_path / "full")])
    empty = write(tmp_path / "e.jsonl", {"question": "q"})
    for path, words in (
        (empty, "musique:dev has no question, 1 were refused:\n- .*e.jsonl, line 1: found no gold answer"),
        (tmp_path / "none.jsonl", "Found no file .*none.jsonl"),
        (write(tmp_path / "nothing.jsonl"), "musique:dev has no question, 0 were refused"),
    ):
        with pytest.raises(Refusal, match=words):
            prepare_data.main(["--set", f"musique:dev={path}", "--out", str(tmp_path / "data")])
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("text", ["nq=a.jsonl", "nq:validation=a.jsonl", "N Q:test=a.jsonl", "nq:test="])
def test_a_set_must_be_spelled_in_full(text, capsys):
    with pytest.raises(SystemExit):
        prepare_data.main(["--set", text, "--out", "x"])
    assert "expected NAME:SPLIT=FILE" in capsys.readouterr().err


def test_a_manifest_has_no_negative_number_of_questions(tmp_path, files, capsys):
    with pytest.raises(SystemExit):
        prepare_data.main([*files, "--out", str(tmp_path / "data"), "--fixed", "-3"])
    assert "--fixed -3: expected a number of questions, or 0 for all." in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_the_real_evaluation_sets_have_their_known_quirks(shared_data, tmp_path):
    """All seven, against the training questions: nothing leaks, and each set keeps every record."""
    folder = shared_data / "questions"
    splits = {"nq": "test", "triviaqa": "test", "popqa": "test", "bamboogle": "test"}
    names = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    files = {(name, splits.get(name, "dev")): [str(folder / f"{name}.jsonl")] for name in names}
    files["nq", "train"] = [str(folder / "train" / "nq_train.jsonl")]
    files["hotpotqa", "train"] = [str(folder / "train" / "hotpotqa_trainlike.jsonl")]
    report = prepare_data.make_report(prepare_data.read_all(files), files)
    counts = [500, 500, 498, 500, 500, 458, 100, 3000, 3000]
    assert [found["questions"] for found in report["sets"].values()] == counts
    assert not any(found["refused"] for found in report["sets"].values())
    assert report["leaks"] == []
