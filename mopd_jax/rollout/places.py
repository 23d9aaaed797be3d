"""Where a lane's conversations lie: in slots, which decode, or parked; and what others take over of them.

Books only: `Places.seat` says what has to be moved, in the order in which it has to be, and the lane has it
moved before it goes on.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Conversation:
    """A growing list of token ids, owned by the caller, and the place of its cache, kept by the engine."""

    ids: list[int] = field(default_factory=list)
    """Prompt and sampled ids so far; append-only."""
    group: int | None = None
    """Group that holds the cache: a slot, or from G on a parking place. None: there is none."""


@dataclass
class Moves:
    """What brings caches into their slots for one round of turns; to be done in the order of the fields."""

    commits: list[int] = field(default_factory=list)
    """Slots whose finished turn goes to the end of their history."""
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    """(source, target, tokens), one after the other: a source may have been a target before."""
    opened: dict[int, int] = field(default_factory=dict)
    """Slots with a new conversation, and how many tokens of its prompt lie there by now."""
    evicted: int = 0
    """Conversations that have lost their caches."""


class Places:
    """The books of G slots and Q parking places.

    A group (slot or parking place) is free, or it holds the cache of a conversation. That speaks from its
    request to the end of its turn, and is idle otherwise. An idle one stays in its slot, its turn
    uncommitted, until somebody else needs the slot.
    """

    def __init__(self, slots: int, parked: int, row: int):
        """All are free. `row` is the most tokens of a conversation."""
        groups = slots + parked
        self._slots, self._parking, self._groups = range(slots), range(slots, groups), range(groups)
        self._owners: list[Conversation | None] = [None] * groups
        self._speaking: set[int] = set()
        self._cached = [0] * groups
        self._clock = itertools.count()
        self._used = [next(self._clock) for _ in self._groups]
        self._openings = np.empty((groups, row), np.int32)
        """First prompt of each group's last conversation, −1 behind it. Its cache came from prefill alone,
        so others may take over a common part without changing a bit of their own result."""
        self.forget()

    @property
    def held(self) -> bool:
        """Whether any group holds a conversation."""
        return any(owner is not None for owner in self._owners)

    def cached(self, group: int) -> int:
        """Returns the tokens in a group's history, a finished turn that waits for its commit included."""
        return self._cached[group]

    def forget(self) -> None:
        """Nothing that lies anywhere may be taken over any more: there are new weights."""
        self._openings[:] = -1

    def ask(self, conversation: Conversation) -> None:
        """Notes that a conversation wants to speak: its cache, if it has one, stays where it is."""
        if conversation.group is not None:
            self._speaking.add(conversation.group)

    def finish(self, slot: int, tokens: int) -> None:
        """Notes that the turn in a slot has ended, and how many tokens are cached with it."""
        self._speaking.remove(slot)
        self._cached[slot], self._used[slot] = tokens, next(self._clock)

    def release(self, conversation: Conversation) -> None:
        """Frees the group of a conversation, if it has one; what lies there may still be taken over."""
        if conversation.group is not None:
            self._free(conversation.group)
            conversation.group = None

    def seat(self, conversation: Conversation, moves: Moves) -> int | None:
        """Gives a conversation that is to speak a slot with what is cached of it, and adds to `moves`.

        Returns the slot, or None if it has to wait: everyone in a slot speaks, or another new
        conversation of this round shares more with it than anything that is already cached (then the
        shared part is computed once).
        """
        group = conversation.group
        if group is None:
            return self._open(conversation, moves)
        if group in self._slots:
            moves.commits.append(group)
            return group
        if (slot := self._clear_slot(moves)) is not None:
            self._move(group, slot, moves)
        return slot

    def _open(self, conversation: Conversation, moves: Moves) -> int | None:
        prompt = np.asarray(conversation.ids[:-1], np.int32)
        lengths = self._shared(prompt)
        best = self._settled(lengths, moves).max()
        if lengths.max() > best:
            return None
        slot = self._oldest(self._slots, lambda g: best and self._is_free(g) and lengths[g] == best)
        if slot is None:
            slot = self._clear_slot(moves)
        if slot is None:
            return None
        lengths = self._settled(self._shared(prompt), moves)  # somebody may have been parked over the best
        source = slot if lengths[slot] == lengths.max() else int(lengths.argmax())
        shared = int(lengths[source])
        if shared and source != slot:
            moves.copies.append((source, slot, shared))
        moves.opened[slot] = shared
        self._occupy(slot, conversation, prompt, shared)
        self._speaking.add(slot)
        return slot

    def _shared(self, prompt: np.ndarray) -> np.ndarray:
        """Returns the tokens that each group's opening has in common with a prompt, int [G + Q]."""
        differs = np.ones((len(self._groups), len(prompt) + 1), bool)
        differs[:, :-1] = self._openings[:, : len(prompt)] != prompt
        return differs.argmax(1)

    @staticmethod
    def _settled(lengths: np.ndarray, moves: Moves) -> np.ndarray:
        """Returns the lengths without those of this round's new prompts, which are not computed yet."""
        settled = lengths.copy()
        settled[list(moves.opened)] = 0
        return settled

    def _clear_slot(self, moves: Moves) -> int | None:
        """Returns the slot free for longest; where none is, that of who has been idle for longest, who is
        parked. None if everyone speaks."""
        slot = self._oldest(self._slots, self._is_free)
        if slot is None:
            slot = self._oldest(self._slots, self._is_idle)
            if slot is not None:
                self._park(slot, moves)
        return slot

    def _park(self, slot: int, moves: Moves) -> None:
        """Moves who is in the slot away. Without a free place, who has been idle for longest of all loses
        the cache."""
        place = self._oldest(self._parking, self._is_free)
        if place is None:
            place = self._oldest(self._groups, self._is_idle)
            self.release(self._owners[place])
            moves.evicted += 1
        if place != slot:
            moves.commits.append(slot)
            self._move(slot, place, moves)

    def _move(self, source: int, target: int, moves: Moves) -> None:
        moves.copies.append((source, target, self._cached[source]))
        self._occupy(target, self._owners[source], self._openings[source], self._cached[source])
        self._used[target] = self._used[source]
        if source in self._speaking:
            self._speaking.add(target)
        self._free(source)

    def _occupy(self, group: int, owner: Conversation, opening: np.ndarray, cached: int) -> None:
        self._owners[group], owner.group = owner, group
        self._cached[group] = cached
        self._openings[group] = -1
        self._openings[group, : len(opening)] = opening

    def _free(self, group: int) -> None:
        self._owners[group], self._used[group] = None, next(self._clock)
        self._speaking.discard(group)

    def _is_free(self, group: int) -> bool:
        return self._owners[group] is None

    def _is_idle(self, group: int) -> bool:
        return not self._is_free(group) and group not in self._speaking

    def _oldest(self, groups: Iterable[int], wanted: Callable[[int], bool]) -> int | None:
        """Returns which of the wanted groups has not been used for longest; None if there is none."""
        return min(filter(wanted, groups), key=self._used.__getitem__, default=None)
