"""A tiny engine on random weights, one for all tests of a process, and one that speaks from a script."""

import dataclasses
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
from mopd_jax.rollout.engine import Engine, Sample, Ticket
from mopd_jax.rollout.places import Conversation, Moves, Places
from mopd_jax.rollout.sampler import Sampler, SamplerState
from mopd_jax.team.episode import Stop
from tests.tiny_qwen3 import make_model, make_params, packed

TEAM = TeamConfig(leader_tokens=12, searcher_tokens=12, answerer_tokens=8, document_tokens=48, row_tokens=128)
ROLLOUT = RolloutConfig(
    conversations=4, parked=3, requests=2, prefill_rows=3, prefill_tokens=8, decode_steps=4
)
CANDIDATES = 5


@functools.cache
def tokens() -> Tokens:
    """Returns the tokens of the embedded world."""
    with tempfile.TemporaryDirectory() as folder:
        miniature.save_tokenizer(folder)
        return Tokens.from_folder(folder)


@functools.cache
def model() -> Qwen3:
    """Returns a model of three layers over the embedded world's vocabulary, padded to an even size."""
    return make_model(vocab_size=tokens().vocab_size + tokens().vocab_size % 2)


@functools.cache
def params(seed: int = 0) -> dict:
    """Returns weights that all show in the distributions; about one token in twenty ends a turn, and none is
    padding of the vocabulary."""
    tree = make_params(model(), seed)
    head = 5 * tree["head"]["kernel"]
    tree["embed"]["embedding"] = tree["embed"]["embedding"].at[:, 0].add(2.0)
    tree["final_norm"]["scale"] = tree["final_norm"]["scale"].at[0].set(1.0)
    tree["head"]["kernel"] = (
        head.at[0, tokens().end_of_turn_id].set(4.0).at[0, tokens().vocab_size :].set(-100.0)
    )
    return tree


@functools.cache
def engine_like(
    rollout_changes: tuple[tuple[str, int], ...] = (), tensor: int = 1, number: int = 0
) -> Engine:
    """Returns an engine without weights: `ROLLOUT` with some fields changed, on so many devices; another one
    for each number."""
    rollout = dataclasses.replace(ROLLOUT, **dict(rollout_changes))
    return Engine(model(), tokens().eos_ids, TEAM, CANDIDATES, rollout, sharding.local_mesh(tensor))


def fresh_engine(seed: int = 0, number: int = 0) -> Engine:
    """Returns the engine of this number (compiling takes longer than all tests) without any cached prompt.

    Its lanes have 4 slots of 1 candidate with 3 parking places, and 2 slots of 5 candidates; prompts are
    prefilled by 3 rows of 8 tokens, turns are decoded by 4 tokens.
    """
    engine = engine_like(number=number)
    engine.load(params(seed))
    engine.take_usage()
    return engine


def fresh_sampler(candidates: int = 1) -> tuple[Sampler, SamplerState]:
    """Returns the engine's compiled programs, and one of its lanes, empty."""
    lane = engine_like()._lanes[candidates]
    return lane._sampler, lane._sampler.init(*lane._sizes)


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
    """Stands in for sampler and model: `speak(prompt ids, candidate)` gives the ids of every turn.

    Who holds a cache where is kept in the real engine's books. It finishes `per_step` turns at a time, the
    last seated first, and refuses to wait for ever.
    """

    speak: Callable[[list[int], int], list[int]]
    eos_ids: tuple[int, ...]
    slots: int = 16
    parked: int = 16
    per_step: int = 2
    log: list[Spoken] = field(default_factory=list)
    queue: list[Ticket] = field(default_factory=list)
    seated: list[Ticket] = field(default_factory=list)
    evicted: int = 0

    def __post_init__(self):
        self.places = Places(self.slots, self.parked, row=4096)

    def submit(self, ticket: Ticket) -> None:
        if len(ticket.keys) > 1:
            self.release(ticket.conversation)
        self.places.ask(ticket.conversation)
        self.queue.append(ticket)

    def step(self) -> list[tuple[Ticket, list[Sample]]]:
        while self._seat():
            pass
        assert self.seated or not self.queue, "Nobody can be seated and nobody speaks: a deadlock."
        ended = self.seated[-self.per_step :][::-1]
        self.seated = self.seated[: -self.per_step]
        return [(ticket, self._turn(ticket)) for ticket in ended]

    def release(self, conversation: Conversation) -> None:
        self.places.release(conversation)

    def _seat(self) -> bool:
        """One round of admissions; returns whether it admitted anybody."""
        moves, queue, self.queue = Moves(), self.queue, []
        for ticket in queue:
            if len(ticket.keys) > 1 or self.places.seat(ticket.conversation, moves) is not None:
                self.seated.append(ticket)
            else:
                self.queue.append(ticket)
        self.evicted += moves.evicted
        return len(self.queue) < len(queue)

    def _turn(self, ticket: Ticket) -> list[Sample]:
        prompt = list(ticket.conversation.ids)
        outputs = [self.speak(prompt, c) for c in range(len(ticket.keys))]
        self.log.append(Spoken(ticket.conversation, prompt, outputs, ticket.keys, ticket.max_tokens))
        assert all(0 < len(ids) <= ticket.max_tokens for ids in outputs), outputs
        if len(ticket.keys) == 1:
            self.places.finish(ticket.conversation.group, len(prompt) - 1 + len(outputs[0]))
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
