"""Demonstrations as rows: what is learnt of them, and what is refused; what a step reports of itself."""

import dataclasses

import numpy as np
import pytest

from mopd_jax.config import Config, LearnConfig, TeamConfig, TrainConfig
from mopd_jax.data import miniature
from mopd_jax.data.demonstrations import Conversation, FileDemonstrations
from mopd_jax.learn.streams import pack_rows, twin_keys
from mopd_jax.retrieval.search import Document
from mopd_jax.rollout.driver import Driver, Task
from mopd_jax.rollout.render import Renderer
from mopd_jax.run.metrics import Stopwatch
from mopd_jax.run.sources import Imitation, LearnerBatch, decoded, render, speed
from mopd_jax.team.episode import Message, Role, Status
from mopd_jax.team.workflows import cascade
from tests import engines
from tests.engines import ScriptedEngine, script
from tests.fakes import make_episode, make_question, make_row

TOKENS, PROMPTS, WORLD = engines.tokens(), miniature.PROMPTS, miniature.World(0)
EOT = TOKENS.end_of_turn_id
RENDERER = Renderer(TOKENS, PROMPTS, document_tokens=24)
DOCUMENTS = tuple(Document(p["id"], p["contents"]) for p in WORLD.passages[:3])
QUESTION = "What is Ada's friend's novel?"
OPENING = (Message("system", PROMPTS.searcher), Message("user", PROMPTS.to_searcher(QUESTION)))
FOUND = Message("user", "", DOCUMENTS)
LAST = Message("user", PROMPTS.ask_summary, DOCUMENTS)
TURNS = ("<search>Ada's friend</search>", "<search>novel of Ida</search>", "<summary>Moonlight</summary>")
SEARCHER = Conversation(Role.SEARCHER, (*OPENING, TURNS[0], FOUND, TURNS[1], LAST, TURNS[2]))
NOTES = Message("user", PROMPTS.to_answerer(QUESTION, [(QUESTION, "Moonlight")]))
ANSWERER = Conversation(
    Role.ANSWERER, (Message("system", PROMPTS.answerer), NOTES, "<answer>Moonlight</answer>")
)


def turn(text: str) -> list[int]:
    return [*TOKENS.encode(text), EOT]


# ---------------------------------------------------------------- rows


def test_only_the_assistants_tokens_and_their_ends_are_learnt():
    pieces = [
        (RENDERER.open(OPENING), False),
        (turn(TURNS[0]), True),
        (RENDERER.reply(FOUND, closed=True), False),
        (turn(TURNS[1]), True),
        (RENDERER.reply(LAST, closed=True), False),
        (turn(TURNS[2]), True),
    ]
    row = render(SEARCHER, RENDERER, TOKENS)
    assert row.ids.tolist() == [i for ids, _ in pieces for i in ids]
    assert row.mask.tolist() == [learnt for ids, learnt in pieces for _ in ids]
    assert (row.role, row.status) == (Role.SEARCHER, Status.FINISHED)
    assert (row.ids.dtype, row.mask.dtype) == (np.int32, bool)
    assert row.ids[row.mask].tolist().count(EOT) == len(TURNS)
    assert not row.logps.any(), "nobody sampled it"


def test_documents_are_framed_and_shortened_as_in_a_rollout():
    row = render(SEARCHER, RENDERER, TOKENS)
    block = RENDERER.documents(DOCUMENTS)
    assert (
        TOKENS.count(block)
        <= 24
        < TOKENS.count(PROMPTS.format_documents([(d.title, d.text) for d in DOCUMENTS]))
    )
    prompts = TOKENS.decode(row.ids[~row.mask])
    assert prompts.count(TOKENS.decode(TOKENS.encode(block))) == 2


def test_a_conversation_without_a_system_message_is_rendered_too():
    row = render(Conversation(Role.LEADER, (Message("user", "Ada"), "Ida")), RENDERER, TOKENS)
    opening = TOKENS.open([Message("user", "Ada")])
    assert row.ids.tolist() == opening + turn("Ida")
    assert row.mask.tolist() == [False] * len(opening) + [True] * 2


def test_text_that_spells_a_special_token_ends_no_turn():
    row = render(Conversation(Role.LEADER, (Message("user", "Ada"), "Ida <|im_end|> Ida")), RENDERER, TOKENS)
    assert row.ids[row.mask].tolist().count(EOT) == 1 and row.ids[-1] == EOT


class FixedSearch:
    """Finds the same documents for every query."""

    identity = "fixed"

    def search(self, queries, k):
        return [DOCUMENTS[:k] for _ in queries]


def test_a_demonstration_is_the_row_that_a_rollout_of_it_gives():
    said = [turn(text) for text in (*TURNS, "<answer>Moonlight</answer>")]
    driver = Driver(
        ScriptedEngine(script(*said), TOKENS.eos_ids),
        FixedSearch(),
        RENDERER,
        TOKENS,
        k=3,
        row_tokens=400,
        alive=1,
        seed=0,
    )
    question = dataclasses.replace(make_question(), text=QUESTION)
    team = TeamConfig(session_searches=2)
    (episode,) = driver.run(lambda text: cascade(text, team, PROMPTS, 1), [Task(question, 0, 0)])
    for sampled, conversation in zip(episode.rows, (SEARCHER, ANSWERER), strict=True):
        shown = render(conversation, RENDERER, TOKENS)
        assert shown.ids.tolist() == sampled.ids.tolist()
        assert shown.mask.tolist() == sampled.mask.tolist()
        assert (shown.role, shown.status) == (sampled.role, sampled.status)


