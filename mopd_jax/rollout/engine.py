"""One process's sampling engine: slots, parked conversations, shared prefixes.

Two lanes: one-candidate groups for conversations, which keep their cache between turns, and
C-candidate groups for answer requests. At fixed lane sizes the sampled ids and log-probabilities
depend only on prompt, key and weights, not on the slot, its neighbours or the order of requests.

Shape letters: G cache groups, C candidates per group, S turn capacity, R prefill rows.
"""

import collections
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Lowered

from mopd_jax.config import RolloutConfig, TeamConfig
from mopd_jax.model import sharding
from mopd_jax.model.qwen3 import Qwen3
from mopd_jax.rollout.sampler import Sampler, SamplerState
from mopd_jax.team.episode import Stop


@dataclass
class Conversation:
    """A growing list of token ids, owned by the caller, and the place of its cache, kept by the engine."""

    ids: list[int] = field(default_factory=list)
    """Prompt and sampled ids so far; append-only."""
    group: int | None = None
    """Group of the conversation lane that holds the cache, or None."""


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


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two id arrays."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


class _Lane:
    """G groups of one width C with their queue."""

    def __init__(
        self, sampler: Sampler, groups: int, candidates: int, row: int, turn: int, rollout: RolloutConfig
    ):
        self._sampler, self._rollout = sampler, rollout
        self._groups, self._candidates, self._row, self._turn = groups, candidates, row, turn
        self._state: SamplerState | None = None
        self._queue: collections.deque[Ticket] = collections.deque()
        self._running: dict[int, Ticket] = {}
        self._free = collections.deque(range(groups))
        self._cached = [0] * groups
        """Tokens in each group's history, a finished turn that waits for its commit included."""
        self._openings = [np.zeros(0, np.int32)] * groups
        """First prompt of each group's last conversation. Its cache came from prefill alone, so others
        may take over a common part without changing a bit of their own result."""

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._running)

    def submit(self, ticket: Ticket) -> None:
        prompt = len(ticket.conversation.ids)
        if not 0 < prompt <= self._row - ticket.max_tokens or ticket.max_tokens > self._turn:
            raise ValueError(
                f"A prompt of {prompt} tokens and a turn of up to {ticket.max_tokens} were submitted; a row "
                f"holds {self._row} tokens, a turn {self._turn}: shorten them or raise the team's limits."
            )
        self._queue.append(ticket)

    def release(self, group: int) -> None:
        """Frees a group. Its history serves prefix reuse until the group is taken again."""
        self._free.append(group)

    @property
    def held(self) -> bool:
        """Whether a conversation owns a group."""
        return len(self._free) < self._groups

    def open(self) -> None:
        """Allocates empty caches."""
        self._state = self._sampler.init(self._groups, self._candidates, self._row, self._turn)

    def close(self) -> None:
        """Frees the caches, and forgets what could have been reused of them."""
        self._state = None
        self._openings = [np.zeros(0, np.int32)] * self._groups

    def abstract_state(self) -> SamplerState:
        return self._sampler.abstract_state(self._groups, self._candidates, self._row, self._turn)

    def lower(self, params) -> dict[str, Lowered]:
        rows, tokens = self._rollout.prefill_rows, self._rollout.prefill_tokens
        return self._sampler.lower(self.abstract_state(), params, rows, tokens)

    def step(self, params, usage: Usage) -> list[tuple[Ticket, list[Sample]]]:
        """Admits what fits, decodes one dispatch; returns the finished tickets with their samples."""
        while self._queue and (admitted := self._admit(usage)):
            self._prefill(params, admitted, usage)
            self._running |= admitted
        if not self._running:
            return []
        before = int(self._state.steps)
        self._state = self._sampler.decode(self._state, params)
        usage.slot_steps += (int(self._state.steps) - before) * self._groups * self._candidates
        return self._collect(usage)

    def _admit(self, usage: Usage) -> dict[int, Ticket]:
        """Takes up to R tickets for which there is a group and brings the histories to what is cached.

        A conversation that holds its group never waits behind one that has none. A prompt that shares
        more with one admitted in this round than with any resident group waits for the next round: then
        the shared part is computed once.
        """
        admitted: dict[int, Ticket] = {}
        commits, takes, waiting = [], [], []
        while self._queue and len(admitted) < self._rollout.prefill_rows:
            ticket = self._queue.popleft()
            group = ticket.conversation.group
            if group is not None:
                commits.append(group)
            elif take := self._take(ticket, admitted):
                takes.append(take)
                _, group, _ = take
            else:
                waiting.append(ticket)
                continue
            usage.reused += self._cached[group]
            admitted[group] = ticket
        self._queue.extendleft(reversed(waiting))
        self._reset_histories(commits, takes)
        return admitted

    def _best_source(self, prompt: np.ndarray, admitted: dict[int, Ticket]) -> tuple[int, int]:
        """Returns the resident group that shares the longest prefix with `prompt`, and its length."""
        lengths = [
            0 if g in admitted else _common(opening, prompt) for g, opening in enumerate(self._openings)
        ]
        source = int(np.argmax(lengths))
        return source, lengths[source]

    def _take(self, ticket: Ticket, admitted: dict[int, Ticket]) -> tuple[int, int, int] | None:
        """Claims a free group for a new prompt: the source itself if it is free, else the one longest free.

        Returns (source, group, length of what they share), or None if the prompt has to wait.
        """
        if not self._free:
            return None
        prompt = np.asarray(ticket.conversation.ids[:-1], np.int32)
        source, shared = self._best_source(prompt, admitted)
        if any(_common(self._openings[g], prompt) > shared for g in admitted):
            return None
        group = source if shared and source in self._free else self._free[0]
        self._free.remove(group)
        self._cached[group], self._openings[group] = shared, prompt
        return source, group, shared

    def _reset_histories(self, commits: list[int], takes: list[tuple[int, int, int]]) -> None:
        if commits:
            self._state = self._sampler.commit(self._state, self._rows(commits, self._groups))
        if copies := [take for take in takes if take[2] and take[0] != take[1]]:
            sources, targets, lengths = (
                self._rows(column, self._groups) for column in zip(*copies, strict=True)
            )
            self._state = self._sampler.copy(self._state, sources, targets, lengths)
        if takes:
            _, targets, lengths = zip(*takes, strict=True)
            self._state = self._sampler.rewind(
                self._state, self._rows(targets, self._groups), self._rows(lengths, 0)
            )

    def _rows(self, values, padding: int) -> np.ndarray:
        """Returns int32 [R]: `values`, then padding."""
        rows = np.full(self._rollout.prefill_rows, padding, np.int32)
        rows[: len(values)] = values
        return rows

    def _prefill(self, params, admitted: dict[int, Ticket], usage: Usage) -> None:
        """Computes the uncached part of every prompt but its last token, then makes the slots ready."""
        width = self._rollout.prefill_tokens
        rest = {g: t.conversation.ids[self._cached[g] : -1] for g, t in admitted.items()}
        usage.prefilled += sum(map(len, rest.values()))
        while rest := {g: ids for g, ids in rest.items() if ids}:
            ids = np.zeros((self._rollout.prefill_rows, width), np.int32)
            for row, tokens in zip(ids, rest.values(), strict=False):
                row[: len(tokens[:width])] = tokens[:width]
            lengths = self._rows([len(tokens[:width]) for tokens in rest.values()], 0)
            self._state = self._sampler.extend(
                self._state, params, ids, self._rows(list(rest), self._groups), lengths
            )
            rest = {g: tokens[width:] for g, tokens in rest.items()}
        tickets = admitted.values()
        keys = np.zeros((self._rollout.prefill_rows, self._candidates, 2), np.uint32)
        keys[: len(tickets)] = [t.keys for t in tickets]
        self._state = self._sampler.start(
            self._state,
            self._rows(list(admitted), self._groups),
            self._rows([t.conversation.ids[-1] for t in tickets], 0),
            keys,
            self._rows([t.max_tokens for t in tickets], 0),
        )

    def _collect(self, usage: Usage) -> list[tuple[Ticket, list[Sample]]]:
        """Takes the groups out of which every candidate has stopped."""
        active, counts = jax.device_get((self._state.active, self._state.counts))
        done = [g for g in self._running if not active[g].any()]
        if not done:
            return []
        ids, logps = jax.device_get((self._state.ids, self._state.logps))
        finished = []
        for group in done:
            ticket = self._running.pop(group)
            samples = [
                self._sample(ids[group, c], logps[group, c], counts[group, c])
                for c in range(self._candidates)
            ]
            usage.decoded += sum(len(s.ids) for s in samples)
            self._cached[group] = len(ticket.conversation.ids) - 1 + len(samples[0].ids)
            ticket.conversation.group = group
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
        self._lanes = {1: _Lane(sampler, rollout.conversations, 1, team.row_tokens, turn, rollout)}
        if candidates > 1:
            self._lanes[candidates] = _Lane(
                sampler, rollout.requests, candidates, team.row_tokens, team.answerer_tokens, rollout
            )
        self._model, self._shardings = model, sharding.param_shardings(model, mesh)
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
        shapes = sharding.abstract_params(self._model)
        cast = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, self._model.config.dtype), shapes)
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
        """Runs one dispatch of every lane; returns the turns that finished. The caller appends the
        sampled ids to the conversation. An answer request with several candidates is released at once."""
        finished = []
        for candidates, lane in self._lanes.items():
            turns = lane.step(self._params, self._usage)
            if candidates > 1:
                for ticket, _ in turns:
                    self._release(ticket.conversation, lane)
            finished += turns
        return finished

    def release(self, conversation: Conversation) -> None:
        """Gives back the cache of a conversation that has ended; nothing happens if it holds none."""
        self._release(conversation, self._lanes[1])

    def _release(self, conversation: Conversation, lane: _Lane) -> None:
        if conversation.group is not None:
            lane.release(conversation.group)
            conversation.group = None

    def take_usage(self) -> Usage:
        """Returns what was done since the last call, and starts counting anew."""
        usage, self._usage = self._usage, Usage()
        return usage
