"""Runs many workflows over one engine, or two, and one retriever, and keeps their conversations as rows."""

import collections
import hashlib
import itertools
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from absl import logging

from mopd_jax.config import RolloutConfig, Workflow
from mopd_jax.model.tokens import Tokens
from mopd_jax.retrieval.search import Document, Retriever, SearchError
from mopd_jax.rollout.engine import Engine, Sample, Ticket
from mopd_jax.rollout.places import Conversation
from mopd_jax.rollout.render import Renderer
from mopd_jax.team.episode import (
    Episode,
    Outcome,
    Question,
    Reply,
    Request,
    Role,
    Row,
    SampleRequest,
    SearchRequest,
    Session,
    Stop,
    Turn,
)

WorkflowFactory = Callable[[str], Generator[Request, Reply, Outcome]]
"""Starts a workflow on a question's text."""


@dataclass(frozen=True)
class Fork:
    """The beginning that a workflow shares with an earlier one, which held a single conversation."""

    episode: Episode
    turns: int
    """Complete steps that are shared: turns, and the searches that they asked for."""


@dataclass(frozen=True)
class Task:
    """One workflow to run."""

    question: Question
    draw: int
    workflow: int
    fork: Fork | None = None
    """Where it branches off; None: it starts afresh."""


@dataclass
class _Transcript:
    """One conversation as it grows; one per candidate once an answer request has been sampled."""

    role: Role
    conversation: Conversation = field(default_factory=Conversation)
    mask: list[bool] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    turns: int = 0
    closed: bool = True
    """The last sampled id is the template's own end of turn."""

    def add_prompt(self, ids: Sequence[int]) -> None:
        self.conversation.ids.extend(ids)
        self.mask.extend([False] * len(ids))
        self.logps.extend([0.0] * len(ids))

    def add_sample(self, sample: Sample, end_of_turn: int) -> None:
        self.conversation.ids.extend(sample.ids.tolist())
        self.mask.extend([True] * len(sample.ids))
        self.logps.extend(sample.logps.tolist())
        self.turns += 1
        self.closed = sample.ids[-1] == end_of_turn

    def fork(self) -> "_Transcript":
        copy = Conversation(list(self.conversation.ids))
        return _Transcript(self.role, copy, list(self.mask), list(self.logps), self.turns, self.closed)

    def row(self, session: Session) -> Row:
        return Row(
            role=session.role,
            session=session.session,
            candidate=session.candidate,
            status=session.status,
            searches=session.searches,
            body=session.body,
            ids=np.asarray(self.conversation.ids, np.int32),
            mask=np.asarray(self.mask, bool),
            logps=np.asarray(self.logps, np.float32),
            turns=self.turns,
            reason=session.reason,
            task=session.task,
        )


class _Live:
    """One workflow in progress: its generator, its conversations, its counts."""

    def __init__(self, task: Task, generator: Generator[Request, Reply, Outcome]):
        self.task, self._generator = task, generator
        self.sessions: dict[int, list[_Transcript]] = {}
        self.request: Request | None = next(generator)
        """What the workflow waits for; None once it has ended."""
        self.episode = Episode(task.question, task.draw, task.workflow)

    def resume(self, reply: Reply) -> None:
        """Hands the reply over and takes the next request, or the outcome."""
        try:
            self.request = self._generator.send(reply)
        except StopIteration as stop:
            self.request = None
            self._finish(stop.value)

    def _finish(self, outcome: Outcome) -> None:
        self.episode.rows = [self.sessions[s.session][s.candidate].row(s) for s in outcome.sessions]
        self.episode.answers, self.episode.searches = outcome.answers, outcome.searches

    @property
    def holds(self) -> bool:
        """Whether it may hold caches of conversations: not any more while several answers are sampled."""
        request = self.request
        return request is not None and (isinstance(request, SearchRequest) or request.candidates == 1)

    def found(self, documents: tuple[Document, ...]) -> None:
        """Hands over what the search that it waits for has found."""
        self.episode.queries += (self.request.query,)
        self.episode.documents += (documents,)
        self.resume(documents)

    def abort(self) -> None:
        self._generator.close()
        self.request = None
        self.episode.aborted = True


def sampling_key(seed: int, task: Task, role: Role, session: int, turn: int, candidate: int) -> np.ndarray:
    """Returns uint32 [2], the key of one turn: a hash of everything that tells it from any other."""
    q = task.question
    parts = (seed, q.dataset, q.split, q.id, task.draw, task.workflow, role.value, session, turn, candidate)
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return np.frombuffer(digest, np.uint32)


