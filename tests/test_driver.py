"""Whole workflows through the driver: on a scripted engine, and on the real one with random weights."""

import collections
import dataclasses
import itertools
import random
import threading
import time

import numpy as np
import pytest

from mopd_jax.config import RolloutConfig, TeamConfig, Workflow
from mopd_jax.data import miniature
from mopd_jax.model.tokens import Tokens
from mopd_jax.retrieval.miniature import MiniatureSearch
from mopd_jax.retrieval.search import Document, Retriever, SearchError
from mopd_jax.rollout.driver import Driver, Task, WorkflowFactory, alive_workflows, sampling_key
from mopd_jax.rollout.engine import Engine
from mopd_jax.rollout.render import Renderer
from mopd_jax.team.episode import (
    Message,
    Outcome,
    Question,
    Role,
    SampleRequest,
    SearchRequest,
    Session,
    Status,
)
from mopd_jax.team.roles import Prompts
from mopd_jax.team.workflows import WORKFLOWS
from tests import engines
from tests.engines import ScriptedEngine, Spoken, fresh_engine, logps_of, score, script
from tests.fixtures import write_tokenizer

TOKENS, PROMPTS, WORLD = engines.tokens(), miniature.PROMPTS, miniature.World(0)
EOS = TOKENS.end_of_turn_id
TEAM = TeamConfig()
PERSON, FRIEND = WORLD.people[:2]
NOVELS = [WORLD.facts[person, "novel"] for person in WORLD.people[:5]]
PASSAGES = [Document(p["id"], p["contents"]) for p in WORLD.passages[:4]]
DOCUMENTS, OTHER_DOCUMENTS = tuple(PASSAGES[:2]), tuple(PASSAGES[2:])
QUESTION = Question("miniature", "train", "0", f"What is {PERSON}'s friend's novel?", (NOVELS[0],))
SEARCH, SUMMARY = f"<search>{PERSON}'s friend</search>", f"<summary>{FRIEND}</summary>"
TASK, REQUEST = f"<task>{PERSON}'s friend</task>", "<request_answer></request_answer>"
ANSWERS = [f"<answer>{novel}</answer>" for novel in NOVELS]


def spelled(text: str) -> str:
    """Returns a text as the embedded world's tokens spell it: with spaces between words and signs."""
    return TOKENS.decode(TOKENS.encode(text))


QUERY = spelled(f"{PERSON}'s friend")
OPENED = TOKENS.open(
    [Message("system", PROMPTS.searcher), Message("user", PROMPTS.to_searcher(QUESTION.text))]
)
"""First prompt of a cascade's Searcher."""
FRAMED = PROMPTS.format_documents([(d.title, d.text) for d in DOCUMENTS])
FOUND = TOKENS.reply(FRAMED, closed=True)
"""What it reads after a search."""


def asked(summary: str) -> list[int]:
    """Returns the prompt of a cascade's Answerer."""
    notes = PROMPTS.to_answerer(QUESTION.text, [(QUESTION.text, summary)])
    return TOKENS.open([Message("system", PROMPTS.answerer), Message("user", notes)])


class FixedSearch:
    """Finds the same documents for every query; fails in the calls named by `failing`, from 0."""

    identity = "fixed"

    def __init__(self, documents=DOCUMENTS, failing=()):
        self.documents, self.failing, self.calls = documents, failing, []

    def search(self, queries, k):
        self.calls.append(list(queries))
        if len(self.calls) - 1 in self.failing:
            raise SearchError("no answer")
        return [self.documents[:k] for _ in queries]


def said(text: str, ended: bool = True, tokens: Tokens = TOKENS) -> list[int]:
    """Returns the ids of a sampled turn; `ended`: with the end-of-turn token, else cut by the limit."""
    return tokens.encode(text) + [tokens.end_of_turn_id] * ended


def drive(
    engine,
    tasks: int | list[Task] = 1,
    workflow: Workflow | WorkflowFactory = Workflow.CASCADE,
    candidates: int = 1,
    retriever=None,
    team: TeamConfig = TEAM,
    alive: int = 100,
    tokens: Tokens = TOKENS,
    prompts: Prompts = PROMPTS,
    document_tokens: int = 100,
    seed: int = 7,
    searcher=None,
):
    """Runs a workflow on tasks of the one question; returns their episodes."""
    if isinstance(tasks, int):
        tasks = [Task(QUESTION, draw=3, workflow=n) for n in range(tasks)]
    driver = Driver(
        engine,
        retriever or FixedSearch(),
        Renderer(tokens, prompts, document_tokens),
        tokens,
        searcher=searcher,
        k=3,
        row_tokens=team.row_tokens,
        alive=alive,
        seed=seed,
    )
    if isinstance(workflow, Workflow):
        start = WORKFLOWS[workflow]
        return driver.run(lambda question: start(question, team, prompts, candidates), tasks)
    return driver.run(workflow, tasks)


