"""A tiny engine on random weights, one for all tests of a process, and one that speaks from a script."""

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from mopd_jax.config import RolloutConfig, TeamConfig
from mopd_jax.data import miniature
from mopd_jax.model import sharding
from mopd_jax.model.logprobs import token_logprobs
from mopd_jax.model.qwen3 import Qwen3
from mopd_jax.model.tokens import Tokens
from mopd_jax.rollout.engine import Conversation, Engine, Sample, Ticket
from mopd_jax.rollout.sampler import Sampler, SamplerState
from mopd_jax.team.episode import Stop
from tests.tiny_qwen3 import make_model, make_params, packed

TEAM = TeamConfig(leader_tokens=12, searcher_tokens=12, answerer_tokens=8, document_tokens=48, row_tokens=128)
ROLLOUT = RolloutConfig(conversations=4, requests=2, prefill_rows=3, prefill_tokens=8, decode_steps=4)
CANDIDATES = 5


@functools.cache
def tokens() -> Tokens:
    """Returns the tokens of the embedded world."""
    with tempfile.TemporaryDirectory() as folder:
        miniature.save_tokenizer(folder)
        return Tokens.from_folder(folder)


@functools.cache
def model() -> Qwen3:
    """Returns a model of three layers over the embedded world's vocabulary."""
    return make_model(vocab_size=tokens().vocab_size)


@functools.cache
def params(seed: int = 0) -> dict:
    """Returns weights that all show in the distributions; about one token in twenty ends a turn."""
    tree = make_params(model(), seed)
    head = 5 * tree["head"]["kernel"]
    tree["embed"]["embedding"] = tree["embed"]["embedding"].at[:, 0].add(2.0)
    tree["final_norm"]["scale"] = tree["final_norm"]["scale"].at[0].set(1.0)
    tree["head"]["kernel"] = head.at[0, tokens().end_of_turn_id].set(4.0)
    return tree


@functools.cache
def _engine() -> Engine:
    mesh = sharding.make_mesh((1, 1, 1), jax.devices()[:1])
    return Engine(model(), tokens().eos_ids, TEAM, CANDIDATES, ROLLOUT, mesh)


def fresh_engine(seed: int = 0) -> Engine:
    """Returns the one engine (compiling takes longer than all tests) without any cached prompt.

    Its lanes have 4 groups of 1 and 2 groups of 5 candidates; prompts are prefilled by 3 rows of 8 tokens,
    turns are decoded by 4 tokens.
    """
    _engine().load(params(seed))
    _engine().take_usage()
    return _engine()


def fresh_sampler() -> tuple[Sampler, SamplerState]:
    """Returns the engine's compiled programs, and an empty lane of 4 conversations of the engine's shape."""
    sampler = _engine()._lanes[1]._sampler
    turn = max(TEAM.leader_tokens, TEAM.searcher_tokens, TEAM.answerer_tokens)
    return sampler, sampler.init(ROLLOUT.conversations, 1, TEAM.row_tokens, turn)


@jax.jit
def _score(params, ids, positions, segments, source, targets):
    return token_logprobs(model(), params, ids, positions, segments, source, targets, chunk=16)[0]


def score(ids: Sequence[int], seed: int = 0) -> np.ndarray:
    """Returns what the learner's pass over packed rows thinks of `ids`: [len(ids)], 0 for the first."""
    length = TEAM.row_tokens
    row = packed(np.asarray(ids), length=length)
    source = np.arange(length - 1)[None]
    logps = np.asarray(_score(params(seed), *row, source, row[0][:, 1:]))[0]
    return np.concatenate([[0.0], logps])[: len(ids)]


def keys(number: int, candidates: int = 1) -> np.ndarray:
    """Returns the keys of a turn, other ones for each number."""
    return np.random.default_rng(number).integers(0, 2**32, (candidates, 2), np.uint32)


def prompt(number: int, length: int) -> list[int]:
    """Returns random ids of plain words, other ones for each number."""
    return np.random.default_rng(number).integers(1, 200, length).tolist()