class _Searches:
    """Answers searches on a thread of their own, one batch after the other: what is asked while a batch is
    out goes into the next."""

    def __init__(self, retriever: Retriever, k: int, thread: Executor):
        self._retriever, self._k, self._thread = retriever, k, thread
        self._asked: list[_Live] = []
        self._out: list[_Live] = []
        self._found: Future | None = None

    @property
    def lives(self) -> list[_Live]:
        """Workflows that wait for documents."""
        return self._asked + self._out

    def ask(self, live: _Live) -> None:
        self._asked.append(live)

    def send(self) -> None:
        """Starts the next batch, unless one is out or nothing was asked."""
        if self._asked and self._found is None:
            self._out, self._asked = self._asked, []
            queries = [live.request.query for live in self._out]
            self._found = self._thread.submit(self._retriever.search, queries, self._k)

    def take(self, wait: bool) -> list[_Live]:
        """Hands the documents of the batch that is out to its workflows, once they are there or after a
        `wait`; returns those that go on with them, and those that a failed search has aborted."""
        if self._found is None or not (wait or self._found.done()):
            return []
        answered, future = self._out, self._found
        self._out, self._found = [], None
        try:
            found = future.result()
        except SearchError as error:
            logging.warning("%d workflows aborted: %s", len(answered), error)
            for live in answered:
                live.abort()
            return answered
        for live, documents in zip(answered, found, strict=True):
            live.found(documents)
        return answered