def scripted(*turns: list[int], **settings) -> ScriptedEngine:
    return ScriptedEngine(script(*turns), TOKENS.eos_ids, **settings)


def by_conversation(log: list[Spoken]) -> list[list[Spoken]]:
    turns = collections.defaultdict(list)
    for spoken in log:
        turns[id(spoken.conversation)].append(spoken)
    return list(turns.values())


def assert_row_is(row, *pieces: tuple[list[int], bool]) -> None:
    """Checks a row against its (ids, sampled) stretches."""
    ids = [i for piece, _ in pieces for i in piece]
    mask = [sampled for piece, sampled in pieces for _ in piece]
    assert row.ids.tolist() == ids and row.mask.tolist() == mask
    np.testing.assert_array_equal(row.logps, np.where(mask, logps_of(ids), 0))
    assert (row.ids.dtype, row.mask.dtype, row.logps.dtype) == (np.int32, bool, np.float32)


# ---------------------------------------------------------------- rows


def test_rows_of_a_cascade_with_two_searches():
    turns = [said(f"What is {PERSON}? " + SEARCH), *map(said, (SEARCH, SUMMARY, *ANSWERS[:2]))]
    engine, retriever = scripted(*turns), FixedSearch()
    (episode,) = drive(engine, candidates=2, retriever=retriever)
    searcher, first, second = episode.rows

    search, again, summary, answer, other = turns
    pieces = [(OPENED, False), (search, True), (FOUND, False), (again, True), (FOUND, False), (summary, True)]
    assert_row_is(searcher, *pieces)
    assert_row_is(first, (asked(spelled(FRIEND)), False), (answer, True))
    assert_row_is(second, (asked(spelled(FRIEND)), False), (other, True))

    bodies = [spelled(name) for name in (FRIEND, *NOVELS[:2])]
    assert [
        (r.role, r.session, r.candidate, r.status, r.searches, r.body, r.turns) for r in episode.rows
    ] == [
        (Role.SEARCHER, 0, 0, Status.FINISHED, 2, bodies[0], 3),
        (Role.ANSWERER, 1, 0, Status.FINISHED, 0, bodies[1], 1),
        (Role.ANSWERER, 1, 1, Status.FINISHED, 0, bodies[2], 1),
    ]
    assert (episode.question, episode.draw, episode.workflow) == (QUESTION, 3, 0)
    assert (episode.answers, episode.searches, episode.aborted) == (tuple(bodies[1:]), 2, False)
    assert episode.queries == (QUERY, QUERY) and retriever.calls == [[QUERY], [QUERY]]
    assert episode.documents == (DOCUMENTS, DOCUMENTS)
    assert episode.calls == 5
    assert episode.output_tokens == sum(map(len, turns))
    prompts = [len(OPENED), len(OPENED + search + FOUND), len(OPENED + search + FOUND + again + FOUND)]
    assert episode.input_tokens == sum(prompts) + 2 * len(asked(spelled(FRIEND)))


def has_role(prompt: list[int], system: str) -> bool:
    """Whether a conversation was opened with this system prompt."""
    ids = TOKENS.encode(system)
    return prompt[2 : 2 + len(ids)] == ids


def team_speaks(prompt: list[int], candidate: int) -> list[int]:
    """Two tasks of one search each, then the answer, read off the prompt."""
    text = TOKENS.decode(prompt)
    if has_role(prompt, PROMPTS.leader):
        return said(TASK if text.count("</result>") < 2 else REQUEST)
    if has_role(prompt, PROMPTS.searcher):
        return said(SUMMARY if "</documents>" in text else SEARCH)
    return said(ANSWERS[candidate])


def test_each_prompt_starts_with_the_one_before_and_its_output():
    """Kind 2."""
    engine = ScriptedEngine(team_speaks, TOKENS.eos_ids)
    episodes = drive(engine, 3, Workflow.HIERARCHY, candidates=5)
    lengths = collections.Counter()
    for turns in by_conversation(engine.log):
        lengths[len(turns)] += 1
        for before, after in itertools.pairwise(turns):
            start = before.prompt + before.outputs[0]
            assert after.prompt[: len(start)] == start and len(after.prompt) > len(start)
    # Per workflow a Leader of three turns, two Searchers of two, an Answerer of one.
    assert lengths == {3: 3, 2: 6, 1: 3}
    assert engine.evicted == 0  # the Leader keeps its cache while a Searcher works
    for episode in episodes:
        assert [row.role for row in episode.rows] == [Role.LEADER, *[Role.SEARCHER] * 2, *[Role.ANSWERER] * 5]
        assert [row.status for row in episode.rows] == [Status.FINISHED] * 8


