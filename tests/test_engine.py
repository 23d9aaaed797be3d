"""The engine on a tiny model: what it samples, what it keeps, and that nobody's neighbours matter."""

import dataclasses
import gc
import math

import jax
import numpy as np
import pytest

from mopd_jax.rollout.engine import Engine, Ticket, Usage
from mopd_jax.rollout.places import Conversation
from mopd_jax.team.episode import Stop
from tests.engines import (
    CANDIDATES,
    TEAM,
    ask,
    engine_like,
    finish,
    finished_turns,
    fresh_engine,
    keys,
    params,
    prompt,
    score,
    tokens,
)

EOS = tokens().end_of_turn_id


@pytest.fixture
def engine() -> Engine:
    """Four slots of one candidate with three parking places, two of five; prefill of 3 rows × 8 tokens, up
    to 4 decode steps."""
    return fresh_engine()


def sample(engine: Engine, ids, number: int, max_tokens: int = 12):
    """Returns the one turn of a conversation of its own, which is released."""
    conversation = ask(engine, ids, number, max_tokens)
    (turn,) = finish(engine)[id(conversation)]
    engine.release(conversation)
    return turn


def say(engine: Engine, conversation: Conversation, number: int, *message: int):
    """Continues a conversation by a message; returns its next turn."""
    conversation.ids += message
    ask(engine, conversation, number)
    return finish(engine)[id(conversation)][0]


def same(a, b) -> bool:
    """Whether two samples are equal bit by bit."""
    return a.ids.tolist() == b.ids.tolist() and a.logps.tobytes() == b.logps.tobytes() and a.stop == b.stop


def assert_scored(ids, spans, seed: int = 0) -> None:
    """Checks (start, log-probs) of sampled stretches against the learner's pass over the whole row."""
    expected = score(ids, seed)
    for first, logps in spans:
        np.testing.assert_allclose(logps, expected[first : first + len(logps)], atol=1e-5)


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("length", [1, 2, 8, 9, 10, 30])
def test_logps_of_prompts_within_and_over_one_prefill_call(engine, length):
    ids = prompt(length, length)
    turn = sample(engine, ids, 1)
    assert turn.logps.dtype == np.float32 and turn.ids.dtype == np.int32 and np.ptp(turn.logps) > 0.1
    assert_scored(ids + turn.ids.tolist(), [(length, turn.logps)])
    assert engine.take_usage().prefilled == length - 1


def test_logps_of_a_conversation_of_four_turns(engine):
    conversation, spans, prefilled = Conversation(prompt(3, 11)), [], 10
    for number in range(4):
        turn = say(engine, conversation, number)
        spans.append((len(conversation.ids) - len(turn.ids), turn.logps))
        message = prompt(10 + number, (1, 2, 19, 3)[number])
        conversation.ids += message
        prefilled += len(message) if number < 3 else 0
    engine.release(conversation)
    assert_scored(conversation.ids, spans)
    # The last token of each prompt is decoded and not prefilled, and the last sampled one the reverse.
    assert engine.take_usage().prefilled == prefilled


def test_logps_of_five_candidates_and_their_one_prefill(engine):
    ids = prompt(4, 20)
    conversation = ask(engine, ids, 5, max_tokens=8, candidates=CANDIDATES)
    turns = finish(engine)[id(conversation)]
    assert len({tuple(turn.ids.tolist()) for turn in turns}) == CANDIDATES
    for turn in turns:
        assert_scored(ids + turn.ids.tolist(), [(20, turn.logps)])
    usage = engine.take_usage()
    assert (usage.prefilled, usage.reused) == (19, 0)
    assert usage.decoded == sum(len(turn.ids) for turn in turns)
    assert conversation.group is None


