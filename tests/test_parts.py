"""From a config to models and a team: which folders are opened, which are refused, what is fingerprinted."""

import copy
import dataclasses
import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mopd_jax.config import (
    ArchitectureConfig,
    Attention,
    Backend,
    Config,
    DataConfig,
    Kind,
    Precision,
    Remat,
    RetrievalConfig,
    Wording,
    Workflow,
)
from mopd_jax.data import miniature
from mopd_jax.data.manifest import write_manifest
from mopd_jax.model import hf, sharding
from mopd_jax.model.qwen3 import Qwen3
from mopd_jax.model.tokens import files_fingerprint
from mopd_jax.refusal import Refusal
from mopd_jax.run import parts
from mopd_jax.run.checkpoint import ResumeError, check_resume, resume_meta, write_json
from mopd_jax.team.episode import Message
from mopd_jax.team.roles import Prompts
from tests import tiny
from tests.fixtures import write_tokenizer

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}


def make_config(folder: pathlib.Path) -> Config:
    """A phase on the embedded world, whose own weights would be random."""
    config = tiny.team()
    config.run.dir = str(folder / "phase")
    config.model.init, config.model.teacher, config.model.reference = "random", "", ""
    config.model.architecture = ArchitectureConfig(**SIZES, head_dim=4)
    return config


def one_device() -> jax.sharding.Mesh:
    return sharding.make_mesh((1, 1, 1), jax.devices()[:1])


def assert_same(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> tuple[pathlib.Path, dict]:
    """A finished run, to be copied and not changed, and what it learnt."""
    folder = tmp_path_factory.mktemp("run")
    config = make_config(folder)
    student = parts.open_model("random", config)
    params = parts.load_params(student, one_device(), Precision.FLOAT32, seed=3)
    parts.export(folder / "finished" / "export", student, params, config.team)
    write_json(folder / "finished" / "finished.json", {})
    return folder / "finished", params


@pytest.fixture
def run(weights, tmp_path) -> pathlib.Path:
    return shutil.copytree(weights[0], tmp_path / "finished")


@pytest.fixture
def config(tmp_path) -> Config:
    return make_config(tmp_path)


@pytest.fixture
def student(config) -> parts.Opened:
    return parts.open_model("random", config)


# ---------------------------------------------------------------- which folder a name stands for


def test_a_finished_run_stands_for_its_export(run, config):
    by_run, by_folder = (parts.open_model(str(path), config) for path in (run, run / "export"))
    assert by_run.folder == by_folder.folder == run / "export"
    assert (by_run.spec, by_folder.spec) == (str(run), str(run / "export"))
    assert by_run.model == by_folder.model
    assert by_run.model.config.hidden_size == 16 and by_run.model.config.num_layers == 1


def test_an_unfinished_run_is_refused_but_its_export_may_be_named(run, config):
    (run / "finished.json").unlink()
    with pytest.raises(Refusal, match=f"'{run}' is not finished.*name {run}/export"):
        parts.open_model(str(run), config)
    assert parts.open_model(str(run / "export"), config).folder == run / "export"


def test_a_folder_without_weights_is_refused(tmp_path, config):
    for spec in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(Refusal, match=f"'{spec}' is neither a Hugging Face folder .*config.json"):
            parts.open_model(str(spec), config)


def test_random_weights_have_the_worlds_words_and_the_configs_sizes(config):
    opened = parts.open_model("random", config)
    assert opened.folder == pathlib.Path(config.run.dir) / "tokenizer"
    found = opened.model.config
    assert opened.tokens.vocab_size == found.vocab_size == len(miniature.vocabulary()) + 4
    assert {name: getattr(found, name) for name in SIZES} == SIZES
    assert found.max_position_embeddings == config.team.row_tokens
    assert parts.open_model("random", config).tokens.fingerprint == opened.tokens.fingerprint


def test_how_a_model_computes_comes_from_the_config(run, config):
    config.model.compute, config.model.remat = Precision.BFLOAT16, Remat.FULL
    config.model.attention = Attention.SPLASH
    for spec in ("random", str(run)):
        found = parts.open_model(spec, config).model.config
        assert (
            found.dtype == jnp.bfloat16 and found.remat is Remat.FULL and found.attention is Attention.SPLASH
        )


def test_weights_come_back_as_they_were_exported(run, weights, config):
    opened = parts.open_model(str(run), config)
    assert_same(parts.load_params(opened, one_device(), Precision.FLOAT32, seed=9), weights[1])
    half = parts.load_params(opened, one_device(), Precision.BFLOAT16, seed=9)
    assert_same(half, jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights[1]))


