"""Evaluations: every attempt recorded in order, the same again for the same seed, the best weights kept."""

import copy
import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from mopd_jax.config import Config, DataConfig, EvalConfig, Precision, TeamConfig, Workflow
from mopd_jax.data import miniature
from mopd_jax.data.questions import fingerprint, select
from mopd_jax.model import hf, sharding
from mopd_jax.model.qwen3 import Qwen3
from mopd_jax.retrieval.cache import CachedSearch
from mopd_jax.retrieval.search import Document, SearchError
from mopd_jax.rollout.driver import Driver
from mopd_jax.run import parts
from mopd_jax.run.checkpoint import write_json
from mopd_jax.run.evaluation import (
    TooManyAborted,
    check_aborted,
    conditions,
    evaluate_team,
    load_team,
    write_episodes,
)
from mopd_jax.run.results import read_result, write_result
from mopd_jax.run.validation import Validation
from mopd_jax.team.roles import DOCUMENTS as DOCUMENTS_TAG
from tests import engines, tiny
from tests.engines import ScriptedEngine
from tests.fakes import make_episode, make_question
from tests.fixtures import random_params, tiny_config

TOKENS, PROMPTS, WORLD = engines.tokens(), miniature.PROMPTS, miniature.World(0)
QUESTIONS = WORLD.questions("test")[:5]
VALIDATION = select(WORLD.questions("validation"), 5)
GOLDS = {answer for question in (*QUESTIONS, *VALIDATION) for answer in question.answers}
FOUND = tuple(
    Document(p["id"], p["contents"])
    for p in WORLD.passages
    if not GOLDS & set(re.findall(r"\w+", p["contents"]))
)[:2]
"""What every search finds: no answer."""


def spelled(text: str) -> str:
    """A text as the embedded world's tokens spell it."""
    return TOKENS.decode(TOKENS.encode(text))


class Knowing:
    """Speaks for the cascade: one search, a summary, then the gold answer to the questions it knows."""

    def __init__(self, questions, known: int = 100):
        self.golds = {spelled(question.text): question.answers[0] for question in questions}
        self.known = known

    def __call__(self, prompt: list[int], candidate: int) -> list[int]:
        text = TOKENS.decode(prompt)
        if PROMPTS.answerer in text.replace(" .", "."):
            (number, gold) = next((n, g) for n, (q, g) in enumerate(self.golds.items()) if q in text)
            said = f"<answer>{gold if number < self.known else 'unknown'}</answer>"
        else:
            said = (
                "<summary>Ada</summary>" if f"<{DOCUMENTS_TAG}>" in text else "<search>novel of Ada</search>"
            )
        return [*TOKENS.encode(said), TOKENS.end_of_turn_id]


class FixedSearch:
    """Finds the same documents for every query; fails in the calls named by `failing`, from 0."""

    identity = "fixed"

    def __init__(self, failing: tuple[int, ...] = ()):
        self.failing, self.calls = failing, 0

    def search(self, queries, k):
        self.calls += 1
        if self.calls - 1 in self.failing:
            raise SearchError("no answer")
        return [FOUND[:k] for _ in queries]


def make_config() -> Config:
    config = tiny.team()
    config.team = dataclasses.replace(engines.TEAM, workflow=Workflow.CASCADE, wording=config.team.wording)
    config.retrieval.max_aborted_share = 0.2
    return config


def make_driver(engine, config, retriever, alive: int, seed: int = 0) -> Driver:
    renderer = parts.make_renderer(config, TOKENS)
    k, rows = config.retrieval.k, config.team.row_tokens
    return Driver(engine, retriever, renderer, TOKENS, k=k, row_tokens=rows, alive=alive, seed=seed)


def evaluate(engine, retriever=None, alive: int = 2, seed: int = 0):
    config = make_config()
    driver = make_driver(engine, config, retriever or FixedSearch(), alive, seed)
    workflow = parts.make_workflow(config.team, candidates=1)
    return evaluate_team("ours", config, driver, workflow, QUESTIONS, 2)


def scripted(known: int = 100, groups: int = 2) -> ScriptedEngine:
    return ScriptedEngine(Knowing(QUESTIONS, known), TOKENS.eos_ids, slots=groups, parked=0)


# ---------------------------------------------------------------- records


@pytest.mark.parametrize(("groups", "alive"), [(1, 1), (2, 2), (3, 3), (100, 100)])
def test_five_questions_twice_on_few_slots_give_ten_records_in_order(groups, alive):
    result, episodes = evaluate(scripted(known=3, groups=groups), alive=alive)
    keys = [(r.dataset, r.split, r.id, r.attempt) for r in result.records]
    assert keys == [("miniature", "test", q.id, attempt) for q in QUESTIONS for attempt in (0, 1)]
    assert [r.em for r in result.records] == [1.0] * 6 + [0.0] * 4
    assert [r.answer for r in result.records[::2]] == [
        *(q.answers[0] for q in QUESTIONS[:3]),
        *["unknown"] * 2,
    ]
    assert [(e.question, e.draw, e.workflow) for e in episodes] == [
        (q, n, 0) for q in QUESTIONS for n in (0, 1)
    ]