def test_logps_after_taking_over_a_prefix(engine):
    """The prefix of a held conversation is copied, that of a released one is continued in place."""
    shared = prompt(5, 13)
    held = ask(engine, shared + prompt(6, 4), 0)
    finish(engine)
    engine.take_usage()
    second = ask(engine, shared + prompt(7, 6), 1)
    (turn,) = finish(engine)[id(second)]
    assert_scored(second.ids, [(19, turn.logps)])
    assert dataclasses.replace(engine.take_usage(), decoded=0, slot_steps=0) == Usage(prefilled=5, reused=13)
    kept, group = second.ids[:19], second.group
    engine.release(second)
    third = ask(engine, kept + prompt(8, 3), 2)
    (turn,) = finish(engine)[id(third)]
    assert third.group == group
    assert_scored(third.ids, [(22, turn.logps)])
    # All but the last token of the second's prompt was prefilled.
    assert dataclasses.replace(engine.take_usage(), decoded=0, slot_steps=0) == Usage(prefilled=3, reused=18)
    turn = say(engine, held, 3, *prompt(9, 4))
    assert_scored(held.ids, [(len(held.ids) - len(turn.ids), turn.logps)])
    engine.release(held)
    engine.release(third)


# ---------------------------------------------------------------- bit for bit

REQUESTS = {number: prompt(100 + number // 3, 6 + 2 * (number // 3)) for number in range(9)}
"""Nine requests: three prompts, three keys each."""


@pytest.fixture(scope="module")
def alone() -> dict:
    """Each request without neighbours or cached prefixes."""
    return {number: sample(fresh_engine(), ids, number) for number, ids in REQUESTS.items()}


@pytest.mark.parametrize("order", [range(9), range(8, -1, -1), (4, 0, 8, 2, 6, 1, 3, 7, 5)])
def test_order_slots_neighbours_and_reuse_do_not_matter(engine, alone, order):
    asked = {number: ask(engine, REQUESTS[number], number) for number in order}
    traffic = [ask(engine, prompt(200 + i, 12), i, 8, CANDIDATES) for i in range(3)]
    samples = {}
    for ticket, (turn, *_) in finished_turns(engine):  # nine conversations on four groups
        samples[id(ticket.conversation)] = turn
        engine.release(ticket.conversation)
    assert len(samples) == len(asked) + len(traffic)
    assert all(same(samples[id(conversation)], alone[number]) for number, conversation in asked.items())
    assert engine.take_usage().reused > 0


def test_keys_make_the_difference(alone):
    for first in (0, 3, 6):
        assert len({tuple(alone[number].ids.tolist()) for number in range(first, first + 3)}) == 3


def test_another_prompt_under_the_same_key_differs(engine):
    assert not same(sample(engine, prompt(1, 9), 5), sample(engine, prompt(2, 9), 5))


def test_every_slot_gives_the_same(engine):
    conversations = [ask(engine, prompt(1, 9), 5) for _ in range(4)]
    turns = [samples[0] for samples in finish(engine).values()]
    assert sorted(c.group for c in conversations) == [0, 1, 2, 3]
    assert all(same(turn, turns[0]) for turn in turns)
    for conversation in conversations:
        engine.release(conversation)


def test_a_conversation_does_not_depend_on_its_neighbours(engine):
    def talk(neighbours: int) -> list:
        others = [ask(engine, prompt(50 + i, 7 + 5 * i), 50 + i) for i in range(neighbours)]
        conversation = Conversation(prompt(30, 10))
        turns = [say(engine, conversation, number, *prompt(40 + number, number)) for number in range(3)]
        for other in [*others, conversation]:
            engine.release(other)
        return turns

    alone, crowded = talk(0), talk(3)
    assert len(alone) == 3 and all(map(same, alone, crowded))


def test_candidates_do_not_depend_on_other_groups_or_reuse(engine):
    def answers(*before: int) -> list:
        for number in before:
            ask(engine, prompt(60, 14)[:8] + prompt(number, 5), number, 8, CANDIDATES)
        conversation = ask(engine, prompt(60, 14), 9, 8, CANDIDATES)
        return finish(engine)[id(conversation)]

    cold, warm, crowded = answers(), answers(), answers(1, 2, 3)
    assert engine.take_usage().reused >= 13
    assert all(map(same, cold, warm)) and all(map(same, cold, crowded))


def test_a_parked_conversation_goes_on_bit_for_bit(engine):
    """It gives its slot to others between its turns, and comes back from a parking place to any slot."""

    def talk(others: int) -> tuple[list, list]:
        conversation, turns, groups = Conversation(prompt(30, 10)), [], []
        for number in range(4):
            turns.append(say(engine, conversation, number, *prompt(40 + number, 5 * number)))
            groups.append(conversation.group)
            neighbours = [ask(engine, prompt(50 + i, 7 + 5 * i), 50 + i) for i in range(others)]
            finish(engine)
            groups.append(conversation.group)
            for neighbour in neighbours[::-1] if number % 2 else neighbours:
                engine.release(neighbour)
        engine.release(conversation)
        return turns, groups

    alone, stayed = talk(0)
    assert stayed == [stayed[0]] * 8 and stayed[0] < 4
    engine.take_usage()
    parked, moved = talk(4)
    assert all(map(same, alone, parked))
    assert max(moved[::2]) < 4 <= min(moved[1::2]) and len(set(moved[::2])) > 1
    usage = engine.take_usage()
    assert usage.evicted == 0 and usage.reused > 0


def test_without_parking_places_the_same_conversations_are_the_same_bit_for_bit(engine):
    """Two conversations that never leave their slots, against the same two among four others."""
    calm = engine_like((("parked", 0),))
    calm.load(params())

    def talk(engine: Engine, others: int) -> list:
        pair, turns = [Conversation(prompt(80 + i, 9)) for i in range(2)], []
        for number in range(6):
            turns.append(say(engine, pair[number % 2], number, *prompt(90 + number, 3)))
            neighbours = [ask(engine, prompt(60 + i, 8), i) for i in range(others)]
            finish(engine)
            parked.append(max(c.group for c in pair if c.group is not None))
            for neighbour in neighbours:
                engine.release(neighbour)
        for conversation in pair:
            engine.release(conversation)
        return turns

    parked: list[int] = []
    quiet = talk(calm, 0)
    assert max(parked) < 4
    calm.unload()
    parked.clear()
    assert all(map(same, quiet, talk(engine, 4))) and min(parked) >= 4
    assert engine.take_usage().evicted == 0


@pytest.mark.parametrize(("changes", "tensor"), [((("conversations", 2), ("parked", 2)), 1), ((), 2)])
def test_other_slot_counts_and_meshes_agree_up_to_rounding(changes, tensor):
    """What another engine sampled, scored again in one pass over the whole row."""
    other = engine_like(changes, tensor)
    other.load(params())
    talking = [Conversation(prompt(70 + i, 6 + 3 * i)) for i in range(3)]
    spans = {id(conversation): [] for conversation in talking}
    for number in range(2):
        for i, conversation in enumerate(talking):
            turn = say(other, conversation, 10 * number + i)
            spans[id(conversation)].append((len(conversation.ids) - len(turn.ids), turn.logps))
            conversation.ids += prompt(20 + i, 2)
    for conversation in talking:
        other.release(conversation)
        expected = score(conversation.ids)
        for first, logps in spans[id(conversation)]:
            np.testing.assert_allclose(logps, expected[first : first + len(logps)], rtol=1e-5, atol=1e-5)
    assert other.take_usage().evicted == 0
    other.unload()


# ---------------------------------------------------------------- how turns end


@pytest.fixture(scope="module")
def ended():
    """(number, sample) of a turn that ended by itself with its fourth to eleventh token."""
    for number in range(300, 340):
        turn = sample(fresh_engine(), prompt(9, 7), number)
        if turn.stop is Stop.END and 4 <= len(turn.ids) < 12:
            return number, turn
    raise AssertionError("No turn ended by itself: other weights are needed.")


def test_an_ended_turn_keeps_its_end_token(ended):
    _, turn = ended
    assert turn.ids[-1] == EOS and EOS not in turn.ids[:-1] and len(turn.logps) == len(turn.ids)


def test_the_end_may_fall_on_the_last_allowed_token(engine, ended):
    number, turn = ended
    assert same(sample(engine, prompt(9, 7), number, len(turn.ids)), turn)


def test_the_limit_cuts(engine, ended):
    number, turn = ended
    for limit in (1, len(turn.ids) - 1):
        cut = sample(engine, prompt(9, 7), number, limit)
        assert cut.stop is Stop.LENGTH and cut.ids.tolist() == turn.ids[:limit].tolist()
        assert cut.logps.tobytes() == turn.logps[:limit].tobytes()


def test_limits_are_each_ticket_s_own(engine):
    limits = [3, 12, 1, 7]
    conversations = [ask(engine, prompt(i, 5), i, limit) for i, limit in enumerate(limits)]
    samples = finish(engine)
    for conversation, limit in zip(conversations, limits, strict=True):
        (turn,) = samples[id(conversation)]
        assert len(turn.ids) <= limit
        assert (turn.stop is Stop.END) == (turn.ids[-1] == EOS)
        assert turn.stop is Stop.END or len(turn.ids) == limit
        engine.release(conversation)


# ---------------------------------------------------------------- groups


def test_more_requests_than_groups_all_finish(engine):
    asked = [ask(engine, prompt(i, 4 + i), i, candidates=1) for i in range(11)]
    answers = [ask(engine, prompt(i, 4 + i), i, 8, CANDIDATES) for i in range(5)]
    finished = set()
    for ticket, samples in finished_turns(engine):
        finished.add(id(ticket.conversation))
        assert sum(c.group is not None for c in asked) <= 4
        assert len(samples) == len(ticket.keys)
        engine.release(ticket.conversation)
    assert finished == {id(c) for c in asked + answers}


def test_a_waiting_conversation_keeps_its_cache_whoever_comes(engine):
    waiting = ask(engine, prompt(0, 9), 0)
    finish(engine)
    for number in range(1, 9):
        sample(engine, prompt(number, 9), number)
    engine.take_usage()
    turn = say(engine, waiting, 9, *prompt(20, 3))
    assert dataclasses.replace(engine.take_usage(), decoded=0, slot_steps=0, reused=0) == Usage(prefilled=3)
    assert_scored(waiting.ids, [(len(waiting.ids) - len(turn.ids), turn.logps)])
    engine.release(waiting)


def test_who_lost_the_cache_is_prefilled_again(engine):
    """Seven groups for eight conversations: the first to have spoken gives way, and nobody waits."""
    talking = [Conversation(prompt(i, 6)) for i in range(8)]
    for number, conversation in enumerate(talking):
        say(engine, conversation, number)
    assert sorted(c.group for c in talking[1:]) == list(range(7)) and talking[0].group is None
    assert engine.take_usage().evicted == 1
    turn = say(engine, talking[0], 9, *prompt(20, 2))
    assert_scored(talking[0].ids, [(len(talking[0].ids) - len(turn.ids), turn.logps)])
    usage = engine.take_usage()
    assert usage.evicted == 1 and usage.prefilled + usage.reused == len(talking[0].ids) - len(turn.ids) - 1
    for conversation in talking:
        engine.release(conversation)
        engine.release(conversation)  # frees nothing twice
    assert all(c.group is None for c in talking)


def test_answers_wait_until_there_is_one_for_every_slot(engine):
    """They end their workflows: nobody waits for them."""
    number = next(n for n in range(300, 340) if len(sample(fresh_engine(), prompt(1, 6), n).ids) == 12)
    engine.take_usage()
    talking = ask(engine, prompt(1, 6), number)
    first = ask(engine, prompt(2, 6), 2, 8, CANDIDATES)
    assert engine.step() == []
    assert engine.take_usage().slot_steps == 4 * 4, "the conversation alone"
    second = ask(engine, prompt(3, 6), 3, 8, CANDIDATES)
    answered = {id(ticket.conversation) for ticket, _ in engine.step()}
    assert engine.take_usage().slot_steps - 4 * 4 in (10, 20, 30, 40), "both lanes"
    answered |= finish(engine).keys()
    assert answered == {id(talking), id(first), id(second)}
    engine.release(talking)
    alone = ask(engine, prompt(2, 6), 2, 8, CANDIDATES)
    assert len(finish(engine)[id(alone)]) == CANDIDATES, "nothing else to do"


def test_a_conversation_may_end_in_an_answer_request(engine):
    """It leaves the conversation lane: its prompt is prefilled anew, its group is free again."""
    conversation = ask(engine, prompt(0, 9), 0)
    finish(engine)
    conversation.ids += prompt(1, 2)
    start = len(conversation.ids)
    ask(engine, conversation, 2, 8, CANDIDATES)
    assert conversation.group is None
    turns = finish(engine)[id(conversation)]
    assert_scored(conversation.ids, [(start, turns[0].logps)])
    engine.load(params())  # nothing is held


def test_the_same_first_prompt_is_prefilled_once(engine):
    """Five workflows of a question; here more than there are rows in a prefill call, and groups."""
    asked = [ask(engine, prompt(0, 17), number) for number in range(5, 10)]
    finish_and_release(engine)
    usage = engine.take_usage()
    assert (usage.prefilled, usage.reused) == (16, 4 * 16)
    assert len({tuple(c.ids) for c in asked}) == 5


def finish_and_release(engine: Engine) -> None:
    for ticket, (turn, *_) in finished_turns(engine):
        ticket.conversation.ids += turn.ids.tolist()
        engine.release(ticket.conversation)


def test_questions_share_their_role_prompt_and_nothing_is_counted_twice(engine):
    role = prompt(0, 10)
    lengths = {number: 3 + number // 2 for number in range(8)}
    for number, length in lengths.items():
        ask(engine, role + prompt(number // 2, length), number)
    finish_and_release(engine)
    usage = engine.take_usage()
    assert usage.prefilled + usage.reused == sum(10 + length - 1 for length in lengths.values())
    assert usage.prefilled == 10 + sum(3 + question - 1 for question in range(4))


def test_usage_counts_what_was_sampled_and_what_could_have_been(engine):
    conversation = ask(engine, prompt(0, 5), 0)
    (turn,) = finish(engine)[id(conversation)]
    engine.release(conversation)
    assert engine.take_usage() == Usage(len(turn.ids), 4 * len(turn.ids), prefilled=4)
    assert engine.take_usage() == Usage()


# ---------------------------------------------------------------- refusals and new weights


@pytest.mark.parametrize(
    ("length", "max_tokens", "candidates", "message"),
    [
        (5, 4, 2, r"2 candidates requested, the engine has \[1, 5\]"),
        (0, 4, 1, "A prompt of 0 tokens"),
        (TEAM.row_tokens - 11, 12, 1, "117 tokens and a turn of up to 12 were submitted; a row holds 128"),
        (5, 13, 1, "a turn 12"),
        (5, 9, CANDIDATES, "a turn 8"),
    ],
)
def test_what_does_not_fit_is_refused(engine, length, max_tokens, candidates, message):
    with pytest.raises(ValueError, match=message):
        ask(engine, prompt(0, length), 0, max_tokens, candidates)
    assert not engine.busy


def test_the_longest_row_fits(engine):
    ids = prompt(0, TEAM.row_tokens - 12)
    turn = sample(engine, ids, 1)
    assert_scored(ids + turn.ids.tolist(), [(len(ids), turn.logps)])


def test_new_weights_while_a_conversation_is_held_are_refused(engine):
    conversation = ask(engine, prompt(0, 5), 0)
    finish(engine)
    with pytest.raises(RuntimeError, match="held: finish or release them first"):
        engine.load(params(1))
    engine.release(conversation)
    engine.load(params(1))


def test_memory_is_held_from_load_to_unload(engine):
    def held() -> int:
        gc.collect()
        return sum(x.nbytes for x in jax.live_arrays())

    sample(engine, prompt(0, 9), 1)
    whole = held()
    engine.unload()
    states = jax.tree.leaves([*engine.abstract_states().values(), engine.abstract_params()])
    assert whole - held() >= sum(math.prod(x.shape) * x.dtype.itemsize for x in states) > 0
    engine.load(params())
    assert sample(engine, prompt(0, 9), 1).ids.size


def test_unloading_while_a_conversation_is_held_is_refused_and_changes_nothing(engine):
    conversation = ask(engine, prompt(0, 5), 0)
    (turn,) = finish(engine)[id(conversation)]
    with pytest.raises(RuntimeError, match="held: finish or release them first"):
        engine.unload()
    ask(engine, conversation, 1)
    finish(engine)
    assert len(conversation.ids) > 5 + len(turn.ids)
    engine.release(conversation)


def test_after_new_weights_no_old_cache_is_read(engine):
    """Kind 33: neither in a slot nor in a parking place."""
    ids = prompt(0, 20)
    old = sample(engine, ids, 1)
    assert engine.take_usage().reused == 0
    talking = [ask(engine, ids + prompt(i, 3), i) for i in range(7)]
    finish(engine)
    assert max(c.group for c in talking) == 6
    for conversation in talking:
        engine.release(conversation)
    engine.take_usage()
    engine.load(params(1))
    updated = sample(engine, ids, 1)
    usage = engine.take_usage()
    assert (usage.prefilled, usage.reused) == (19, 0)
    assert_scored(ids + updated.ids.tolist(), [(20, updated.logps)], seed=1)
    cold = sample(fresh_engine(1), ids, 1)
    assert same(updated, cold) and not same(updated, old)


def work(engine: Engine) -> None:
    """Uses everything there is: both lanes, prompts of many lengths, shared prefixes, second turns, parking
    places and too few of them."""
    talking = [Conversation(prompt(7 + i, 7 + 9 * i)) for i in range(8)]
    for number in range(2):
        for conversation in talking:
            say(engine, conversation, 8 + number, 1, 2)
    for conversation in talking:
        engine.release(conversation)
    for number in range(6):
        ask(engine, prompt(0, 5) + prompt(number, 3 * number), number, 3 + number)
        ask(engine, prompt(0, 5) + prompt(number, 2 * number), number, 1 + number, CANDIDATES)
    finish_and_release(engine)


@pytest.fixture
def compiled():
    """Durations that JAX reports while the test runs, by name."""
    names = []

    def note(name: str, *_, **__):
        names.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


def test_after_the_first_use_nothing_is_compiled(engine, compiled):
    """Kind 31: twenty steps with prompts and limits of all lengths."""
    work(engine)
    jax.jit(lambda x: x + 1)(1)
    assert any("backend_compile" in name for name in compiled)
    compiled.clear()
    rng = np.random.default_rng(0)
    for step in range(20):
        engine.load(params(step % 2))
        for number in range(6):
            ask(engine, prompt(number, rng.integers(1, 60)), number, rng.integers(1, 13))
            ask(engine, prompt(number, rng.integers(1, 60)), number, rng.integers(1, 9), CANDIDATES)
        finish_and_release(engine)
    engine.load(params())
    work(engine)
    assert [name for name in compiled if "compile" in name] == []


def test_keys_are_those_of_the_ticket_s_candidates(engine):
    """A candidate's turn is that of its key, wherever it stands."""
    first = Conversation(prompt(3, 10))
    engine.submit(Ticket(first, keys(1, CANDIDATES), 8))
    turns = finish(engine)[id(first)]
    second = Conversation(prompt(3, 10))
    engine.submit(Ticket(second, keys(1, CANDIDATES)[::-1], 8))
    assert all(map(same, finish(engine)[id(second)][::-1], turns))