def test_random_weights_are_a_function_of_the_seed(student, weights):
    again, other = (parts.load_params(student, one_device(), Precision.FLOAT32, seed) for seed in (3, 4))
    assert_same(again, weights[1])
    assert (again["embed"]["embedding"] != other["embed"]["embedding"]).any()


# ---------------------------------------------------------------- the Searcher's language


def test_a_run_notes_its_language_and_knows_it_again(run, config):
    noted = json.loads((run / "export" / "team.json").read_text())
    assert noted["searcher"] == "You search." and noted["documents"] == Prompts().documents
    parts.check_language(run / "export", config.team)


def test_a_teacher_with_another_searcher_prompt_is_refused(run, config):
    config.team.wording = Wording.FULL
    with pytest.raises(ValueError, match=r"another wording of 'searcher': 'You search\.', here it is 'You"):
        parts.check_language(run / "export", config.team)


@pytest.mark.parametrize("name", ["task", "ask_summary", "documents", "document"])
def test_a_teacher_with_another_tool_format_is_refused(run, config, name):
    path = run / "export" / "team.json"
    write_json(path, json.loads(path.read_text()) | {name: "{other}"})
    with pytest.raises(ValueError, match=f"another wording of '{name}': '{{other}}', here it is"):
        parts.check_language(run / "export", config.team)


def test_a_folder_that_no_run_wrote_says_nothing_about_its_language(run, config):
    (run / "export" / "team.json").unlink()
    config.team.wording = Wording.FULL
    parts.check_language(run / "export", config.team)


# ---------------------------------------------------------------- teacher and reference


def test_a_model_that_is_teacher_and_reference_is_loaded_once(run, weights, config, student, monkeypatch):
    loads = []
    load = hf.load_params
    monkeypatch.setattr(hf, "load_params", lambda folder, *rest: loads.append(folder) or load(folder, *rest))
    config.model.teacher = config.model.reference = str(run)
    frozen = parts.load_frozen(config, student, one_device())
    assert list(frozen) == [str(run)] and loads == [run / "export"]
    assert_same(frozen[str(run)].params, weights[1])


def test_teacher_and_reference_may_differ_and_are_held_in_their_precision(run, config, student):
    config.model.teacher, config.model.reference = str(run), str(run / "export")
    config.model.frozen = Precision.BFLOAT16
    frozen = parts.load_frozen(config, student, one_device())
    assert set(frozen) == {str(run), str(run / "export")}
    assert {x.dtype for model in frozen.values() for x in jax.tree.leaves(model.params)} == {
        jnp.dtype("bfloat16")
    }


def test_without_teacher_and_reference_nothing_is_loaded(config, student):
    assert parts.load_frozen(config, student, one_device()) == {}


@pytest.mark.parametrize("role", ["teacher", "reference"])
def test_a_frozen_model_with_another_vocabulary_is_refused(run, config, student, tmp_path, role):
    other = tmp_path / "other"
    write_tokenizer(other)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(run / "export" / name, other)
    setattr(config.model, role, str(other))
    with pytest.raises(ValueError, match=r"Student and teacher differ in tokenizer: student '.*vocab_size"):
        parts.load_frozen(config, student, one_device())


def test_a_teacher_that_stops_at_other_tokens_is_refused(run, config, student):
    """Kind 20."""
    path = run / "export" / "generation_config.json"
    stops = json.loads(path.read_text())
    eos, pad = stops["eos_token_id"], stops["pad_token_id"]
    write_json(path, stops | {"eos_token_id": [eos, pad]})
    config.model.teacher = str(run)
    both = " ".join(map(str, sorted([eos, pad])))
    with pytest.raises(ValueError, match=f"differ in eos_ids: student '{eos}', teacher '{both}'; expected"):
        parts.load_frozen(config, student, one_device())


def test_a_searcher_that_stops_at_other_tokens_is_refused(run, config, student):
    path = run / "export" / "generation_config.json"
    stops = json.loads(path.read_text())
    eos, pad = stops["eos_token_id"], stops["pad_token_id"]
    write_json(path, stops | {"eos_token_id": [eos, pad]})
    both = " ".join(map(str, sorted([eos, pad])))
    words = f"Student and Searcher differ in eos_ids: student '{eos}', Searcher '{both}'; .* Use a Searcher"
    with pytest.raises(Refusal, match=words):
        parts.open_beside(student, str(run), config, "Searcher")


