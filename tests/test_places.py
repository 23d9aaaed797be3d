"""The books of a lane: who sits where, who is parked, and what the moves leave in every slot."""

import numpy as np
import pytest

from mopd_jax.rollout.places import Conversation, Moves, Places

ROW = 64


class Device:
    """Histories and turns as lists of (id, whether it was prefilled), moved as a lane moves the real ones."""

    def __init__(self, slots: int, parked: int):
        self.places = Places(slots, parked, ROW)
        self.histories = [[] for _ in range(slots + parked)]
        self.turns = [[] for _ in range(slots)]

    def carry_out(self, moves: Moves) -> None:
        assert len(set(moves.commits)) == len(moves.commits)
        for slot in moves.commits:
            self.histories[slot] += self.turns[slot]
            self.turns[slot] = []
        for source, target, tokens in moves.copies:
            self.histories[target] = self.histories[source][:tokens]
            assert len(self.histories[target]) == tokens, "more was promised than lies there"
        for slot, tokens in moves.opened.items():
            self.histories[slot] = self.histories[slot][:tokens]
            assert all(prefilled for _, prefilled in self.histories[slot])

    def begin(self, *conversations: Conversation) -> tuple[Moves, list[Conversation]]:
        """Seats who can be in one round, checks what lies in their slots, and prefills the rest."""
        moves = Moves()
        seated = [c for c in conversations if self.places.seat(c, moves) is not None]
        self.carry_out(moves)
        for conversation in seated:
            history = self.histories[conversation.group]
            assert [i for i, _ in history] == conversation.ids[: self.places.cached(conversation.group)]
            history += [(i, True) for i in conversation.ids[len(history) : -1]]
        return moves, seated

    def end(self, conversation: Conversation, *sampled: int) -> None:
        """Ends a turn: all but its last id have been decoded, and so has the prompt's last."""
        decoded = [conversation.ids[-1], *sampled[:-1]]
        self.turns[conversation.group] = [(i, False) for i in decoded]
        self.places.finish(conversation.group, len(conversation.ids) - 1 + len(sampled))
        conversation.ids += sampled

    def ask(self, *conversations: Conversation) -> Moves:
        for conversation in conversations:
            self.places.ask(conversation)
        return self.begin(*conversations)[0]

    def say(self, conversation: Conversation, *message: int) -> Moves:
        """One turn of a conversation alone."""
        conversation.ids += message
        moves = self.ask(conversation)
        self.end(conversation, 7, 8)
        return moves


def new(number: int, length: int = 4) -> Conversation:
    """Returns a conversation whose prompt shares nothing with those of other numbers."""
    return Conversation([100 * number + i for i in range(1, length + 1)])


def test_an_idle_conversation_stays_until_its_slot_is_needed():
    device, (a, b, c) = Device(2, 1), map(new, (1, 2, 3))
    device.say(a)
    device.say(b)
    assert (a.group, b.group) == (0, 1)
    assert device.say(a, 9).copies == [] and a.group == 0
    moves = device.say(c)
    assert (moves.commits, moves.copies) == ([1], [(1, 2, 5)]), "b has been idle for longest"
    assert (a.group, b.group, c.group) == (0, 2, 1) and device.places.held


def test_who_comes_back_takes_any_slot_with_all_that_was_cached():
    device, (a, b, c) = Device(2, 2), map(new, (1, 2, 3))
    for conversation in (a, b, c):
        device.say(conversation)
    assert a.group == 2
    device.places.release(b)
    moves = device.say(a, 9, 9)
    assert a.group == 1 and moves.copies == [(2, 1, 5)] and moves.commits == []
    assert device.say(b, 9).evicted == 0


def test_who_speaks_or_has_asked_to_is_not_moved():
    device, (a, b, c, d) = Device(2, 2), map(new, (1, 2, 3, 4))
    device.ask(a)
    device.say(b)
    device.places.ask(b)
    moves = device.ask(c)
    assert c.group is None and moves == Moves(), "a speaks, b is about to"
    device.end(a, 7)
    device.begin(c)
    assert (a.group, b.group, c.group) == (2, 1, 0)
    device.begin(b)
    assert device.ask(d) == Moves() and d.group is None


