"""Where a phase's batches come from: demonstrations to imitate, or the team's own episodes.

Both give the same thing, packed rows and the streams of the single loss; a batch is a function of
(config, step, weights) alone, so that a run can stop and go on at any step.
"""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from mopd_jax.config import Config, Kind
from mopd_jax.data.demonstrations import Conversation, FileDemonstrations
from mopd_jax.data.questions import QuestionSource
from mopd_jax.learn.advantages import RowScores, flatten, token_advantages
from mopd_jax.learn.loss import Streams
from mopd_jax.learn.score import Scorer
from mopd_jax.learn.streams import TokenRows, imitation_streams, pack_rows, policy_streams, twin_keys
from mopd_jax.model import sharding
from mopd_jax.model.tokens import Tokens
from mopd_jax.refusal import Refusal
from mopd_jax.rollout.driver import Task
from mopd_jax.rollout.render import Renderer
from mopd_jax.rollout.tree import Grown, grow
from mopd_jax.run import hosts, parts
from mopd_jax.run.alarms import check_collapse
from mopd_jax.run.episode_metrics import Metrics, behaviour, learning, tree_costs
from mopd_jax.run.evaluation import check_aborted, take_cache_hits
from mopd_jax.run.judging import Judge, judge_sessions, make_judge
from mopd_jax.run.metrics import Stopwatch
from mopd_jax.run.parts import Opened, Team
from mopd_jax.team.episode import Message, Row, Status


@dataclass(frozen=True)
class LearnerBatch:
    """One step's work for the learner."""

    rows: Sequence[Row]
    packed: TokenRows
    streams: list[Streams]
    metrics: Metrics = field(default_factory=dict)


class BatchSource(Protocol):
    """Gives the batch of a step."""

    def batch(self, step: int, params, watch: Stopwatch) -> LearnerBatch:
        """Returns the batch of `step`; `params` are the current weights, `watch` takes the times."""
        ...


def render(conversation: Conversation, renderer: Renderer, tokens: Tokens) -> Row:
    """Returns a demonstration as a row: the assistant's turns and their end-of-turn are to be learnt."""
    ids: list[int] = []
    mask: list[bool] = []
    pending: list[Message] = []

    def add(new: Sequence[int], learnt: bool) -> None:
        ids.extend(new)
        mask.extend([learnt] * len(new))

    for item in conversation.messages:
        if isinstance(item, Message):
            pending.append(item)
            continue
        add(renderer.reply(pending[0], closed=True) if ids else renderer.open(pending), False)
        add([*tokens.encode(item), tokens.end_of_turn_id], True)
        pending = []
    return Row(
        role=conversation.role,
        session=0,
        candidate=0,
        status=Status.FINISHED,
        searches=0,
        body="",
        ids=np.asarray(ids, np.int32),
        mask=np.asarray(mask, bool),
        logps=np.zeros(len(ids), np.float32),
    )


class Imitation:
    """Batches of demonstrations: the supervised warm-up."""

    def __init__(self, config: Config, demonstrations, renderer: Renderer, tokens: Tokens, shards: int):
        self._config, self._demonstrations = config, demonstrations
        self._renderer, self._tokens, self._shards = renderer, tokens, shards
        if isinstance(demonstrations, FileDemonstrations):
            self._check_lengths(demonstrations)

    def _check_lengths(self, demonstrations: FileDemonstrations) -> None:
        """Refuses a conversation that fits no row before the first step, not when a step draws it."""
        limit = self._config.learn.row_buckets[-1]
        for number, conversation in enumerate(demonstrations.conversations, 1):
            length = len(render(conversation, self._renderer, self._tokens).ids)
            if length > limit:
                raise Refusal(
                    f"Conversation {number} of data.demonstrations ({conversation.role.value}) has {length} "
                    f"tokens, the longest of learn.row_buckets holds {limit}: shorten or drop it."
                )

    def batch(self, step: int, params, watch: Stopwatch) -> LearnerBatch:
        """See `BatchSource`; the weights do not matter."""
        with watch("data"):
            conversations = self._demonstrations.batch(step, self._config.train.questions)
            rows = [render(c, self._renderer, self._tokens) for c in conversations]
            packed = pack_rows(rows, self._config.learn, self._shards)
            return LearnerBatch(rows, packed, imitation_streams(rows, packed))