def test_a_teacher_with_another_language_is_refused(run, config, student):
    """Kind 20."""
    config.model.teacher = str(run)
    config.team.wording = Wording.FULL
    with pytest.raises(ValueError, match="another wording of 'searcher'"):
        parts.load_frozen(config, student, one_device())


# ---------------------------------------------------------------- the team

SAID = {
    "leader": lambda prompts: prompts.to_asked(""),
    "searcher": lambda prompts: prompts.to_searcher(""),
    "answerer": lambda prompts: prompts.to_answerer("", ()),
    "agent": lambda prompts: prompts.to_asked(""),
}


def test_rows_longer_than_the_models_positions_are_refused(config, student):
    config.team.row_tokens += 1
    with pytest.raises(ValueError, match=r"row_tokens = 209, the model takes 208 \(max_position_embeddings"):
        parts.make_team(config, student, 1)


def test_rows_longer_than_a_searchers_own_positions_are_refused(config, student):
    sizes = dataclasses.replace(student.model.config, max_position_embeddings=207)
    searcher = dataclasses.replace(student, model=Qwen3(sizes))
    with pytest.raises(Refusal, match=r"row_tokens = 208, the model takes 207 \(max_position_embeddings"):
        parts.make_team(config, student, 1, searcher)


@pytest.mark.parametrize(
    ("workflow", "role"),
    [
        (Workflow.HIERARCHY, "leader"),
        (Workflow.CASCADE, "searcher"),
        (Workflow.CASCADE, "answerer"),
        (Workflow.SINGLE, "agent"),
    ],
)
def test_rows_in_which_a_role_could_never_speak_are_refused(config, student, workflow, role):
    prompts = parts.make_prompts(config.team)
    opening = Message("system", getattr(prompts, role)), Message("user", SAID[role](prompts))
    prompt = len(parts.make_renderer(config, student.tokens).open(opening))
    config.team.workflow = workflow
    limit = "searcher_tokens" if role == "agent" else f"{role}_tokens"
    setattr(config.team, limit, config.team.row_tokens - prompt)
    parts.make_team(config, student, 1)
    setattr(config.team, limit, config.team.row_tokens - prompt + 1)
    words = rf"row_tokens = 208: the {role}'s first prompt alone takes {prompt} and team\.{limit} = "
    with pytest.raises(Refusal, match=words):
        parts.make_team(config, student, 1)


def test_a_retriever_that_finds_nothing(config):
    config.retrieval.backend = Backend.NONE
    retriever = parts.make_retriever(config)
    assert retriever.search(["Ada's novel", "x"], 3) == [(), ()] and retriever.identity == "none"


# ---------------------------------------------------------------- what a phase was computed from

FILES = (
    "train.jsonl",
    "validation.jsonl",
    "test.jsonl",
    "demonstrations.jsonl",
    "corpus.jsonl",
    "manifest.jsonl",
    "index.json",
)
TRAINED = ("init", "teacher", "reference", "judge")
MODELS = (*TRAINED, "searcher")
SEARCHED = ("corpus", "index.json")


@pytest.fixture
def phase(tmp_path) -> Config:
    """Every input is a file or a model of its own; fingerprints do not read what is in them."""
    for name in FILES:
        (tmp_path / name).write_text(f"{name}\n")
    for name in MODELS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())
    config = Config()
    for name in ("train", "validation", "test", "demonstrations"):
        setattr(config.data, name, (str(tmp_path / f"{name}.jsonl"),))
    config.data.manifest = str(tmp_path / "manifest.jsonl")
    for name in MODELS:
        setattr(config.model, name, str(tmp_path / name))
    config.retrieval = RetrievalConfig(Backend.BM25, str(tmp_path / "corpus.jsonl"), index=str(tmp_path))
    return config


def read_by(phase: Config, kind: Kind, every: int, folder: pathlib.Path) -> set[str]:
    """Changes one input after the other; returns those that a phase of this kind takes notice of."""
    phase.train.kind, phase.eval.every = kind, every
    fingerprints = parts.evaluated_on if kind is Kind.EVALUATE else parts.trained_on
    noticed = set()
    for name in (*FILES, *(f"{model}/model.safetensors" for model in MODELS)):
        before = fingerprints(phase)
        (folder / name).write_bytes((folder / name).read_bytes() + b"x")
        after = fingerprints(phase)
        assert before.keys() == after.keys()
        differing = [key for key in before if before[key] != after[key]]
        model = name.partition("/")[0]
        assert differing in ([], [str(folder / name)], [f"weights of model.{model}"])
        noticed |= {name.removesuffix(".jsonl").removesuffix("/model.safetensors")} if differing else set()
    return noticed


