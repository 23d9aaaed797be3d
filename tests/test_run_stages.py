"""The whole method on files of real text: which commands it takes, and a cut-down run of them."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from mopd_jax import flags
from mopd_jax.checks import ConfigError
from mopd_jax.config import Attention, Backend, Kind, Objective, Workflow
from mopd_jax.data.answers import normalise
from mopd_jax.data.questions import load_questions
from mopd_jax.data.recall import findable, holds
from mopd_jax.model import hf
from mopd_jax.run.checkpoint import write_json
from mopd_jax.run.results import Conditions, Record, Result
from tests.fixtures import read_metrics, write_qwen_tokenizer
from tests.test_train import ONE_DEVICE, ROOT
from tools import make_checkpoint, run_stages

FLAGS = [
    *("--model", "base", "--corpus", "corpus.jsonl", "--train", "nq.jsonl", "--train", "it's.jsonl"),
    *("--test", "test.jsonl", "--out", "out", "--steps", "7", "--questions", "2", "--seed", "5"),
    *("--warmup_steps", "9", "--warmup_batch", "6", "--warmup_lr", "0.5", "--attempts", "3"),
    *("--eval_questions", "11", "--", "--config.optim.b2=0.5", "--config.team.row_tokens=1000"),
]


@pytest.fixture
def commands(monkeypatch) -> list[list[str]]:
    monkeypatch.chdir(ROOT)
    return run_stages.commands(run_stages._parse(FLAGS))


def loaded(commands: list[list[str]], module: str, folder: str):
    """The config that the command for this folder describes; refused if it is not sound."""
    kind = Kind.EVALUATE if module == "mopd_jax.evaluate" else None
    (arguments,) = [
        command[1:]
        for command in commands
        if command[0] == module and f"--config.run.dir={folder}" in command
    ]
    return flags.load(arguments, kind)


def test_stages_come_in_their_order(commands):
    folders = [next((a[17:] for a in c if a.startswith("--config.run.dir=")), "") for c in commands]
    assert [(command[0], folder) for command, folder in zip(commands, folders, strict=True)] == [
        ("tools.make_demonstrations", ""),
        ("mopd_jax.evaluate", "out/before_warmup"),
        ("mopd_jax.train", "out/warmup"),
        ("mopd_jax.evaluate", "out/after_warmup"),
        ("mopd_jax.train", "out/stage1"),
        ("mopd_jax.evaluate", "out/stage1_c_mas"),
        ("mopd_jax.train", "out/stage2"),
        ("mopd_jax.evaluate", "out/stage2_h_mas"),
    ]
    assert commands[0][1:] == [
        *("--questions", "nq.jsonl", "--questions", "it's.jsonl"),
        *("--corpus", "corpus.jsonl", "--out", "out/demonstrations.jsonl"),
    ]


def test_the_warm_up_imitates_the_demonstrations(commands):
    config = loaded(commands, "mopd_jax.train", "out/warmup")
    assert config.train.kind is Kind.SUPERVISED
    assert (config.train.steps, config.train.questions, config.optim.lr) == (9, 6, 0.5)
    assert config.data.demonstrations == ("out/demonstrations.jsonl",)
    assert (config.model.init, config.model.teacher, config.model.reference) == ("base", "", "")


def test_stage_1_starts_from_the_warm_up_and_stays_near_it(commands):
    config = loaded(commands, "mopd_jax.train", "out/stage1")
    assert (config.model.init, config.model.teacher, config.model.reference) == (
        "out/warmup",
        "",
        "out/warmup",
    )
    assert config.team.workflow is Workflow.CASCADE and config.learn.searcher is Objective.GRPO
    assert (config.train.steps, config.train.questions) == (7, 2)


def test_stage_2_starts_from_the_warm_up_and_learns_from_stage_1(commands):
    config = loaded(commands, "mopd_jax.train", "out/stage2")
    assert (config.model.init, config.model.teacher, config.model.reference) == (
        "out/warmup",
        "out/stage1",
        "out/stage1",
    )
    assert config.team.workflow is Workflow.HIERARCHY and config.learn.searcher is Objective.OPD


@pytest.mark.parametrize(
    ("folder", "model", "workflow"),
    [
        ("out/before_warmup", "base", Workflow.CASCADE),
        ("out/after_warmup", "out/warmup", Workflow.CASCADE),
        ("out/stage1_c_mas", "out/stage1", Workflow.CASCADE),
        ("out/stage2_h_mas", "out/stage2", Workflow.HIERARCHY),
    ],
)
def test_each_evaluation_takes_its_model_and_workflow(commands, folder, model, workflow):
    config = loaded(commands, "mopd_jax.evaluate", folder)
    assert (config.model.init, config.team.workflow) == (model, workflow)
    assert (config.eval.questions, config.eval.attempts) == (11, 3)
    assert config.data.test == ("test.jsonl",)


def test_files_seed_and_overrides_reach_every_phase(commands):
    for module, folder in [(c[0], c[2].partition("=")[2]) for c in commands[1:]]:
        config = loaded(commands, module, folder)
        assert config.data.train == ("nq.jsonl", "it's.jsonl")
        assert (config.retrieval.backend, config.retrieval.corpus) == (Backend.BM25, "corpus.jsonl")
        assert (config.run.seed, config.optim.b2, config.team.row_tokens) == (5, 0.5, 1000)
        assert config.mesh.shape == (1, 1, 1) and config.eval.every == 0
        assert config.model.attention is Attention.XLA


def test_a_bucket_keeps_both_its_slashes():
    commands = run_stages.commands(run_stages._parse([*FLAGS[:10], "--out", "gs://bucket/run"]))
    named = [argument for command in commands for argument in command if "gs:/" in argument]
    assert len(named) == 17 and all("gs://bucket/run/" in argument for argument in named)


def test_what_any_phase_misses_is_refused_before_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as refusal:
        run_stages.main([*FLAGS[:10], "--out", str(tmp_path / "out")])
    _, *missing = str(refusal.value).splitlines()
    assert [line.partition(" = ")[0] for line in missing] == [
        "- config.data.test",
        "- config.retrieval.corpus",
        "- config.model.init",
        "- config.data.train",
        "- config.data.train",
    ]
    assert missing[3].endswith("found no file nq.jsonl.") and missing[4].endswith("found no file it's.jsonl.")
    with pytest.raises(ConfigError, match=r"config\.optim has no field 'lrr'"):
        run_stages.main([*FLAGS[:10], "--out", str(tmp_path / "out"), "--", "--config.optim.lrr=1"])
    assert not (tmp_path / "out").exists()


def test_demonstrations_are_made_again_only_when_their_inputs_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = run_stages._parse(FLAGS)
    for path in (args.corpus, *args.train):
        (tmp_path / path).write_text(path)
    made = tmp_path / "out" / "demonstrations.jsonl"
    write_json(made.with_suffix(".json"), run_stages._inputs(args))
    assert not run_stages.up_to_date(args)
    made.write_text("{}")
    assert run_stages.up_to_date(args)
    (tmp_path / args.corpus).write_text("another")
    assert not run_stages.up_to_date(args)


def test_a_command_that_fails_ends_the_whole_with_its_exit_code(capfd):
    with pytest.raises(SystemExit) as ended:
        run_stages.run(["json.tool", "absent.json"])
    assert ended.value.code == subprocess.run([sys.executable, "-m", "json.tool", "absent.json"]).returncode
    assert "absent.json" in capfd.readouterr().err


def make_result(*attempts: tuple[int, dict]) -> Result:
    """A result of attempts given as (model calls, role → status → rows)."""
    zeros = {"em": 0.0, "f1": 0.0, "containment": 0.0, "recall": None, "searches": 0}
    records = [
        Record(
            "nq",
            "test",
            str(n),
            0,
            "",
            **zeros,
            calls=calls,
            input_tokens=0,
            output_tokens=0,
            aborted=False,
            rows=rows,
        )
        for n, (calls, rows) in enumerate(attempts)
    ]
    return Result("ours", 0, Conditions("", "", {}), tuple(records))


def test_a_turn_is_valid_unless_it_ended_its_row_without_an_action():
    searched = (4, {"searcher": {"finished": 1}, "answerer": {"malformed": 1}})
    broken = (2, {"searcher": {"truncated: length": 1}, "answerer": {"malformed": 1}})
    full = (2, {"searcher": {"truncated: context": 1}, "answerer": {"finished": 1}})
    assert run_stages.valid_turns(make_result(searched, broken)) == pytest.approx(3 / 6)
    assert run_stages.valid_turns(make_result(full)) == 1.0, "a turn that nobody sampled was not ill-formed"
    assert run_stages.valid_turns(make_result((0, {}))) == 0.0


# ---------------------------------------------------------------- all of it, cut down

TINY = (
    "--config.team.row_tokens=768",
    "--config.learn.row_buckets=(768,)",
    "--config.learn.micro_batch_tokens=1536",
    "--config.learn.logit_chunk=64",
    "--config.team.document_tokens=160",
    "--config.team.session_searches=1",
    "--config.team.leader_turns=2",
    "--config.team.leader_tokens=8",
    "--config.team.searcher_tokens=8",
    "--config.team.answerer_tokens=4",
    "--config.team.candidates=2",
    "--config.train.workflows=2",
    "--config.rollout.conversations=2",
    "--config.rollout.requests=1",
    "--config.rollout.prefill_rows=2",
)


def write_slice(data: pathlib.Path, folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes 20 real questions and 300 real passages, those that hold their answers first."""
    source = data / "questions" / "train" / "nq_trainlike_with_passages.jsonl"
    questions, corpus = folder / "nq.jsonl", folder / "corpus.jsonl"
    questions.write_text("".join(source.read_text().splitlines(keepends=True)[:20]))
    wanted = [words for q in load_questions(str(questions)) for words in findable(q.answers).values()]
    tags = dict(line.split("\t") for line in (data / "corpus_sources.tsv").read_text().splitlines())
    with (data / "corpus.jsonl").open() as lines:
        passages = [line for line in lines if tags[json.loads(line)["id"]] == "nq:wiki18"]

    def tells_nothing(line: str) -> bool:
        text = normalise(json.loads(line)["contents"])
        return not any(holds(text, words) for words in wanted)

    corpus.write_text("".join(sorted(passages, key=tells_nothing)[:300]))
    return questions, corpus