class Reinforcement:
    """Batches of the team's own episodes: roll out → judge → score → advantages."""

    def __init__(
        self,
        config: Config,
        questions: QuestionSource,
        team: Team,
        scorer: Scorer,
        judge: Judge | None,
        shards: int,
    ):
        self._config, self._questions = config, questions
        self._engine, self._driver, self._retriever = team.engine, team.driver, team.retriever
        self._workflow = parts.make_workflow(config.team, config.team.candidates)
        self._scorer, self._judge, self._shards = scorer, judge, shards

    def batch(self, step: int, params, watch: Stopwatch) -> LearnerBatch:
        """See `BatchSource`. Raises `TooManyAborted` where too many searches failed, `SearchCollapse` where
        hardly a workflow searches."""
        learn = self._config.learn
        with watch("rollout"):
            self._engine.load(params)
            grown = hosts.spread(self._grow, self._draws(step), together=1)
            self._engine.unload()
        episodes = [episode for trees in grown for episode in trees.leaves]
        check_aborted(episodes, self._config.retrieval.max_aborted_share, self._retriever)
        behaved = behaviour(episodes) | (tree_costs(grown) if self._config.tree.rounds else {})
        check_collapse(behaved, self._config.train)
        if self._judge:
            with watch("judge"):
                episodes = judge_sessions(episodes, self._judge, self._config)
        rows = [row for _, row in flatten(episodes)]
        packed = pack_rows(rows, learn, self._shards, twin_keys(episodes))
        with watch("score"):
            scores, entropies = self._score(params, packed, len(rows))
        advantages = token_advantages(episodes, learn, scores)
        streams = policy_streams(rows, packed, advantages, [s.old for s in scores], learn)
        metrics = behaved | learning(episodes, learn, scores, entropies, advantages)
        return LearnerBatch(
            rows,
            packed,
            streams,
            metrics | self._usage() | take_cache_hits(self._retriever) | {"episodes_crc32": _digest(rows)},
        )

    def _draws(self, step: int) -> list[list[Task]]:
        train = self._config.train
        draws = self._questions.batch(step, train.questions)
        return [[Task(question, draw, w) for w in range(train.workflows)] for question, draw in draws]

    def _grow(self, draws: Sequence[Sequence[Task]]) -> list[Grown]:
        """Runs the workflows of each draw; those of a single agent may branch."""
        run = functools.partial(self._driver.run, self._workflow)
        return grow(run, draws, self._config.tree, self._config.run.seed)

    def _score(self, params, packed: TokenRows, count: int) -> tuple[list[RowScores], list[np.ndarray]]:
        """Returns the fused pass' log-probabilities and entropies, per row of the batch."""
        scored = [jax.device_get(self._scorer(params, micro)) for micro in packed.batch.micros]
        old = packed.gather([student.logps for student, _ in scored], count)
        entropies = packed.gather([student.entropy for student, _ in scored], count)
        frozen = {
            name: packed.gather([others[name].logps for _, others in scored], count) for name in scored[0][1]
        }
        teacher, reference = self._config.model.teacher, self._config.model.reference
        return [
            RowScores(
                old=old[i],
                teacher=frozen[teacher][i] if teacher else None,
                reference=frozen[reference][i] if reference else None,
            )
            for i in range(count)
        ], entropies

    def _usage(self) -> Metrics:
        """Of the engines of all processes together."""
        usages = [vars(usage) for usage in hosts.gather(self._engine.take_usage())]
        total = {name: sum(usage[name] for usage in usages) for name in usages[0]}
        return {
            "engine/utilisation": total["decoded"] / max(1, total["slot_steps"]),
            "engine/prefilled": total["prefilled"],
            "engine/reused": total["reused"],
            "engine/decoded": total["decoded"],
            "engine/evicted": total["evicted"],
        }


def _digest(rows: Sequence[Row]) -> int:
    """A checksum of all sampled ids and log-probabilities: two runs that agree in it sampled the same."""
    return zlib.crc32(b"".join(stream.tobytes() for row in rows for stream in (row.ids, row.mask, row.logps)))


def make_source(config: Config, student: Opened, team: Team, mesh: Mesh) -> BatchSource:
    """Returns the batches of the configured kind of training; all frozen models are loaded here."""
    shards = sharding.row_shards(mesh)
    if config.train.kind is Kind.SUPERVISED:
        renderer = parts.make_renderer(config, student.tokens)
        return Imitation(config, parts.load_demonstrations(config), renderer, student.tokens, shards)
    questions = parts.question_source(config)
    frozen = parts.load_frozen(config, student, mesh)
    scorer = Scorer(student.model, frozen, config.learn.logit_chunk, mesh)
    return Reinforcement(config, questions, team, scorer, make_judge(config, team, mesh), shards)


def decoded(row: Row, tokens: Tokens) -> tuple[str, list[tuple[str, bool]]]:
    """Returns a row's title and its text as spans (text, generated): what the loss sees of it."""
    cuts = np.flatnonzero(np.diff(row.mask)) + 1
    parts_ids, parts_mask = np.split(row.ids, cuts), np.split(row.mask, cuts)
    spans = [(tokens.decode(ids), bool(mask[0])) for ids, mask in zip(parts_ids, parts_mask, strict=True)]
    return f"{row.role.value}, {row.status.value}", spans


def speed(batch: LearnerBatch, seconds: dict[str, float]) -> Metrics:
    """Returns a step's seconds by phase, and tokens per second of sampling, scoring and updating.

    Sampled tokens count when the team sampled them, the others when the learner computes them: equal
    candidates once, padding never.
    """
    trained = sum(int((micro.segments > 0).sum()) for micro in batch.packed.batch.micros)
    sampled = sum(int(row.mask.sum()) for row in batch.rows)
    counts = {"rollout": sampled, "score": trained, "update": trained}
    return {f"seconds/{phase}": s for phase, s in seconds.items()} | {
        f"tokens_per_s/{phase}": counts[phase] / seconds[phase] for phase in counts if phase in seconds
    }
