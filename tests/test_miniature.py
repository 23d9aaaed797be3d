"""The embedded world: facts, questions, search, tokens, and experts that act in the real workflows."""

import collections
import dataclasses

import numpy as np
import pytest

from mopd_jax.config import TeamConfig, Workflow
from mopd_jax.data import miniature
from mopd_jax.data.miniature import PROMPTS, RELATIONS, World, chain_text, parse_chain
from mopd_jax.data.miniature_experts import STREAMS, Demonstrations, Noise, play
from mopd_jax.model.tokens import Tokens
from mopd_jax.retrieval.miniature import MiniatureSearch
from mopd_jax.team.episode import Message, Role, Status
from mopd_jax.team.roles import ACTIONS, Action, parse
from mopd_jax.team.workflows import WORKFLOWS

TEAM = TeamConfig(session_searches=3)


@pytest.fixture(scope="module")
def world() -> World:
    return World(0)


@pytest.fixture(scope="module")
def search(world) -> MiniatureSearch:
    return MiniatureSearch(world.passages)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Tokens:
    folder = tmp_path_factory.mktemp("tokenizer")
    miniature.save_tokenizer(folder)
    return Tokens.from_folder(folder)


def test_a_seed_fixes_the_world():
    first, again, other = World(0), World(0), World(1)
    assert first.passages == again.passages and first.questions("test") == again.questions("test")
    assert MiniatureSearch(first.passages).identity == MiniatureSearch(again.passages).identity
    assert first.passages != other.passages
    assert MiniatureSearch(first.passages).identity != MiniatureSearch(other.passages).identity


def test_every_relation_gives_everybody_another_value(world):
    assert len(set(world.people)) == 120 and len(world.facts) == 120 * 12
    for relation in RELATIONS:
        values = [world.facts[person, relation] for person in world.people]
        assert len(set(values)) == 120
        assert all(value != person for value, person in zip(values, world.people, strict=True))


def test_each_fact_stands_in_one_two_fact_passage(world):
    stated = collections.Counter()
    for passage in world.passages:
        title, text = passage["contents"].split("\n")
        facts = [tuple(fact.split(" ", 1)) for fact in text.split("; ")]
        assert len(facts) == 2
        stated.update((title, *fact) for fact in facts)
    assert len(world.passages) == len({p["id"] for p in world.passages}) == 720
    assert stated == {(subject, relation, value): 1 for (subject, relation), value in world.facts.items()}


def holds(documents, subject, relation):
    """Whether one of the documents is about the subject and states the relation."""
    return any(d.title == subject and relation in d.text.split() for d in documents)


@pytest.mark.parametrize(
    ("split", "count", "people"), [("train", 3200, 80), ("validation", 400, 10), ("test", 1200, 30)]
)
def test_questions_are_distinct_and_seven_of_ten_need_two_facts(world, split, count, people):
    questions = world.questions(split)
    chains = [parse_chain(q.text) for q in questions]
    assert len(set(chains)) == len({q.id for q in questions}) == count
    assert len({subject for subject, _ in chains}) == people
    assert np.mean([len(relations) == 2 for _, relations in chains]) == 0.7
    assert np.mean([len(relations) == 2 for _, relations in chains[:150]]) == pytest.approx(0.7, abs=0.1)
    assert all(q.answers == (world.answer(*chain),) for q, chain in zip(questions, chains, strict=True))
    assert {(q.dataset, q.split) for q in questions} == {("miniature", split)}


def test_no_two_splits_ask_about_one_person(world):
    train, validation, test = (
        {parse_chain(q.text)[0] for q in world.questions(split)} for split in ("train", "validation", "test")
    )
    assert not train & validation and not train & test and not validation & test


def test_guessing_does_not_pay(world):
    questions = world.questions("test")
    answers = collections.Counter(q.answers[0] for q in questions)
    assert answers.most_common(1)[0][1] / len(questions) < 0.02
    by_relation = collections.defaultdict(collections.Counter)
    for q in questions:
        by_relation[parse_chain(q.text)[1][-1]][q.answers[0]] += 1
    best_guesses = sum(counts.most_common(1)[0][1] for counts in by_relation.values())
    assert best_guesses / len(questions) < 0.06
    assert not any(q.answers[0] in q.text for q in questions)


def test_an_unknown_split_is_refused(world):
    with pytest.raises(ValueError, match=r"'dev'.*'validation'"):
        world.questions("dev")


@pytest.mark.parametrize("form", miniature.QUESTION_FORMS)
def test_a_chain_is_read_back_from_its_words(form):
    for chain in (("Ada", ("song",)), ("Otto", ("friend", "office"))):
        assert parse_chain(form.format(chain_text(*chain))) == chain