def run(arguments: list[str], cache: pathlib.Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tools.run_stages", *arguments],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": ONE_DEVICE, "JAX_COMPILATION_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def files_of(folder: pathlib.Path) -> dict[str, int]:
    """Every file with the time of its last change; reports aside, which every call writes anew."""
    return {
        str(path): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() and path.name != "report.md"
    }


@pytest.mark.slow
def test_real_text_goes_through_all_stages_and_a_second_call_changes_nothing(shared_data, tmp_path):
    write_qwen_tokenizer(tmp_path / "probe")  # skips where the vocabulary is missing
    model, out = tmp_path / "model", tmp_path / "out"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "head_dim": 16}
    make_checkpoint.main(["--out", str(model), *(f"--{name}={size}" for name, size in sizes.items())])
    questions, corpus = write_slice(shared_data, tmp_path)
    arguments = [
        *(
            "--model",
            str(model),
            "--corpus",
            str(corpus),
            "--train",
            str(questions),
            "--test",
            str(questions),
        ),
        *("--out", str(out), "--warmup_steps", "2", "--warmup_batch", "2", "--steps", "1"),
        *("--questions", "1", "--eval_questions", "2", "--attempts", "1", "--", *TINY),
    ]
    output = run(arguments, tmp_path / "cache")
    for system in run_stages.SYSTEMS:
        assert f"\n| {system} " in output
        assert f"\n{system}: " in output and " % of the turns were valid" in output
    settings = {name: json.loads((out / name / "settings.json").read_text()) for name in ("stage1", "stage2")}
    assert settings["stage1"]["model"]["reference"] == str(out / "warmup")
    assert settings["stage2"]["model"]["teacher"] == str(out / "stage1")
    finished = json.loads((out / "stage2" / "finished.json").read_text())
    assert finished["config"] == settings["stage2"]
    exported = {name: hf.fingerprint(out / name / "export") for name in ("warmup", "stage1")}
    assert (
        finished["inputs"].items()
        >= {
            "weights of model.init": exported["warmup"],
            "weights of model.teacher": exported["stage1"],
            "weights of model.reference": exported["stage1"],
        }.items()
    )
    assert exported["warmup"] != hf.fingerprint(model), "the warm-up has moved the weights"
    assert [line["step"] for line in read_metrics(out / "warmup")] == [1, 2]
    (line,) = read_metrics(out / "stage2")
    assert line["step"] == 1 and line["tokens/leader"] > 0 and "kl/leader" in line

    before = files_of(out)
    again = run(arguments, tmp_path / "cache")
    assert again.count("is finished already") == 3 and again.count("is evaluated already") == 4
    assert files_of(out) == before
    assert again[again.rindex("| system") :] == output[output.rindex("| system") :]
