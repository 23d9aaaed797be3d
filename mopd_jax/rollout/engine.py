"""One process's sampling engine: slots, parked conversations, shared prefixes.

Two lanes: one-candidate groups for conversations, which keep their cache between turns, and
C-candidate groups for answer requests. At fixed lane sizes the sampled ids and log-probabilities
depend only on prompt, key and weights, not on the slot, its neighbours or the order of requests, and
neither on whether a conversation was parked in between. (One that lost its cache for lack of a place is
prefilled again, and the same up to rounding.)

Shape letters: G slots, Q parking places, C candidates per group, S turn capacity, R prefill rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Lowered

from mopd_jax.config import RolloutConfig, TeamConfig
from mopd_jax.model import sharding
from mopd_jax.model.qwen3 import Qwen3
from mopd_jax.rollout.places import Conversation, Moves, Places
from mopd_jax.rollout.sampler import Sampler, SamplerState
from mopd_jax.team.episode import Stop

REFILL = 8
"""A dispatch ends when one in so many of the decoding groups has ended: others take their slots [D]."""


@dataclass(frozen=True)
class Sample:
    """One sampled turn."""

    ids: np.ndarray
    """int32 [n], the end-of-turn token included when it was sampled."""
    logps: np.ndarray
    """float32 [n]"""
    stop: Stop


@dataclass(frozen=True)
class Ticket:
    """A request for the next turn of a conversation."""

    conversation: Conversation
    keys: np.ndarray
    """uint32 [C, 2]: one key per candidate."""
    max_tokens: int


@dataclass
class Usage:
    """What an engine has done since the usage was last taken."""

    decoded: int = 0
    """Sampled tokens."""
    slot_steps: int = 0
    """Slots × decode steps: what could have been sampled."""
    prefilled: int = 0
    """Prompt tokens computed."""
    reused: int = 0
    """Prompt tokens taken from a cache."""
    evicted: int = 0
    """Caches given up for lack of a parking place: their conversations were prefilled again."""


class _Lane:
    """G slots of one width C, Q parking places, and the queue before them."""

    def __init__(
        self,
        sampler: Sampler,
        rollout: RolloutConfig,
        *,
        groups: int,
        candidates: int,
        row: int,
        turn: int,
        parked: int = 0,
    ):
        self._sampler, self._rollout = sampler, rollout
        self._groups, self._candidates, self._row, self._turn = groups, candidates, row, turn
        self._parked = parked
        self._places = Places(groups, parked, row)
        self._state: SamplerState | None = None
        self._steps = 0
        """Decode steps of the state so far."""
        self._queue: list[Ticket] = []
        self._running: dict[int, Ticket] = {}

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._running)

    @property
    def full(self) -> bool:
        """Whether there is work for every slot."""
        return len(self._queue) + len(self._running) >= self._groups

    @property
    def held(self) -> bool:
        """Whether a conversation holds a cache."""
        return self._places.held

    def submit(self, ticket: Ticket) -> None:
        prompt = len(ticket.conversation.ids)
        if not 0 < prompt <= self._row - ticket.max_tokens or ticket.max_tokens > self._turn:
            raise ValueError(
                f"A prompt of {prompt} tokens and a turn of up to {ticket.max_tokens} were submitted; a row "
                f"holds {self._row} tokens, a turn {self._turn}: shorten them or raise the team's limits."
            )
        self._places.ask(ticket.conversation)
        self._queue.append(ticket)

    def release(self, conversation: Conversation) -> None:
        self._places.release(conversation)

    def open(self) -> None:
        """Allocates empty caches."""
        self._state, self._steps = self._sampler.init(*self._sizes), 0

    def close(self) -> None:
        """Frees the caches, and forgets what could have been reused of them."""
        self._state = None
        self._places.forget()

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self._groups, self._candidates, self._row, self._turn, self._parked

    def abstract_state(self) -> SamplerState:
        return self._sampler.abstract_state(*self._sizes)

    def lower(self, params) -> dict[str, Lowered]:
        rows, tokens = self._rollout.prefill_rows, self._rollout.prefill_tokens
        return self._sampler.lower(self.abstract_state(), params, rows, tokens)

    def step(self, params, usage: Usage) -> list[tuple[Ticket, list[Sample]]]:
        """Admits what fits, decodes one dispatch; returns the finished tickets with their samples."""
        while self._queue and (admitted := self._admit(usage)):
            self._prefill(params, admitted, usage)
            self._start(admitted)
            self._running |= admitted
        if not self._running:
            return []
        enough = max(1, len(self._running) // REFILL)
        self._state = self._sampler.decode(self._state, params, enough)
        return self._collect(usage)

    def _admit(self, usage: Usage) -> dict[int, Ticket]:
        """Seats up to R tickets, by slot, and brings the histories to what is cached. The others wait in
        their order; who can be seated does not wait behind who cannot."""
        admitted: dict[int, Ticket] = {}
        moves, waiting = Moves(), []
        for ticket in self._queue:
            free_row = len(admitted) < self._rollout.prefill_rows
            slot = self._places.seat(ticket.conversation, moves) if free_row else None
            if slot is None:
                waiting.append(ticket)
            else:
                admitted[slot] = ticket
        self._queue = waiting
        self._carry_out(moves)
        usage.reused += sum(map(self._places.cached, admitted))
        usage.evicted += moves.evicted
        return admitted

    def _carry_out(self, moves: Moves) -> None:
        for groups in self._calls(moves.commits):
            self._state = self._sampler.commit(self._state, self._rows(groups, self._padding))
        for copies in self._calls(moves.copies):
            sources, targets, lengths = (
                self._rows(column, self._padding) for column in zip(*copies, strict=True)
            )
            self._state = self._sampler.copy(self._state, sources, targets, lengths)
        for opened in self._calls(moves.opened.items()):
            slots, lengths = zip(*opened, strict=True)
            self._state = self._sampler.rewind(
                self._state, self._rows(slots, self._padding), self._rows(lengths, 0)
            )

    @property
    def _padding(self) -> int:
        """The group of a row that touches nothing."""
        return self._groups + self._parked

    def _calls(self, values: Iterable) -> list[list]:
        """Cuts into lists of up to R, one per call of a program."""
        values, rows = list(values), self._rollout.prefill_rows
        return [values[start : start + rows] for start in range(0, len(values), rows)]

    def _rows(self, values, padding: int) -> np.ndarray:
        """Returns int32 [R]: `values`, then padding."""
        rows = np.full(self._rollout.prefill_rows, padding, np.int32)
        rows[: len(values)] = values
        return rows

    def _prefill(self, params, admitted: dict[int, Ticket], usage: Usage) -> None:
        """Computes the uncached part of every prompt but its last token."""
        width = self._rollout.prefill_tokens
        rest = {slot: t.conversation.ids[self._places.cached(slot) : -1] for slot, t in admitted.items()}
        usage.prefilled += sum(map(len, rest.values()))
        while rest := {slot: ids for slot, ids in rest.items() if ids}:
            ids = np.zeros((self._rollout.prefill_rows, width), np.int32)
            for row, tokens in zip(ids, rest.values(), strict=False):
                row[: len(tokens[:width])] = tokens[:width]
            lengths = self._rows([len(tokens[:width]) for tokens in rest.values()], 0)
            self._state = self._sampler.extend(
                self._state, params, ids, self._rows(list(rest), self._padding), lengths
            )
            rest = {slot: tokens[width:] for slot, tokens in rest.items()}

    def _start(self, admitted: dict[int, Ticket]) -> None:
        """Makes the slots ready to decode from the last tokens of their prompts."""
        tickets = admitted.values()
        keys = np.zeros((self._rollout.prefill_rows, self._candidates, 2), np.uint32)
        keys[: len(tickets)] = [t.keys for t in tickets]
        self._state = self._sampler.start(
            self._state,
            self._rows(list(admitted), self._padding),
            self._rows([t.conversation.ids[-1] for t in tickets], 0),
            keys,
            self._rows([t.max_tokens for t in tickets], 0),
        )

    def _collect(self, usage: Usage) -> list[tuple[Ticket, list[Sample]]]:
        """Takes the groups out of which every candidate has stopped."""
        state = self._state
        active, counts, ids, logps, steps = jax.device_get(
            (state.active, state.counts, state.ids, state.logps, state.steps)
        )
        usage.slot_steps += int(steps - self._steps) * active.size
        self._steps = steps
        finished = []
        for slot in [slot for slot in self._running if not active[slot].any()]:
            ticket = self._running.pop(slot)
            samples = [self._sample(*turn) for turn in zip(ids[slot], logps[slot], counts[slot], strict=True)]
            usage.decoded += sum(len(s.ids) for s in samples)
            self._places.finish(slot, len(ticket.conversation.ids) - 1 + len(samples[0].ids))
            finished.append((ticket, samples))
        return finished

    def _sample(self, ids: np.ndarray, logps: np.ndarray, count: int) -> Sample:
        stop = Stop.END if ids[count - 1] in self._sampler.eos_ids else Stop.LENGTH
        return Sample(ids[:count].copy(), logps[:count].copy(), stop)


class Engine:
    """Samples turns for any number of conversations; local to a process and its devices.

    It holds device memory from `load` to `unload` only: sampling and learning take turns in it.

    Args:
      model: the network; its config's dtype is the type of the caches.
      eos_ids: ids that end a turn.
      team: gives row length and turn lengths.
      candidates: answers per request; above 1 they get a lane of their own.
      mesh: a (data, fsdp, tensor) mesh over devices of this process.
    """

    def __init__(
        self,
        model: Qwen3,
        eos_ids: tuple[int, ...],
        team: TeamConfig,
        candidates: int,
        rollout: RolloutConfig,
        mesh: Mesh,
    ):
        sampler = Sampler(model, eos_ids, rollout.decode_steps, mesh)
        turn = max(team.leader_tokens, team.searcher_tokens, team.answerer_tokens)
        conversations = _Lane(
            sampler,
            rollout,
            groups=rollout.conversations,
            candidates=1,
            row=team.row_tokens,
            turn=turn,
            parked=rollout.parked,
        )
        self._lanes = {1: conversations}
        if candidates > 1:
            self._lanes[candidates] = _Lane(
                sampler,
                rollout,
                groups=rollout.requests,
                candidates=candidates,
                row=team.row_tokens,
                turn=team.answerer_tokens,
            )
        self.model, self._shardings = model, sharding.param_shardings(model, mesh)
        self._cast = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(model.config.dtype), tree))
        self._params = None
        self._usage = Usage()

    @property
    def busy(self) -> bool:
        """Whether anything is queued or being decoded."""
        return any(lane.busy for lane in self._lanes.values())

    def load(self, params) -> None:
        """Takes new weights (cast and laid out for this engine) and starts with empty caches.

        They may lie on devices of all processes: then every process loads them at the same point.

        Raises:
          RuntimeError: a conversation is still held.
        """
        self.unload()
        self._params = sharding.hand_over(self._cast(params), self._shardings)
        for lane in self._lanes.values():
            lane.open()

    def unload(self) -> None:
        """Frees the weights and every cache, until the next `load`.

        Raises:
          RuntimeError: a conversation is still held.
        """
        if any(lane.held for lane in self._lanes.values()):
            raise RuntimeError("New weights while conversations are held: finish or release them first.")
        for lane in self._lanes.values():
            lane.close()
        self._params = None

    def abstract_params(self):
        """Returns the shapes and the layout of the engine's weights."""
        shapes = sharding.abstract_params(self.model)
        cast = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, self.model.config.dtype), shapes)
        return sharding.laid_out(cast, self._shardings)

    def abstract_states(self) -> dict[int, SamplerState]:
        """Returns the shapes and the layout of every lane's state, by its candidates."""
        return {candidates: lane.abstract_state() for candidates, lane in self._lanes.items()}

    def lower(self) -> dict[tuple[int, str], Lowered]:
        """Returns the programs of every lane (see `Sampler.lower`) by (candidates, name)."""
        params = self.abstract_params()
        return {
            (candidates, name): program
            for candidates, lane in self._lanes.items()
            for name, program in lane.lower(params).items()
        }

    def lower_cast(self, params) -> Lowered:
        """Returns the program that `load` casts weights with; `params` may be shapes with their shardings."""
        return self._cast.lower(params)

    def submit(self, ticket: Ticket) -> None:
        """Queues a turn. A conversation has at most one ticket at a time.

        Raises:
          ValueError: the number of keys is not a number of candidates that the engine was made for, the
            prompt is empty, or prompt and turn do not fit.
        """
        if len(ticket.keys) not in self._lanes:
            raise ValueError(
                f"{len(ticket.keys)} candidates requested, the engine has {sorted(self._lanes)}."
            )
        if len(ticket.keys) > 1:
            self.release(ticket.conversation)  # it leaves the conversation lane
        self._lanes[len(ticket.keys)].submit(ticket)

    def step(self) -> list[tuple[Ticket, list[Sample]]]:
        """Runs one dispatch of the conversations, and one of the answer requests if there is one for every
        slot or nothing else to do: they end their workflows, so nobody waits for them. Returns the turns that
        finished. The caller appends the sampled ids to the conversation. An answer request with several
        candidates is released at once."""
        conversations, *answers = self._lanes.values()
        finished = conversations.step(self._params, self._usage)
        for lane in answers:
            if lane.full or not conversations.busy:
                answered = lane.step(self._params, self._usage)
                for ticket, _ in answered:
                    lane.release(ticket.conversation)
                finished += answered
        return finished

    def release(self, conversation: Conversation) -> None:
        """Gives back the cache of a conversation that has ended; nothing happens if it holds none."""
        self._lanes[1].release(conversation)

    def take_usage(self) -> Usage:
        """Returns what was done since the last call, and starts counting anew."""
        usage, self._usage = self._usage, Usage()
        return usage