def test_rows_hold_what_the_engine_was_asked_and_said():
    engine = ScriptedEngine(team_speaks, TOKENS.eos_ids)
    (episode,) = drive(engine, 1, Workflow.HIERARCHY, candidates=5)
    conversations = {tuple(turns[0].prompt): turns for turns in by_conversation(engine.log)}
    assert len(conversations) == 3  # both Searchers got the same task
    for row in episode.rows:
        turns = next(t for opening, t in conversations.items() if tuple(row.ids[: len(opening)]) == opening)
        output = turns[-1].outputs[row.candidate]
        assert row.ids.tolist() == turns[-1].prompt + output
        expected = np.zeros(len(row.ids), bool)
        for turn in turns:
            expected[len(turn.prompt) :][: len(turn.outputs[row.candidate])] = True
        assert row.mask.tolist() == expected.tolist() and row.turns == len(turns)
        np.testing.assert_array_equal(row.logps, np.where(expected, logps_of(row.ids), 0))
    calls = [(spoken, output) for spoken in engine.log for output in spoken.outputs]
    assert episode.calls == len(calls) == 3 + 4 + 5
    assert episode.input_tokens == sum(len(spoken.prompt) for spoken, _ in calls)
    assert episode.output_tokens == sum(len(output) for _, output in calls)
    assert episode.output_tokens == sum(row.mask.sum() for row in episode.rows)


def test_five_candidates_are_five_rows_on_one_prompt():
    engine = ScriptedEngine(team_speaks, TOKENS.eos_ids)
    (episode,) = drive(engine, 1, Workflow.HIERARCHY, candidates=5)
    rows = episode.rows[-5:]
    prompts = [row.ids[~row.mask].tolist() for row in rows]
    assert prompts == [engine.log[-1].prompt] * 5 and len({tuple(row.ids) for row in rows}) == 5
    assert [row.candidate for row in rows] == [0, 1, 2, 3, 4]
    assert episode.answers == tuple(row.body for row in rows)
    assert episode.answers == tuple(map(spelled, NOVELS))


def test_malformed_output_ends_the_row_and_is_kept():
    """Nothing after the action is searched for, and nothing follows the turn."""
    turns = [said(SEARCH + " Question: " + PERSON), said(ANSWERS[0])]
    engine, retriever = scripted(*turns), FixedSearch()
    (episode,) = drive(engine, retriever=retriever)
    searcher, answerer = episode.rows
    assert (searcher.status, answerer.status) == (Status.MALFORMED, Status.FINISHED)
    assert retriever.calls == [] and (episode.queries, episode.searches) == ((), 0)
    assert searcher.ids[-len(turns[0]) :].tolist() == turns[0] and searcher.mask.sum() == len(turns[0])


def test_a_leader_that_ends_badly_leaves_one_row():
    (episode,) = drive(scripted(said(ANSWERS[0])), workflow=Workflow.HIERARCHY, candidates=5)
    assert [(row.role, row.status) for row in episode.rows] == [(Role.LEADER, Status.MALFORMED)]
    assert episode.answers == () and episode.calls == 1


# ---------------------------------------------------------------- ids are born once


@pytest.fixture(scope="module")
def byte_tokens(tmp_path_factory) -> Tokens:
    """256 bytes and the merge "ab"; a turn ends with <|im_end|> or with <|endoftext|>."""
    folder = tmp_path_factory.mktemp("bytes")
    return Tokens.from_folder(write_tokenizer(folder, eos=("<|im_end|>", "<|endoftext|>")))


def drive_bytes(tokens: Tokens, *turns: list[int], **settings):
    engine = ScriptedEngine(script(*turns), tokens.eos_ids)
    documents = (Document("0", "T\nab"),)
    return drive(engine, tokens=tokens, prompts=Prompts(), retriever=FixedSearch(documents), **settings)


def test_sampled_ids_are_kept_where_encoding_again_would_change_them(byte_tokens):
    [a], [b] = byte_tokens.encode("a"), byte_tokens.encode("b")
    broken = byte_tokens.encode("é")[:1]
    turns = [
        [
            *byte_tokens.encode("<search>"),
            a,
            b,
            *broken,
            *byte_tokens.encode("</search>"),
            byte_tokens.end_of_turn_id,
        ],
        [
            *byte_tokens.encode("<summary>"),
            a,
            b,
            *byte_tokens.encode("</summary>"),
            byte_tokens.end_of_turn_id,
        ],
        said("<answer>ab</answer>", tokens=byte_tokens),
    ]
    text = byte_tokens.decode(turns[1])
    assert byte_tokens.encode(text.removesuffix("<|im_end|>")) != turns[1][:-1]
    (episode,) = drive_bytes(byte_tokens, *turns)
    searcher, answerer = episode.rows
    assert searcher.ids[searcher.mask].tolist() == turns[0] + turns[1]
    np.testing.assert_array_equal(searcher.logps[searcher.mask], logps_of(turns[0] + turns[1]))
    assert episode.queries == ("ab\ufffd",) and searcher.body == "ab"
    # In the Answerer's row the summary is text, encoded once.
    notes = Prompts().to_answerer(QUESTION.text, [(QUESTION.text, "ab")])
    asked = byte_tokens.open([Message("system", Prompts().answerer), Message("user", notes)])
    assert answerer.ids[~answerer.mask].tolist() == asked