def test_a_record_counts_what_its_workflow_did():
    result, episodes = evaluate(scripted())
    record, episode = result.records[0], episodes[0]
    searcher, answerer = episode.rows
    assert (record.searches, record.calls, record.aborted) == (1, 3, False)
    assert record.output_tokens == searcher.mask.sum() + answerer.mask.sum()
    starts = [np.flatnonzero(np.diff(row.mask.astype(int), prepend=0) == 1) for row in (searcher, answerer)]
    assert record.input_tokens == sum(int(start) for row in starts for start in row)
    assert record.rows == {"searcher": {"finished": 1}, "answerer": {"finished": 1}}
    assert (record.f1, record.containment, record.recall) == (1.0, 1.0, 0.0)


def test_an_attempt_with_a_failed_search_is_marked_and_wrong():
    # One workflow at a time: its one search is one call, so call 3 belongs to question 1, attempt 1.
    result, episodes = evaluate(scripted(), FixedSearch(failing=(3,)), alive=1)
    assert [r.aborted for r in result.records] == [number == 3 for number in range(10)]
    assert [r.em for r in result.records] == [float(number != 3) for number in range(10)]
    failed = result.records[3]
    assert (failed.answer, failed.f1, failed.containment, failed.rows) == ("", 0.0, 0.0, {})
    assert episodes[3].aborted and not episodes[3].rows


def test_too_many_failed_searches_are_no_result():
    assert sum(r.aborted for r in evaluate(scripted(), FixedSearch((0, 5)), alive=1)[0].records) == 2
    expected = r"30% of the workflows .*max_aborted_share is 20%: look at the retriever fixed\."
    with pytest.raises(TooManyAborted, match=expected):
        evaluate(scripted(), FixedSearch(failing=(0, 5, 7)), alive=1)


def test_the_limit_itself_is_allowed():
    episodes = [make_episode(draw=n) for n in range(4)]
    episodes[1].aborted = True
    check_aborted(episodes, 0.25, FixedSearch())
    with pytest.raises(TooManyAborted, match=r"25% of the workflows .* is 24%"):
        check_aborted(episodes, 0.24, FixedSearch())


def test_a_result_comes_back_from_its_file(tmp_path):
    result, _ = evaluate(scripted(), FixedSearch(failing=(3,)), alive=1)
    write_result(result, tmp_path / "results.jsonl")
    assert read_result(tmp_path / "results.jsonl") == result


# ---------------------------------------------------------------- real sampling


def sampled(seed: int, alive: int = 2):
    result, episodes = evaluate(engines.fresh_engine(), alive=alive, seed=seed)
    return result, [[row.ids.tolist() for row in episode.rows] for episode in episodes]


def test_an_evaluation_is_a_function_of_its_seed():
    first, ids = sampled(seed=0)
    again, ids_again = sampled(seed=0, alive=4)
    assert again == first and ids_again == ids, "neither repetition nor the number of slots matters"
    other, other_ids = sampled(seed=1)
    assert other.conditions == first.conditions
    assert sum(a != b for a, b in zip(ids, other_ids, strict=True)) > 5
    assert ids[0] != ids[1], "attempts at one question are sampled independently"


# ---------------------------------------------------------------- whose weights


def finished_run(folder, config: Config, seed: int) -> tuple[str, dict]:
    """A run that has left random weights, and these."""
    student = parts.open_model("random", config)
    mesh = sharding.make_mesh((1, 1, 1), jax.devices()[:1])
    params = parts.load_params(student, mesh, Precision.FLOAT32, seed)
    parts.export(folder / "export", student, params, config.team)
    write_json(folder / "finished.json", {})
    return str(folder), params


def test_the_searcher_has_weights_of_its_own(tmp_path):
    config = make_config()
    config.run.dir = str(tmp_path / "exam")
    config.model.init, ours = finished_run(tmp_path / "stage2", config, seed=3)
    config.model.searcher, theirs = finished_run(tmp_path / "stage1", config, seed=4)
    team = load_team(config)
    jax.tree.map(np.testing.assert_array_equal, team.engine._params, ours)
    jax.tree.map(np.testing.assert_array_equal, team.searcher._params, theirs)
    assert team.driver._engines == (team.engine, team.searcher)
    config.model.searcher = ""
    team = load_team(config)
    assert team.searcher is None and team.driver._engines == (team.engine,)


# ---------------------------------------------------------------- what else is written


def test_conditions_are_what_an_answer_depends_on():
    config = make_config()
    found = conditions(config, QUESTIONS, "fixed")
    assert (found.questions, found.retriever) == (fingerprint(QUESTIONS), "fixed")
    limits = {f.name for f in dataclasses.fields(TeamConfig) if f.type is int} - {"candidates"} | {"k"}
    assert found.limits == {name: getattr(config.team, name, config.retrieval.k) for name in limits}
    for change, same in ((("candidates", 1), True), (("session_searches", 9), False)):
        other = copy.deepcopy(config)
        setattr(other.team, *change)
        assert (conditions(other, QUESTIONS, "fixed") == found) == same
    assert conditions(config, QUESTIONS[:4], "fixed") != found