def alive_workflows(rollout: RolloutConfig, workflow: Workflow, own_searcher: bool = False) -> int:
    """Returns how many workflows may hold caches at once so that none is ever given up for lack of a place.

    A workflow holds the cache of whoever speaks or waits for documents, and in a hierarchy the Leader's
    beside it: before anybody else speaks the others are released, and an answer request of several
    candidates holds none. With at most G + Q - 1 of the G + Q groups taken, one is free whenever a
    conversation needs a slot: either a slot, or a place to park who is idle in one. If all slots speak, it
    waits, and the first turn to end leaves an idle slot. Without parking places (Q = 0) nobody ever moves,
    and the last group may be taken too.

    With `own_searcher` there are two such engines, and of a workflow each holds one cache at most: the
    Leader's or the Answerer's here, the Searcher's there. What is said above is then true of each.
    """
    groups = rollout.conversations + rollout.parked - (1 if rollout.parked else 0)
    return max(1, groups // (2 if workflow is Workflow.HIERARCHY and not own_searcher else 1))


class Driver:
    """Runs workflows to their ends.

    Args:
      engine: samples the turns.
      retriever: answers the searches, `k` documents each.
      renderer: turns environment messages into ids.
      tokens: decodes sampled turns.
      searcher: samples the Searcher's turns, from weights of its own; None: `engine` does.
      row_tokens: a turn that might pass this length is not sampled (`Stop.CONTEXT`).
      alive: workflows that hold caches of an engine at once, see `alive_workflows`.
      seed: enters every sampling key.
    """

    def __init__(
        self,
        engine: Engine,
        retriever: Retriever,
        renderer: Renderer,
        tokens: Tokens,
        *,
        searcher: Engine | None = None,
        k: int,
        row_tokens: int,
        alive: int,
        seed: int,
    ):
        self._engines = (engine,) if searcher is None else (engine, searcher)
        self.retriever, self._renderer, self._tokens = retriever, renderer, tokens
        self._k, self._row_tokens, self._alive, self._seed = k, row_tokens, alive, seed

    def run(self, workflow: WorkflowFactory, tasks: Sequence[Task]) -> list[Episode]:
        """Runs `workflow` on every task; returns the episodes in the tasks' order.

        A workflow whose search fails for good comes back with `aborted` set and no rows. When a search is
        answered does not change what is sampled.
        """
        lives = [self._start(workflow, task) for task in tasks]
        pending = collections.deque(lives)
        sampling: dict[int, _Live] = {}
        with ThreadPoolExecutor(1) as thread:
            searches = _Searches(self.retriever, self._k, thread)
            while pending or sampling or searches.lives:
                ready = self._sample(sampling)
                ready += searches.take(wait=not (sampling or ready))
                holding = sum(live.holds for live in (*sampling.values(), *searches.lives, *ready))
                room = max(0, self._alive - holding)
                ready += [pending.popleft() for _ in range(min(room, len(pending)))]
                for live in ready:
                    self._submit(live, sampling)
                    if isinstance(live.request, SearchRequest):
                        searches.ask(live)
                searches.send()
        return [live.episode for live in lives]

    def _start(self, workflow: WorkflowFactory, task: Task) -> _Live:
        live = _Live(task, workflow(task.question.text))
        if task.fork:
            self._replay(live, task.fork)
        return live

    def _replay(self, live: _Live, fork: Fork) -> None:
        """Feeds a branch the replies of the steps that it shares; they are its rows' tokens, not its cost."""
        (row,) = fork.episode.rows
        transcript = _Transcript(row.role)
        live.sessions[row.session] = [transcript]
        for turn, (start, stop) in enumerate(row.turn_bounds()[: fork.turns]):
            ended = Stop.END if row.ids[stop - 1] in self._tokens.eos_ids else Stop.LENGTH
            sample = Sample(row.ids[start:stop], row.logps[start:stop], ended)
            transcript.add_prompt(row.ids[len(transcript.conversation.ids) : start].tolist())
            transcript.add_sample(sample, self._tokens.end_of_turn_id)
            live.resume((Turn(self._text(sample), ended, start),))
            live.found(fork.episode.documents[turn])

    def _submit(self, live: _Live, sampling: dict[int, _Live]) -> None:
        """Queues the turn the workflow asks for; one without room for it is told so at once."""
        while isinstance(request := live.request, SampleRequest):
            self._release(live, request)
            transcript = live.sessions.setdefault(request.session, [_Transcript(request.role)])[0]
            prompt = self._prompt(transcript, request)
            if len(transcript.conversation.ids) + len(prompt) + request.max_tokens <= self._row_tokens:
                transcript.add_prompt(prompt)
                ticket = Ticket(transcript.conversation, self._keys(live, request), request.max_tokens)
                self._engine_of(request.role).submit(ticket)
                sampling[id(transcript.conversation)] = live
                return
            live.sessions[request.session] = [transcript.fork() for _ in range(request.candidates)]
            self._engine_of(request.role).release(transcript.conversation)
            live.resume((Turn("", Stop.CONTEXT),) * request.candidates)
        if live.request is None:
            self._release(live, None)
            live.sessions.clear()

    def _release(self, live: _Live, speaking: SampleRequest | None) -> None:
        """Gives back the caches of conversations that have ended: all but the one that speaks, and a
        Leader's while a Searcher works for it."""
        for session, (transcript, *_) in live.sessions.items():
            speaks = speaking is not None and session == speaking.session
            waits = speaking is not None and speaking.role is Role.SEARCHER and transcript.role is Role.LEADER
            if not (speaks or waits):
                self._engine_of(transcript.role).release(transcript.conversation)

    def _engine_of(self, role: Role) -> Engine:
        """Returns the engine that samples a role's turns: the Searcher's is the last, its own or not."""
        return self._engines[-1 if role is Role.SEARCHER else 0]

    def _prompt(self, transcript: _Transcript, request: SampleRequest) -> list[int]:
        if not transcript.conversation.ids:
            return self._renderer.open(request.messages)
        (message,) = request.messages
        return self._renderer.reply(message, transcript.closed)

    def _keys(self, live: _Live, request: SampleRequest) -> np.ndarray:
        turn = live.sessions[request.session][0].turns
        return np.stack(
            [
                sampling_key(self._seed, live.task, request.role, request.session, turn, candidate)
                for candidate in range(request.candidates)
            ]
        )

    def _sample(self, sampling: dict[int, _Live]) -> list[_Live]:
        """Takes the finished turns from the engines; returns the workflows that go on with them."""
        ready = []
        for ticket, samples in itertools.chain.from_iterable(engine.step() for engine in self._engines):
            live = sampling.pop(id(ticket.conversation))
            prompt = len(ticket.conversation.ids)
            self._record(live, samples)
            live.resume(tuple(Turn(self._text(sample), sample.stop, prompt) for sample in samples))
            ready.append(live)
        return ready

    def _record(self, live: _Live, samples: list[Sample]) -> None:
        """Writes samples into the conversation they belong to, one copy of it per candidate."""
        first = live.sessions[live.request.session][0]
        prompt = len(first.conversation.ids)
        transcripts = [first] + [first.fork() for _ in samples[1:]]
        live.sessions[live.request.session] = transcripts
        for transcript, sample in zip(transcripts, samples, strict=True):
            transcript.add_sample(sample, self._tokens.end_of_turn_id)
        live.episode.calls += len(samples)
        live.episode.input_tokens += prompt * len(samples)
        live.episode.output_tokens += sum(len(sample.ids) for sample in samples)

    def _text(self, sample: Sample) -> str:
        return self._tokens.decode(sample.ids[:-1] if sample.stop is Stop.END else sample.ids)