def test_the_workflow_learns_how_much_was_read():
    """The first prompt's length is the cap; with one token more the Searcher may search again."""
    capped = TeamConfig(workflow_input_tokens=len(OPENED))
    (episode,) = drive(scripted(*map(said, (SEARCH, SEARCH, ANSWERS[0]))), team=capped)
    assert (episode.searches, episode.rows[0].status) == (1, Status.MALFORMED)
    looser = TeamConfig(workflow_input_tokens=len(OPENED) + 1)
    (episode,) = drive(scripted(*map(said, (SEARCH, SEARCH, SUMMARY, ANSWERS[0]))), team=looser)
    assert (episode.searches, episode.rows[0].status) == (2, Status.FINISHED)


def test_a_cut_turn_with_a_whole_action_counts_and_its_end_of_turn_is_not_learnt():
    turns = [said(text, ended=False) for text in (SEARCH, SUMMARY, ANSWERS[0])]
    (episode,) = drive(scripted(*turns))
    searcher, answerer = episode.rows
    assert [row.status for row in episode.rows] == [Status.FINISHED] * 2 and episode.searches == 1
    after = TOKENS.reply(FRAMED, closed=False)
    assert after[0] == EOS
    assert_row_is(searcher, (OPENED, False), (turns[0], True), (after, False), (turns[1], True))
    assert answerer.mask[-1] and answerer.ids[-1] != EOS


def test_another_end_token_is_learnt_and_the_template_s_own_is_added(byte_tokens):
    other = min(set(byte_tokens.eos_ids) - {byte_tokens.end_of_turn_id})
    search = [*byte_tokens.encode("<search>q</search>"), other]
    turns = [search, *(said(t, tokens=byte_tokens) for t in ("<summary>s</summary>", "<answer>a</answer>"))]
    (episode,) = drive_bytes(byte_tokens, *turns)
    row = episode.rows[0]
    assert row.status is Status.FINISHED and episode.queries == ("q",)
    place = int(np.flatnonzero(row.ids == other)[0])
    assert row.mask[place] and not row.mask[place + 1] and row.ids[place + 1] == byte_tokens.end_of_turn_id


def test_a_cut_turn_without_an_action_is_truncated():
    (episode,) = drive(scripted(said(f"<search>{PERSON}", ended=False), said(ANSWERS[0])))
    assert [row.status for row in episode.rows] == [Status.LENGTH, Status.FINISHED]


def test_other_documents_change_neither_masks_nor_counts():
    assert [TOKENS.count(d.text) for d in DOCUMENTS] == [TOKENS.count(d.text) for d in OTHER_DOCUMENTS]
    ours, theirs = (
        drive(ScriptedEngine(team_speaks, TOKENS.eos_ids), 2, Workflow.HIERARCHY, 5, FixedSearch(documents))
        for documents in (DOCUMENTS, OTHER_DOCUMENTS)
    )
    changed = 0
    for one, two in zip(ours, theirs, strict=True):
        assert (one.calls, one.input_tokens, one.output_tokens) == (
            two.calls,
            two.input_tokens,
            two.output_tokens,
        )
        for a, b in zip(one.rows, two.rows, strict=True):
            changed += int((a.ids != b.ids).sum())
            np.testing.assert_array_equal(a.mask, b.mask)
            np.testing.assert_array_equal(a.logps, b.logps)
            np.testing.assert_array_equal(a.ids[a.mask], b.ids[b.mask])
    assert changed > 0


# ---------------------------------------------------------------- no room

SECOND_PROMPT = len(OPENED + said(SEARCH) + FOUND)
TIGHT = dataclasses.replace(TEAM, searcher_tokens=20, answerer_tokens=10)


def test_a_turn_that_just_fits_is_sampled():
    team = dataclasses.replace(TIGHT, row_tokens=SECOND_PROMPT + 20)
    opening, word, *_, closing = TOKENS.encode(SUMMARY)
    turns = [said(SEARCH), [opening, *[word] * 18, closing], said(ANSWERS[0])]
    (episode,) = drive(scripted(*turns), team=team)
    assert len(episode.rows[0].ids) == team.row_tokens
    assert [row.status for row in episode.rows] == [Status.FINISHED] * 2