def test_without_a_place_who_was_idle_for_longest_loses_the_cache():
    device, (a, b, c, d) = Device(2, 1), map(new, (1, 2, 3, 4))
    for conversation in (a, b, c):
        device.say(conversation)
    moves = device.say(d)
    assert moves.evicted == 1 and a.group is None, "a was parked, and gives its place to b"
    assert (b.group, c.group, d.group) == (2, 0, 1) or (b.group, c.group, d.group) == (2, 1, 0)
    moves = device.say(a, 9)
    assert (moves.evicted, b.group) == (1, None) and device.places.cached(a.group) == len(a.ids) - 1


def test_without_parking_places_a_slot_is_cleared_by_giving_up_its_cache():
    device, (a, b) = Device(1, 0), map(new, (1, 2))
    device.say(a)
    moves = device.say(b)
    assert (moves.evicted, moves.commits, moves.copies) == (1, [], []) and (a.group, b.group) == (None, 0)


def test_a_prompt_is_taken_over_from_wherever_it_lies_but_never_what_was_sampled():
    device = Device(2, 2)
    parked, busy, third = new(1, 9), new(2), new(3)
    device.say(parked)
    device.say(busy)
    device.say(third)
    assert parked.group == 2
    device.places.release(busy)
    follower = Conversation([*parked.ids, 50, 51])  # prompt and turn of the other, as it were
    moves = device.say(follower)
    assert moves.copies == [(2, follower.group, 8)] and moves.opened == {follower.group: 8}
    device.places.release(follower)
    again = Conversation([*parked.ids[:9], 60])
    slot = next(g for g in range(2) if g != third.group)
    moves = device.say(again)
    assert again.group == slot and moves.copies == [], "continued where it lies"


def test_equal_new_prompts_wait_for_the_first_of_them():
    device = Device(3, 0)
    twins = [new(1, 6) for _ in range(3)]
    moves = device.ask(*twins)
    assert [c.group is None for c in twins] == [False, True, True] and len(moves.opened) == 1
    moves, _ = device.begin(*twins[1:])
    assert list(moves.opened.values()) == [5, 5] and all(c.group is not None for c in twins)


def test_a_prompt_of_one_token_needs_nothing():
    device = Device(1, 0)
    assert device.say(new(1, 1)).opened == {0: 0}


def test_after_forgetting_nothing_is_taken_over():
    device, first, second = Device(2, 0), new(1), new(1)
    device.say(first)
    device.places.release(first)
    assert not device.places.held
    device.places.forget()
    assert device.say(second).opened == {second.group: 0}


@pytest.mark.parametrize(
    ("slots", "parked", "talking"), [(3, 4, 6), (1, 2, 2), (2, 5, 6), (3, 2, 9), (2, 0, 4)]
)
def test_a_long_random_talk_finds_its_own_history_in_every_slot(slots, parked, talking):
    """`Device` checks every slot before every turn. With a place to spare, nobody ever loses a cache."""
    rng, device = np.random.default_rng(slots), Device(slots, parked)
    prefixes = [new(number, 6).ids for number in range(1, 4)]

    def fresh() -> Conversation:
        own = rng.integers(1, 9, rng.integers(1, 5)).tolist()
        return Conversation(prefixes[rng.integers(3)][: rng.integers(1, 7)] + own)

    talk, waiting, speaking = [fresh() for _ in range(talking)], [], []
    evicted, parkings = 0, 0
    for _ in range(600):
        for conversation in talk:
            silent = not any(conversation is c for c in (*waiting, *speaking))
            if silent and rng.random() < 0.1:
                conversation.ids += rng.integers(1, 9, rng.integers(1, 4)).tolist()
                device.places.ask(conversation)
                waiting.append(conversation)
        moves, began = device.begin(*waiting[:3])
        evicted += moves.evicted
        parkings += sum(target >= slots for _, target, _ in moves.copies)
        waiting = [c for c in waiting if not any(c is b for b in began)]
        speaking += began
        assert len(speaking) <= slots and len({c.group for c in speaking}) == len(speaking)
        for conversation in [c for c in speaking if rng.random() < 0.5]:
            device.end(conversation, *rng.integers(1, 9, rng.integers(1, 4)).tolist())
            speaking = [c for c in speaking if c is not conversation]
            if len(conversation.ids) > ROW - 12:
                device.places.release(conversation)
                talk = [fresh() if c is conversation else c for c in talk]
    assert (evicted == 0) == (talking < slots + parked or (not parked and talking <= slots))
    assert parkings > 20 or not parked