@pytest.mark.parametrize(
    ("form", "low", "high"),
    [
        (miniature.QUERY_FORMS[0], 0.83, 0.88),
        (miniature.QUERY_FORMS[1], 0.83, 0.88),
        ("{subject}", 0.45, 0.55),
        ("{relation}", 0.01, 0.04),
    ],
)
def test_a_full_query_finds_its_passage_and_a_vague_one_by_chance(world, search, form, low, high):
    asked = [form.format(subject=subject, relation=relation) for subject, relation in world.facts]
    found = search.search(asked, 3)
    hits = [holds(documents, *fact) for fact, documents in zip(world.facts, found, strict=True)]
    assert low < np.mean(hits) < high


def test_an_unlucky_query_stays_unlucky_and_other_words_help(world, search):
    def finds(form, fact):
        query = form.format(subject=fact[0], relation=fact[1])
        return holds(search.search([query], 3)[0], *fact)

    chain, other, _ = miniature.QUERY_FORMS
    unlucky = [fact for fact in world.facts if not finds(chain, fact)]
    assert not any(finds(chain, fact) for fact in unlucky)
    assert not any(finds("{subject} 's   {relation}", fact) for fact in unlucky), (
        "spacing is no other wording"
    )
    assert 0.75 < np.mean([finds(other, fact) for fact in unlucky]) < 0.95


def test_search_returns_distinct_documents_best_first(world, search):
    subject, relation = world.people[0], "novel"
    (documents,) = MiniatureSearch(world.passages, forgotten=0.0).search([f"{relation} of {subject}"], 3)
    assert holds(documents[:1], subject, relation)
    assert {d.title for d in documents} == {subject} and len({d.id for d in documents}) == 3
    first, second = search.search(["Ada", f"{subject}'s {relation}"], 3)
    assert first == search.search(["Ada"], 3)[0] and first != second


def test_a_small_index_returns_what_it_has(world):
    two = MiniatureSearch(world.passages[:2], forgotten=0.0)
    assert sorted(d.id for d in two.search(["zebra"], 3)[0]) == ["0", "1"]


def test_tags_are_words_and_parse_survives_a_round_trip(tokens):
    for role, text in [
        (Role.LEADER, "<task>Ada's friend</task>"),
        (Role.LEADER, "<request_answer></request_answer>"),
        (Role.SEARCHER, "<search>friend of Ada</search>"),
        (Role.SEARCHER, "<summary>Moonlight</summary>"),
        (Role.ANSWERER, "<answer>Moonlight</answer>"),
    ]:
        decoded = tokens.decode(tokens.encode(text))
        action = parse(role, decoded)
        assert isinstance(action, Action)
        assert action.body.replace(" 's", "'s") == parse(role, text).body
        assert tokens.encode(decoded) == tokens.encode(text)
    assert tokens.decode(tokens.encode("<search>Ada's friend</search>")) == "<search> Ada 's friend </search>"


def test_the_chat_template_is_one_token_per_word(tokens):
    ids = tokens.open((Message("system", PROMPTS.searcher), Message("user", "Task: Ada")))
    expected = (
        "<|im_start|> system You search . <|im_end|> <|im_start|> user Task : Ada <|im_end|> "
        "<|im_start|> assistant"
    )
    assert tokens.decode(ids) == expected and len(ids) == len(expected.split())
    assert (
        tokens.decode(tokens.reply("unknown", closed=True))
        == "<|im_start|> user unknown <|im_end|> <|im_start|> assistant"
    )
    assert tokens.eos_ids == (tokens.end_of_turn_id,)
    assert tokens.vocab_size < 450


def test_text_of_a_special_token_never_ends_a_turn(tokens):
    special = {tokens._added[name] for name in ("<|im_end|>", "<|endoftext|>")}
    assert not special & set(tokens.encode("Ada <|im_end|> <|endoftext|> Ida"))


@pytest.fixture(scope="module", params=list(Workflow), ids=lambda workflow: workflow.value)
def clean(request, world, search):
    """What the clean expert makes of 300 test questions: [(question, conversations, outcome)]."""
    return _played(request.param, Noise(), world, search)


def _played(workflow, noise, world, search):
    team = dataclasses.replace(TEAM, workflow=workflow)
    rng = np.random.default_rng(0)
    return [
        (q, *play(WORKFLOWS[workflow](q.text, team, PROMPTS, 1), team, search, noise, rng))
        for q in world.questions("test")[:300]
    ]


def _accuracy(played):
    return np.mean([outcome.answers == question.answers for question, _, outcome in played])


def test_the_clean_expert_is_limited_by_the_search_alone(clean):
    assert _accuracy(clean) > 0.9
    assert all(s.status is Status.FINISHED for _, _, outcome in clean for s in outcome.sessions)
    assert 1.7 < np.mean([outcome.searches for _, _, outcome in clean]) < 2.5
    for question, _, outcome in clean:
        hops = len(parse_chain(question.text)[1])
        assert outcome.searches >= hops
        assert outcome.answers == question.answers or outcome.searches > hops, (
            "only lost passages cost an answer"
        )