def test_a_turn_without_room_ends_the_row_and_loses_no_token():
    team = dataclasses.replace(TIGHT, row_tokens=SECOND_PROMPT + 19)
    turns = [said(SEARCH), said(ANSWERS[0])]
    engine = scripted(*turns)
    (episode,) = drive(engine, team=team)
    searcher, answerer = episode.rows
    assert_row_is(searcher, (OPENED, False), (turns[0], True))
    assert (searcher.status, searcher.searches, searcher.body, searcher.turns) == (Status.CONTEXT, 1, "", 1)
    assert_row_is(answerer, (asked(PROMPTS.no_result), False), (turns[1], True))
    assert (answerer.status, episode.answers) == (Status.FINISHED, (spelled(NOVELS[0]),))
    assert (episode.calls, episode.output_tokens) == (2, sum(map(len, turns)))
    assert episode.searches == 1 and episode.queries == (QUERY,)
    assert not engine.places.held


def test_an_answer_request_without_room_gives_each_candidate_a_row():
    team = dataclasses.replace(
        TEAM, searcher_tokens=5, row_tokens=len(asked(FRIEND)) + TEAM.answerer_tokens - 1
    )
    (episode,) = drive(scripted(said(SUMMARY)), candidates=5, team=team)
    assert [row.status for row in episode.rows] == [Status.FINISHED, *[Status.CONTEXT] * 5]
    assert [(len(row.ids), row.candidate, row.turns) for row in episode.rows[1:]] == [
        (0, c, 0) for c in range(5)
    ]
    assert episode.answers == ("",) * 5 and episode.calls == 1


# ---------------------------------------------------------------- searches that fail


def test_a_failed_search_aborts_its_workflow_and_no_other():
    def run(*failing: int):
        engine = ScriptedEngine(team_speaks, TOKENS.eos_ids)
        episodes = drive(engine, 4, Workflow.HIERARCHY, 5, FixedSearch(failing=failing), alive=1)
        assert not engine.places.held
        return episodes

    whole, failed = run(), run(3)
    # Workflow n makes the calls 2n and 2n + 1.
    assert [episode.aborted for episode in failed] == [False, True, False, False]
    assert (failed[1].rows, failed[1].answers, len(failed[1].queries)) == ([], (), 1)
    for n in (0, 2, 3):
        for a, b in zip(whole[n].rows, failed[n].rows, strict=True):
            assert a.ids.tolist() == b.ids.tolist() and a.mask.tolist() == b.mask.tolist()


def test_a_batch_of_searches_fails_together_and_the_run_goes_on():
    engine = ScriptedEngine(team_speaks, TOKENS.eos_ids, per_step=3)
    retriever = FixedSearch(failing=(0,))
    episodes = drive(engine, 5, Workflow.HIERARCHY, 1, retriever, alive=3)
    assert [episode.aborted for episode in episodes] == [True, True, True, False, False]
    assert len(retriever.calls[0]) == 3
    assert all(len(episode.rows) == 4 for episode in episodes[3:])


# ---------------------------------------------------------------- a Searcher of its own


def test_a_searcher_of_its_own_speaks_its_turns_and_no_others():
    one, engine, own = (ScriptedEngine(team_speaks, TOKENS.eos_ids) for _ in range(3))
    together = drive(one, 3, Workflow.HIERARCHY, candidates=5)
    apart = drive(engine, 3, Workflow.HIERARCHY, candidates=5, searcher=own)
    assert all(map(equal, together, apart))
    assert [len(e.log) for e in (one, engine, own)] == [3 * 8, 3 * 4, 3 * 4]
    assert all(has_role(spoken.prompt, PROMPTS.searcher) for spoken in own.log)
    assert not any(has_role(spoken.prompt, PROMPTS.searcher) for spoken in engine.log)
    found = {tuple(key) for e in (engine, own) for spoken in e.log for key in spoken.keys}
    assert found == {tuple(key) for spoken in one.log for key in spoken.keys}
    assert not engine.places.held and not own.places.held


def test_a_searcher_of_its_own_without_room_gives_its_cache_back():
    team = dataclasses.replace(TIGHT, row_tokens=SECOND_PROMPT + 19)
    engine, own = scripted(said(ANSWERS[0])), scripted(said(SEARCH))
    (episode,) = drive(engine, team=team, searcher=own)
    assert [row.status for row in episode.rows] == [Status.CONTEXT, Status.FINISHED]
    assert not engine.places.held and not own.places.held


# ---------------------------------------------------------------- many workflows


def test_episodes_come_in_the_order_of_the_tasks():
    """The scripted engine finishes the last submitted first."""
    questions = [dataclasses.replace(QUESTION, id=str(n)) for n in range(7)]
    tasks = [Task(q, draw=9 - n, workflow=n % 2) for n, q in enumerate(questions)]
    episodes = drive(ScriptedEngine(team_speaks, TOKENS.eos_ids), tasks, Workflow.HIERARCHY, alive=4)
    assert [Task(e.question, e.draw, e.workflow) for e in episodes] == tasks
    assert all(len(episode.rows) == 4 and episode.answers == (spelled(NOVELS[0]),) for episode in episodes)