def test_episodes_are_written_one_per_line(tmp_path):
    _, episodes = evaluate(scripted(known=0), FixedSearch(failing=(1,)), alive=1)
    write_episodes(episodes, tmp_path / "episodes.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert len(lines) == 10
    assert lines[0] == {
        "dataset": "miniature",
        "id": QUESTIONS[0].id,
        "attempt": 0,
        "question": QUESTIONS[0].text,
        "gold": list(QUESTIONS[0].answers),
        "answers": ["unknown"],
        "searches": [
            {"query": "novel of Ada", "documents": [{"id": d.id, "title": d.title} for d in FOUND]},
        ],
        "rows": [
            {"role": "searcher", "turns": 2, "status": "finished", "reason": "", "body": "Ada"},
            {"role": "answerer", "turns": 1, "status": "finished", "reason": "", "body": "unknown"},
        ],
        "aborted": False,
    }
    assert lines[1] == lines[0] | {"attempt": 1, "answers": [], "searches": [], "rows": [], "aborted": True}


def test_text_of_any_script_is_written_as_it_is(tmp_path):
    question = dataclasses.replace(make_question(), text="Où est Zürich? 東京\u2028")
    write_episodes([make_episode(question=question)], tmp_path / "episodes.jsonl")
    text = (tmp_path / "episodes.jsonl").read_text()
    assert "東京" in text and text.count("\n") == 1 and json.loads(text)["question"] == question.text


# ---------------------------------------------------------------- validation during training


class LoadedEngine(ScriptedEngine):
    """Knows as many answers as the weights it was given say."""

    def load(self, params) -> None:
        self.speak.known = int(params["final_norm"]["scale"][0])
        self.loaded = True

    def unload(self) -> None:
        self.loaded = False

    def take_usage(self) -> None:
        self.usage_taken = True


def skilled(known: int) -> dict:
    """Weights under which the scripted team answers the first `known` questions."""
    params = random_params(tiny_config(vocab_size=TOKENS.vocab_size), seed=known)
    params["final_norm"]["scale"][0] = known
    return params


@pytest.fixture
def config(tmp_path) -> Config:
    config = make_config()
    config.run.dir = str(tmp_path)
    config.data = DataConfig(validation=("miniature",))
    config.eval = EvalConfig(validation_questions=5, validation_attempts=2)
    return config


@pytest.fixture
def engine() -> LoadedEngine:
    return LoadedEngine(Knowing(VALIDATION), TOKENS.eos_ids)


@pytest.fixture
def validation(config, engine) -> Validation:
    """Asks five questions; their scripted answers are right as often as the weights say."""
    student = parts.open_model("random", config)
    student = dataclasses.replace(student, model=Qwen3(tiny_config(vocab_size=TOKENS.vocab_size)))
    retriever = CachedSearch(FixedSearch(), 100)
    driver = make_driver(engine, config, retriever, alive=100)
    mesh = sharding.make_mesh((1, 1, 1), jax.devices()[:1])
    return Validation(config, student, parts.Team(engine, retriever, driver, mesh))


def kept(folder) -> tuple[dict, int]:
    """What `best.json` says, and how many answers the exported weights know."""
    sizes = hf.read_config(folder / "export")
    params = hf.load_params(folder / "export", sizes)
    known = int(params["final_norm"]["scale"][0])
    jax.tree.map(np.testing.assert_array_equal, params, skilled(known))
    return json.loads((folder / "best.json").read_text()), known


def test_the_best_weights_so_far_are_kept(validation, tmp_path, capsys):
    steps = [(10, 1), (20, 3), (30, 3), (40, 2), (50, 5)]
    best = [(10, 1), (20, 3), (20, 3), (20, 3), (50, 5)]
    for (step, known), (best_step, best_known) in zip(steps, best, strict=True):
        metrics = validation.run(step, skilled(known))
        assert metrics["eval/em"] == pytest.approx(known / 5)
        noted, exported = kept(tmp_path)
        assert noted == {"step": best_step, "em": pytest.approx(best_known / 5)} and exported == best_known
        announced = re.findall(r"Step (\d+) is the best so far", capsys.readouterr().out)
        assert announced == [str(step)] * (step == best_step)


def test_weights_that_do_not_score_higher_change_no_file(validation, tmp_path):
    def state() -> dict:
        files = (path for path in tmp_path.rglob("*") if path.is_file())
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    validation.run(10, skilled(2))
    before = state()
    validation.run(20, skilled(2))
    validation.run(30, skilled(0))
    assert state() == before


def test_metrics_of_a_validation(validation, engine):
    assert validation.run(1, skilled(4)) == {
        "eval/em": pytest.approx(0.8),
        "eval/searches": 1.0,
        "eval/no_search": 0.0,
        "eval/recall": pytest.approx(0.0),
    }
    assert engine.usage_taken, "a training step must not report the evaluation's usage"
    assert validation._team.retriever.take_counts() == (0, 0), "nor its queries"
    assert not engine.loaded, "an update needs the engine's memory"