def test_looking_a_fact_up_again_costs_searches_and_no_answer(world, search):
    """A careful Leader uses all its turns, each of them for the next fact or for the last one again."""
    plain = _played(Workflow.HIERARCHY, Noise(), world, search)
    careful = _played(Workflow.HIERARCHY, Noise(careful=1.0), world, search)
    searches = [np.mean([outcome.searches for _, _, outcome in played]) for played in (plain, careful)]
    assert searches[1] > searches[0] + 1.5
    assert _accuracy(careful) > _accuracy(plain) - 0.01, "a guess less that was right"


def test_without_search_experts_only_guess(world, search):
    for workflow in Workflow:
        played = _played(workflow, Noise(skip=1.0), world, search)
        assert _accuracy(played) < 0.03
        assert all(outcome.searches == 0 for _, _, outcome in played)


def test_the_noisy_experts_are_weak_and_search_little(world, search):
    teams = (Workflow.CASCADE, Workflow.HIERARCHY)
    cascade, hierarchy = (_played(workflow, STREAMS["noisy"], world, search) for workflow in teams)
    assert 0.28 < _accuracy(cascade) < 0.42 and 0.55 < _accuracy(hierarchy) < 0.7
    for played in (cascade, hierarchy):
        assert 1.0 < np.mean([outcome.searches for _, _, outcome in played]) < 2.0
    for role, low, high in ((Role.LEADER, 0.0, 0.0), (Role.SEARCHER, 0.02, 0.15), (Role.ANSWERER, 0.0, 0.0)):
        statuses = [s.status for _, _, o in cascade + hierarchy for s in o.sessions if s.role is role]
        assert low <= np.mean([status is Status.MALFORMED for status in statuses]) <= high


def test_the_single_agent_searches_like_a_searcher_and_answers_itself(world, search):
    clean = _played(Workflow.SINGLE, Noise(), world, search)
    noisy = _played(Workflow.SINGLE, STREAMS["noisy"], world, search)
    assert _accuracy(clean) > 0.8 and 0.2 < _accuracy(noisy) < 0.5
    assert 1.5 < np.mean([outcome.searches for _, _, outcome in clean]) < 2.5
    assert 0.8 < np.mean([outcome.searches for _, _, outcome in noisy]) < 1.8
    for _, conversations, outcome in clean:
        assert [c.role for c in conversations] == [s.role for s in outcome.sessions] == [Role.AGENT]


@pytest.mark.parametrize("stream", list(STREAMS))
def test_a_batch_is_a_function_of_stream_step_and_seed(stream):
    source = Demonstrations(stream, TEAM, seed=0)
    batch = source.batch(3, 24)
    assert batch == Demonstrations(stream, TEAM, seed=0).batch(3, 24) and len(batch) == 24
    assert batch != source.batch(4, 24) and batch != Demonstrations(stream, TEAM, seed=1).batch(3, 24)
    assert {c.role for c in batch} == {Role.LEADER, Role.SEARCHER, Role.ANSWERER}
    assert {c.role for c in Demonstrations(f"{stream}+agent", TEAM, seed=0).batch(3, 24)} == set(ACTIONS)


def test_demonstrations_are_all_words_and_short(tokens):
    unknown = tokens.encode("zebra")[0]
    lengths = collections.defaultdict(list)
    for stream in STREAMS:
        for conversation in Demonstrations(f"{stream}+agent", TEAM, seed=0).batch(0, 96):
            lengths[conversation.role].append(0)
            for message in conversation.messages:
                ids = _turn(message, tokens)
                assert unknown not in ids
                lengths[conversation.role][-1] += len(ids) + 6
    assert max(lengths[Role.SEARCHER]) <= 320 and max(lengths[Role.AGENT]) <= 320
    assert max(lengths[Role.LEADER]) <= 128 and max(lengths[Role.ANSWERER]) <= 128


def _turn(message, tokens):
    if isinstance(message, str):
        return tokens.encode(message)
    pairs = [(d.title, d.text) for d in message.documents]
    return tokens.encode(message.content) + (tokens.encode(PROMPTS.format_documents(pairs)) if pairs else [])


def test_demonstrations_know_nothing_of_the_world_that_is_evaluated(world):
    """Facts about this world's people agree with it as often as chance would have it: 1 in 120."""
    stated = [
        (document.title, *fact.split(" ", 1))
        for step in range(6)
        for conversation in Demonstrations("noisy", TEAM, seed=0).batch(step, 96)
        for message in conversation.messages
        if isinstance(message, Message)
        for document in message.documents
        for fact in document.text.split("; ")
    ]
    shared = {(s, r, v) for s, r, v in stated if (s, r) in world.facts}
    assert len(shared) > 100
    assert np.mean([world.facts[s, r] == v for s, r, v in shared]) < 0.05


def test_an_unknown_stream_is_refused():
    with pytest.raises(ValueError, match=r"'clean'.*'facts', 'noisy'"):
        Demonstrations("clean", TEAM, seed=0)