@pytest.mark.parametrize("alive", [1, 2, 5])
def test_no_more_workflows_than_allowed_hold_caches(alive):
    holding, most = set(), 0

    def watched(question):
        nonlocal most
        steps = WORKFLOWS[Workflow.HIERARCHY](question, TEAM, PROMPTS, 5)
        reply = yield next(steps)  # all workflows are started at once; this one is in progress from here on
        holding.add(steps)
        most = max(most, len(holding))
        try:
            while True:
                request = steps.send(reply)
                if isinstance(request, SampleRequest) and request.candidates > 1:
                    holding.remove(steps)
                reply = yield request
        except StopIteration as end:
            return end.value

    engine = ScriptedEngine(team_speaks, TOKENS.eos_ids, per_step=3)
    episodes = drive(engine, 9, watched, alive=alive)
    assert all(len(episode.rows) == 8 for episode in episodes)
    assert most == alive and not engine.places.held


@pytest.mark.parametrize(
    ("workflow", "candidates", "rows", "own"),
    [
        (Workflow.CASCADE, 1, 2, False),
        (Workflow.CASCADE, 5, 6, False),
        (Workflow.HIERARCHY, 1, 4, False),
        (Workflow.HIERARCHY, 5, 8, False),
        (Workflow.SINGLE, 1, 1, False),
        (Workflow.CASCADE, 1, 2, True),
        (Workflow.HIERARCHY, 1, 4, True),
    ],
)
@pytest.mark.parametrize(("slots", "parked"), [(2, 0), (1, 1), (1, 2), (2, 3), (3, 4), (4, 2)])
def test_as_many_workflows_as_a_team_has_never_lose_a_cache(workflow, candidates, rows, own, slots, parked):
    """Nor do they wait for each other for ever, which the scripted engine refuses; `own`: the Searcher has an
    engine of its own."""
    alive = alive_workflows(RolloutConfig(conversations=slots, parked=parked), workflow, own)

    def evicted(alive: int) -> int:
        engine, other = (
            ScriptedEngine(team_speaks, TOKENS.eos_ids, slots, parked, per_step=2) for _ in range(2)
        )
        searcher = other if own else None
        episodes = drive(engine, 12, workflow, candidates, alive=alive, searcher=searcher)
        assert [len(episode.rows) for episode in episodes] == [rows] * 12
        assert not engine.places.held and not other.places.held
        return engine.evicted + other.evicted

    assert evicted(alive) == 0
    assert evicted(3 * alive) > 0


def test_a_searcher_of_its_own_lets_more_workflows_live():
    rollout = RolloutConfig(conversations=12, parked=12)
    assert [alive_workflows(rollout, Workflow.HIERARCHY, own) for own in (False, True)] == [11, 23]
    assert [alive_workflows(rollout, Workflow.CASCADE, own) for own in (False, True)] == [23, 23]


def test_searches_of_one_round_are_one_batch():
    retriever = FixedSearch()
    drive(ScriptedEngine(team_speaks, TOKENS.eos_ids, per_step=10), 4, retriever=retriever)
    assert [len(call) for call in retriever.calls] == [4]


# ---------------------------------------------------------------- searches beside the sampling


class SlowSearch(FixedSearch):
    """Answers the first batch only when it is `released`."""

    def __init__(self):
        super().__init__()
        self.out, self.released = threading.Event(), threading.Event()

    def search(self, queries, k):
        self.out.set()
        assert self.released.wait(timeout=60), "Nothing was sampled while the search was out."
        return super().search(queries, k)


@dataclasses.dataclass
class WatchedEngine(ScriptedEngine):
    """Releases the search after three more turns than there were when it went out, after the first."""

    search: SlowSearch | None = None

    def step(self):
        assert not self.log or self.search.out.wait(timeout=60)
        ended = super().step()
        if len(self.log) == 4:
            self.search.released.set()
        return ended


def test_others_are_sampled_while_a_search_is_out():
    retriever = SlowSearch()
    engine = WatchedEngine(team_speaks, TOKENS.eos_ids, per_step=1, search=retriever)
    episodes = drive(engine, 6, retriever=retriever)
    assert all(episode.searches == 1 and len(episode.rows) == 2 for episode in episodes)
    # What was asked meanwhile goes together.
    assert len(retriever.calls[0]) == 1 and len(retriever.calls[1]) >= 3
    assert sum(map(len, retriever.calls)) == 6


class WrongSearch(FixedSearch):
    """Fails in a way that no retriever should."""

    def search(self, queries, k):
        raise KeyError("no such shard")


def test_another_failure_than_that_of_a_search_ends_the_run():
    with pytest.raises(KeyError, match="no such shard"):
        drive(ScriptedEngine(team_speaks, TOKENS.eos_ids), 3, retriever=WrongSearch())


# ---------------------------------------------------------------- keys