def ask(
    engine: Engine, ids: Sequence[int] | Conversation, number: int, max_tokens: int = 12, candidates: int = 1
):
    """Submits a turn under the keys of `number`; returns its conversation."""
    conversation = ids if isinstance(ids, Conversation) else Conversation(list(ids))
    engine.submit(Ticket(conversation, keys(number, candidates), max_tokens))
    return conversation


def finished_turns(engine: Engine) -> Iterator[tuple[Ticket, list[Sample]]]:
    """Yields turns as they finish until nothing is left to do; fails rather than go on for ever."""
    for _ in range(1000):
        if not engine.busy:
            return
        yield from engine.step()
    raise AssertionError("The engine is busy and nothing ever finishes.")


def finish(engine: Engine) -> dict[int, list[Sample]]:
    """Finishes everything; returns the samples by `id` of their conversation, whose ids
    get the first candidate's."""
    samples = {}
    for ticket, turn in finished_turns(engine):
        samples[id(ticket.conversation)] = turn
        ticket.conversation.ids += turn[0].ids.tolist()
    return samples


@dataclass(frozen=True)
class Spoken:
    """One turn that the scripted engine was asked for."""

    conversation: Conversation
    prompt: list[int]
    """The conversation's ids at that time."""
    outputs: list[list[int]]
    """One per candidate."""
    keys: np.ndarray
    max_tokens: int


@dataclass
class ScriptedEngine:
    """Stands in for engine and model: `speak(prompt ids, candidate)` gives the ids of every turn.

    Like the real one it parks one-candidate conversations in a limited number of groups. It finishes
    `per_step` turns at a time, the last submitted first, and refuses to wait for ever.
    """

    speak: Callable[[list[int], int], list[int]]
    eos_ids: tuple[int, ...]
    groups: int = 1000
    per_step: int = 2
    log: list[Spoken] = field(default_factory=list)
    queue: list[Ticket] = field(default_factory=list)
    parked: set[int] = field(default_factory=set)
    """By `id`; a group's number does not matter here."""
    most_queued: int = 0
    recomputed: int = 0
    """Turns of conversations that had given their group back in between."""

    def submit(self, ticket: Ticket) -> None:
        self.queue.append(ticket)
        self.most_queued = max(self.most_queued, len(self.queue))

    def step(self) -> list[tuple[Ticket, list[Sample]]]:
        finished = []
        for ticket in self.queue[::-1]:
            if len(finished) < self.per_step and self._admit(ticket):
                finished.append((ticket, self._turn(ticket)))
        done = {id(ticket) for ticket, _ in finished}
        assert finished or not self.queue, "All groups are parked and nobody goes on: a deadlock."
        self.queue = [ticket for ticket in self.queue if id(ticket) not in done]
        return finished

    def release(self, conversation: Conversation) -> None:
        self.parked.discard(id(conversation))

    def _admit(self, ticket: Ticket) -> bool:
        if len(ticket.keys) == 1 and id(ticket.conversation) not in self.parked:
            if len(self.parked) == self.groups:
                return False
            self.parked.add(id(ticket.conversation))
            self.recomputed += any(spoken.conversation is ticket.conversation for spoken in self.log)
        return True

    def _turn(self, ticket: Ticket) -> list[Sample]:
        prompt = list(ticket.conversation.ids)
        outputs = [self.speak(prompt, c) for c in range(len(ticket.keys))]
        self.log.append(Spoken(ticket.conversation, prompt, outputs, ticket.keys, ticket.max_tokens))
        assert all(0 < len(ids) <= ticket.max_tokens for ids in outputs), outputs
        return [self._sample(np.asarray(ids, np.int32)) for ids in outputs]

    def _sample(self, ids: np.ndarray) -> Sample:
        stop = Stop.END if ids[-1] in self.eos_ids else Stop.LENGTH
        return Sample(ids, logps_of(ids), stop)


def logps_of(ids: Sequence[int]) -> np.ndarray:
    """Returns the log-probabilities that the scripted engine makes up, float32 [n], none of them 0."""
    return -(np.asarray(ids, np.float32) + 1) / 1000


def script(*said: list[int]) -> Callable[[list[int], int], list[int]]:
    """Returns a `speak` that says one turn after the other, candidates one by one, whatever the prompt."""
    lines = iter(said)
    return lambda prompt, candidate: next(lines)