@pytest.mark.parametrize(
    ("kind", "every", "inputs"),
    [
        (Kind.REINFORCE, 0, {"train", *SEARCHED, *TRAINED}),
        (Kind.REINFORCE, 5, {"train", *SEARCHED, "validation", *TRAINED}),
        (Kind.SUPERVISED, 0, {"demonstrations", *TRAINED}),
        (Kind.SUPERVISED, 5, {"demonstrations", *SEARCHED, "validation", *TRAINED}),
        (Kind.EVALUATE, 0, {"test", "manifest", *SEARCHED, "init", "searcher"}),
    ],
)
def test_exactly_what_a_phase_reads_is_fingerprinted(phase, tmp_path, kind, every, inputs):
    assert read_by(phase, kind, every, tmp_path) == inputs


def question_file(path: pathlib.Path, *ids: str) -> str:
    records = [{"id": id_, "question": f"{path.stem} {id_}?", "golden_answers": ["a"]} for id_ in ids]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_a_manifest_decides_which_test_questions_are_asked(tmp_path):
    data = DataConfig(test=tuple(question_file(tmp_path / f"{name}.jsonl", "1", "2") for name in ("a", "b")))
    config = Config(data=data)
    config.eval.questions = 2
    assert [q.dataset for q in parts.load_test(config)] == ["a", "b"]
    every = parts.load_questions(data.test, "test", config)
    config.data.manifest = str(tmp_path / "manifest.jsonl")
    write_manifest(every[2:1:-1] + every[:1], config.data.manifest)
    assert parts.load_test(config) == [every[2], every[0]]


def test_training_draws_from_its_sets_as_the_weights_say(tmp_path):
    config = Config()
    config.data.train = (question_file(tmp_path / "a.jsonl", *map(str, range(90))),)
    config.data.train += (question_file(tmp_path / "b.jsonl", *map(str, range(10))),)
    for weights, share in (((), 10), ((1, 1), 50), ((3, 1), 25)):
        config.data.weights = weights
        drawn = [q.dataset for q, _ in parts.question_source(config).batch(0, 100)]
        assert drawn.count("b") == share


@pytest.mark.parametrize("fingerprints", [parts.trained_on, parts.evaluated_on])
def test_fingerprints_know_contents_only(phase, tmp_path, fingerprints):
    before = fingerprints(phase)
    for name in FILES:
        path = tmp_path / name
        path.write_text(path.read_text())
        os.utime(path, (1, 1))
    other = copy.deepcopy(phase)
    other.optim.lr, other.run.seed, other.team.row_tokens = 0.5, 7, 99
    assert fingerprints(phase) == before == fingerprints(other)


def test_a_model_with_other_sizes_has_another_fingerprint(phase, tmp_path):
    before = parts.evaluated_on(phase)
    (tmp_path / "init" / "config.json").write_text('{"num_hidden_layers": 2}')
    assert {k for k, v in parts.evaluated_on(phase).items() if v != before[k]} == {"weights of model.init"}


def test_the_embedded_world_and_random_weights_need_no_fingerprint(config):
    assert parts.trained_on(config) == parts.evaluated_on(config) == {}


def test_a_finished_run_is_fingerprinted_by_its_export(run, config):
    named = [dataclasses.replace(config.model, init=str(spec)) for spec in (run, run / "export")]
    found = [parts.evaluated_on(dataclasses.replace(config, model=model)) for model in named]
    export = run / "export"
    expected = {"weights": hf.fingerprint(export), "tokenizer": files_fingerprint(export)}
    assert found[0] == found[1] == {f"{what} of model.init": value for what, value in expected.items()}


@pytest.mark.parametrize("model", ["init", "teacher", "reference"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"])
def test_a_restart_with_another_tokenizer_template_or_end_is_refused(run, config, student, model, file):
    """Kind 20, at resume."""
    config.model = dataclasses.replace(config.model, init=str(run), teacher=str(run), reference=str(run))
    saved = resume_meta(config, parts.trained_on(config))
    other = pathlib.Path(shutil.copytree(run / "export", run.parent / "other"))
    setattr(config.model, model, str(other))
    now = resume_meta(config, parts.trained_on(config))
    assert saved["inputs"] == now["inputs"]
    (other / file).write_text(
        (other / file).read_text() + " " if (other / file).exists() else "{{ messages }}"
    )
    now["inputs"] = parts.trained_on(config)
    with pytest.raises(ResumeError, match=f"tokenizer of model.{model}: "):
        check_resume(saved, now, config)