def test_a_key_differs_wherever_anything_differs():
    base = {
        "seed": 1,
        "task": Task(QUESTION, 2, 3),
        "role": Role.LEADER,
        "session": 4,
        "turn": 5,
        "candidate": 6,
    }
    changes = [
        {"seed": 2},
        *(
            {"task": Task(dataclasses.replace(QUESTION, **{f: "9"}), 2, 3)}
            for f in ("dataset", "split", "id")
        ),
        {"task": Task(QUESTION, 3, 3)},
        {"task": Task(QUESTION, 2, 2)},
        {"role": Role.SEARCHER},
        {"role": Role.ANSWERER},
        {"session": 5},
        {"turn": 4},
        {"candidate": 5},
    ]
    found = [sampling_key(**base), *(sampling_key(**base | change) for change in changes)]
    assert len({tuple(key) for key in found}) == 1 + len(changes)
    assert all(key.shape == (2,) and key.dtype == np.uint32 for key in found)
    # The question's wording and answers are not what it is known by.
    reworded = dataclasses.replace(QUESTION, text="Who?", answers=("nobody",))
    assert sampling_key(**base | {"task": Task(reworded, 2, 3)}).tolist() == found[0].tolist()


def test_components_do_not_run_together():
    def key(dataset: str, id: str, draw: int, workflow: int) -> tuple:
        question = dataclasses.replace(QUESTION, dataset=dataset, id=id)
        return tuple(sampling_key(0, Task(question, draw, workflow), Role.LEADER, 0, 0, 0))

    assert (
        len({key("nq", "7", 1, 12), key("nq", "7", 11, 2), key("nq", "71", 1, 2), key("nq7", "", 1, 12)}) == 4
    )


def test_keys_do_not_depend_on_the_process():
    """Neither on Python's hash seed nor on its version: the value is fixed for good."""
    task = Task(Question("nq", "train", "7", "Who?", ("Ada",)), 2, 3)
    assert sampling_key(1, task, Role.SEARCHER, 4, 5, 6).tolist() == [2982924201, 588087580]


def test_turns_are_sampled_under_their_own_keys():
    engine = ScriptedEngine(team_speaks, TOKENS.eos_ids)
    drive(engine, 1, Workflow.HIERARCHY, candidates=5)
    task = Task(QUESTION, 3, 0)
    sessions = [(Role.LEADER, 0, 3), (Role.SEARCHER, 1, 2), (Role.SEARCHER, 2, 2)]
    expected = [
        sampling_key(7, task, role, s, turn, 0) for role, s, turns in sessions for turn in range(turns)
    ]
    expected += [sampling_key(7, task, Role.ANSWERER, 3, 0, candidate) for candidate in range(5)]
    found = [key for spoken in engine.log for key in spoken.keys]
    assert sorted(map(tuple, found)) == sorted(map(tuple, expected)) and len(set(map(tuple, found))) == 12


# ---------------------------------------------------------------- the real engine

REAL = dataclasses.replace(engines.TEAM, session_searches=2)


def drive_real(
    tasks: list[Task],
    workflow: Workflow | WorkflowFactory = Workflow.CASCADE,
    candidates: int = 5,
    alive: int = 6,
    seed: int = 7,
    retriever: Retriever | None = None,
    searcher: Engine | None = None,
):
    return drive(
        fresh_engine(),
        tasks,
        workflow,
        candidates,
        retriever or MiniatureSearch(WORLD.passages),
        REAL,
        alive,
        document_tokens=REAL.document_tokens,
        seed=seed,
        searcher=searcher,
    )


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    """Two draws of two questions, three workflows each."""
    questions = WORLD.questions("train")[:2]
    return [Task(question, draw, n) for question in questions for draw in range(2) for n in range(3)]


@pytest.fixture(scope="module")
def episodes(tasks):
    return drive_real(tasks)


def test_random_weights_make_sound_rows(episodes):
    rows = [row for episode in episodes for row in episode.rows]
    assert len(rows) == 12 * 6
    for row in rows:
        assert len(row.ids) == len(row.mask) == len(row.logps) <= REAL.row_tokens
        assert row.mask[-1] and not row.mask[0] and (row.logps[~row.mask] == 0).all()
        expected = score(row.ids)
        np.testing.assert_allclose(row.logps[row.mask], expected[row.mask], atol=1e-5)
    for episode in episodes:
        assert len(episode.answers) == 5 and episode.output_tokens == sum(r.mask.sum() for r in episode.rows)
        assert len({tuple(row.ids) for row in episode.rows[-5:]}) >= 3


def equal(one, two) -> bool:
    pairs = zip(one.rows, two.rows, strict=True)
    return all(
        a.status is b.status and a.ids.tobytes() == b.ids.tobytes() and a.logps.tobytes() == b.logps.tobytes()
        for a, b in pairs
    )


@pytest.mark.parametrize("alive", [6, 2])
def test_a_run_repeats_bit_for_bit_in_any_order(tasks, episodes, alive):
    again = drive_real(tasks[::-1], alive=alive)[::-1]
    assert all(map(equal, episodes, again))