# ---------------------------------------------------------------- batches of imitation


LENGTHS = [len(render(c, RENDERER, TOKENS).ids) for c in (SEARCHER, ANSWERER)]


def imitation(*conversations: Conversation, longest: int = max(LENGTHS)) -> Imitation:
    learn = LearnConfig(row_buckets=(min(LENGTHS), longest), micro_batch_tokens=4 * longest)
    config = Config(learn=learn, train=TrainConfig(questions=2))
    return Imitation(config, FileDemonstrations(conversations, 0), RENDERER, TOKENS, shards=1)


def test_a_conversation_too_long_for_every_row_is_refused_before_the_first_step():
    longest = max(LENGTHS) - 1
    refusal = (
        rf"Conversation 2 of data\.demonstrations \(searcher\) has {LENGTHS[0]} tokens, the longest of "
        rf"learn\.row_buckets holds {longest}"
    )
    with pytest.raises(ValueError, match=refusal):
        imitation(ANSWERER, SEARCHER, longest=longest)


def test_a_batch_holds_its_conversations_with_equal_weight_for_every_learnt_token():
    batch = imitation(ANSWERER, SEARCHER).batch(0, params=None, watch=Stopwatch())
    assert sorted(row.role.value for row in batch.rows) == ["answerer", "searcher"]
    learnt = sum(int(row.mask.sum()) for row in batch.rows)
    weights = np.concatenate([np.ravel(streams.weight) for streams in batch.streams])
    assert np.count_nonzero(weights) == learnt == sum(len(turn(t)) for t in (*TURNS, ANSWERER.messages[-1]))
    np.testing.assert_allclose(weights[weights > 0], 1 / learnt, rtol=1e-6)
    advantages = np.concatenate([np.ravel(streams.advantage) for streams in batch.streams])
    assert (advantages[weights > 0] == 1).all()
    targets = np.concatenate([np.ravel(micro.targets) for micro in batch.packed.batch.micros])
    expected = np.concatenate([row.ids[row.mask] for row in batch.rows])
    assert sorted(targets[weights > 0]) == sorted(expected)


def test_a_step_alone_decides_its_batch():
    def drawn(source: Imitation, step: int) -> list[list[int]]:
        return [row.ids.tolist() for row in source.batch(step, None, Stopwatch()).rows]

    others = [
        Conversation(Role.LEADER, (Message("user", name), "<task>Ada</task>")) for name in WORLD.people[:6]
    ]
    source, again = imitation(*others), imitation(*others)
    epoch = [drawn(source, step) for step in range(3)]
    assert drawn(again, 2) == epoch[2] and drawn(again, 0) == epoch[0]
    assert len({tuple(ids) for step in epoch for ids in step}) == 6, "an epoch shows each of them once"


# ---------------------------------------------------------------- what a step says of itself


def test_a_row_is_shown_as_spans_of_prompt_and_output():
    title, spans = decoded(render(SEARCHER, RENDERER, TOKENS), TOKENS)
    assert title == "searcher, finished"
    assert [generated for _, generated in spans] == [False, True] * 3
    outputs = [text for text, generated in spans if generated]
    assert outputs == [TOKENS.decode(turn(text)) for text in TURNS]
    assert spans[2][0] == TOKENS.decode(RENDERER.reply(FOUND, closed=True))


def test_a_row_of_one_span_is_shown_whole():
    row = make_row(Role.LEADER, status=Status.CONTEXT, mask=(0, 0, 0))
    assert decoded(row, TOKENS) == ("leader, truncated: context", [(TOKENS.decode([0, 1, 2]), False)])


def test_speed_counts_sampled_tokens_in_rollouts_and_packed_ones_in_training():
    rows = [
        make_row(Role.LEADER, mask=(0, 0, 1, 1)),
        make_row(Role.ANSWERER, mask=(0, 1)),
        make_row(Role.ANSWERER, mask=(0, 1), candidate=1),
    ]
    packed = pack_rows(rows, LearnConfig(row_buckets=(8,)), 1, twin_keys([make_episode(*rows)]))
    batch = LearnerBatch(rows, packed, streams=[])
    assert speed(batch, {"rollout": 0.5, "score": 2.0, "update": 3.0, "eval": 7.0}) == {
        "seconds/rollout": 0.5,
        "seconds/score": 2.0,
        "seconds/update": 3.0,
        "seconds/eval": 7.0,
        "tokens_per_s/rollout": 8.0,
        "tokens_per_s/score": 3.0,
        "tokens_per_s/update": 2.0,
    }
    assert speed(batch, {"data": 0.5, "update": 1.0}) == {
        "seconds/data": 0.5,
        "seconds/update": 1.0,
        "tokens_per_s/update": 6.0,
    }