class LateSearch(MiniatureSearch):
    """Answers each batch after a random time."""

    delays = random.Random(0)

    def search(self, queries, k):
        time.sleep(self.delays.random() / 50)
        return super().search(queries, k)


def always_searching(question):
    """Searches for whatever is said first: random weights never ask by themselves."""
    opening = (Message("system", PROMPTS.searcher), Message("user", question))
    (turn,) = yield SampleRequest(Role.SEARCHER, 0, opening, 12)
    documents = yield SearchRequest(f"{turn.text} {question}")
    yield SampleRequest(Role.SEARCHER, 0, (Message("user", "", documents),), 12)
    answers = yield SampleRequest(Role.ANSWERER, 1, opening, 8, 5)
    sessions = [Session(Role.SEARCHER, 0, 0, Status.FINISHED, 1, "")]
    sessions += [Session(Role.ANSWERER, 1, c, Status.FINISHED, 0, "") for c in range(5)]
    return Outcome(tuple(sessions), tuple(turn.text for turn in answers), 1)


def test_when_searches_are_answered_does_not_matter(tasks):
    at_once = drive_real(tasks, always_searching)
    late = drive_real(tasks, always_searching, retriever=LateSearch(WORLD.passages))
    assert all(map(equal, at_once, late))
    assert all(
        one.documents == two.documents and len(one.documents[0]) == 3
        for one, two in zip(at_once, late, strict=True)
    )
    assert all(episode.rows[0].turns == 2 for episode in late)


def always_working(question):
    """A Leader, its Searcher and the Answerer, who go on whatever is said."""
    opening = (Message("system", PROMPTS.searcher), Message("user", question))
    yield SampleRequest(Role.LEADER, 0, opening, 12)
    (turn,) = yield SampleRequest(Role.SEARCHER, 1, opening, 12)
    documents = yield SearchRequest(f"{turn.text} {question}")
    (turn,) = yield SampleRequest(Role.SEARCHER, 1, (Message("user", "", documents),), 12)
    yield SampleRequest(Role.LEADER, 0, (Message("user", turn.text),), 12)
    answers = yield SampleRequest(Role.ANSWERER, 2, opening, 8, 5)
    sessions = [Session(Role.LEADER, 0, 0, Status.FINISHED, 0, "")]
    sessions += [Session(Role.SEARCHER, 1, 0, Status.FINISHED, 1, "")]
    sessions += [Session(Role.ANSWERER, 2, c, Status.FINISHED, 0, "") for c in range(5)]
    return Outcome(tuple(sessions), tuple(turn.text for turn in answers), 1)


def test_a_searcher_of_its_own_with_the_same_weights_changes_no_bit(tasks):
    """With more workflows alive, one engine would lose caches, and compute them again in other bits."""
    alive = alive_workflows(engines.ROLLOUT, Workflow.HIERARCHY)
    together = drive_real(tasks, always_working, alive=alive)
    apart = drive_real(tasks, always_working, alive=alive, searcher=fresh_engine(number=1))
    assert all(map(equal, together, apart))
    for one, two in zip(together, apart, strict=True):
        assert (one.calls, one.input_tokens, one.output_tokens) == (
            two.calls,
            two.input_tokens,
            two.output_tokens,
        )
        assert one.documents == two.documents and [row.turns for row in two.rows] == [2, 2, 1, 1, 1, 1, 1]


def test_a_searcher_of_its_own_samples_from_its_own_weights(tasks):
    differences = []
    for episode in drive_real(tasks, always_working, searcher=fresh_engine(seed=1, number=1)):
        for row in episode.rows:
            seed = 1 if row.role is Role.SEARCHER else 0
            ours, others = (score(row.ids, s)[row.mask] for s in (seed, 1 - seed))
            np.testing.assert_allclose(row.logps[row.mask], ours, atol=1e-5)
            differences.append(np.abs(others - ours).max())
    assert min(differences) > 0.01


def test_draws_workflows_and_seeds_differ(tasks, episodes):
    """Some turns end at once, and are then equal."""
    for start in (0, 6):
        assert len({tuple(episode.rows[0].ids) for episode in episodes[start : start + 6]}) >= 4
    other = drive_real(tasks[:1], seed=8)
    assert not equal(other[0], episodes[0])


def test_input_tokens_are_what_the_engine_read(tasks):
    engine = fresh_engine()
    settings = {"retriever": MiniatureSearch(WORLD.passages), "team": REAL, "alive": 4}
    episodes = drive(engine, tasks, Workflow.CASCADE, candidates=1, **settings)
    usage = engine.take_usage()
    calls = sum(episode.calls for episode in episodes)
    assert sum(e.input_tokens for e in episodes) == usage.prefilled + usage.reused + calls
    assert sum(e.output_tokens for e in episodes) == usage.decoded
    assert usage.reused > usage.prefilled and calls >= 24
    engine.load(engines.params(1))  # refused while a conversation is held
