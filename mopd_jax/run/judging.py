"""Scores for the sessions of a Searcher that learns from a judge (`learn.searcher = critic`)."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from mopd_jax.config import SCRIPTED, Config, LearnConfig
from mopd_jax.data import miniature_judge
from mopd_jax.learn.rewards import penalised
from mopd_jax.rollout.driver import Driver, Task
from mopd_jax.rollout.engine import Engine
from mopd_jax.run import hosts, parts
from mopd_jax.run.parts import Team
from mopd_jax.team import critic
from mopd_jax.team.critic import Case
from mopd_jax.team.episode import Episode, Role, Row


@dataclass(frozen=True)
class Judged:
    """One session that is to be judged, and where it comes from."""

    episode: Episode
    row: Row
    case: Case


Judge = Callable[[Sequence[Judged]], list[int | None]]
"""Gives each session a whole number from 0 to 10, None where its replies cannot be read. All processes call
it with the same sessions and get the same scores."""


def judge_sessions(episodes: Sequence[Episode], judge: Judge, config: Config) -> list[Episode]:
    """Returns the episodes with the judge's score / 10 on every Searcher row that keeps its reward."""
    no_result = parts.make_prompts(config.team).no_result
    sessions = [s for episode in episodes for s in _sessions(episode, config.learn, no_result)]
    scores = {id(s.row): score for s, score in zip(sessions, judge(sessions), strict=True)}

    def scored(row: Row) -> Row:
        score = scores.get(id(row))
        return row if score is None else dataclasses.replace(row, score=score / critic.BEST)

    return [dataclasses.replace(episode, rows=[*map(scored, episode.rows)]) for episode in episodes]


def _sessions(episode: Episode, learn: LearnConfig, no_result: str) -> Iterator[Judged]:
    """Sessions follow one another, so each has the next of the workflow's queries."""
    queries = iter(episode.queries)
    for row in episode.rows:
        asked = tuple(itertools.islice(queries, row.searches))
        if row.role is Role.SEARCHER and not penalised(episode, row, learn):
            case = Case(episode.question.text, row.task, asked, row.body or no_result)
            yield Judged(episode, row, case)


class ModelJudge:
    """A frozen language model that is prompted.

    Args:
      engine: samples its replies; it holds device memory only while it judges.
      driver: over that engine.
      params: the judge's weights.
      max_tokens: of a reply.
    """

    def __init__(self, engine: Engine, driver: Driver, params: Any, max_tokens: int):
        self._engine, self._driver, self._params = engine, driver, params
        self._workflow = functools.partial(critic.judge, max_tokens=max_tokens)

    def __call__(self, sessions: Sequence[Judged]) -> list[int | None]:
        """See `Judge`. Replies depend on the session's place in the run alone, as the team's turns do."""
        self._engine.load(self._params)
        work = functools.partial(self._driver.run, self._workflow)
        episodes = hosts.spread(work, [_task(session) for session in sessions], together=1)
        self._engine.unload()
        return [int(episode.answers[0]) if episode.answers else None for episode in episodes]


def _task(session: Judged) -> Task:
    episode, question = session.episode, session.episode.question
    case = dataclasses.replace(
        question, id=f"{question.id}#{session.row.session}", text=critic.describe(session.case), answers=()
    )
    return Task(case, episode.draw, episode.workflow)


def scripted(sessions: Sequence[Judged]) -> list[int | None]:
    """The embedded world's `Judge`: no model, see `data/miniature_judge.py`."""
    return [miniature_judge.score(session.case) for session in sessions]


def make_judge(config: Config, team: Team, mesh: Mesh) -> Judge | None:
    """Returns the configured judge, None without one.

    Args:
      config: `model.judge`, and the team's limits.
      team: whose devices the judge samples on.
      mesh: on which its weights lie meanwhile.

    Raises:
      Refusal: its folder is not what it should be, or its positions are too few for the team's rows.
    """
    spec = config.model.judge
    if spec in ("", SCRIPTED):
        return scripted if spec else None
    opened = parts.open_model(spec, config)
    parts.check_positions(config.team, opened)
    engine = parts.make_engine(config, opened.model, opened.tokens.eos_ids, 1, team.mesh)
    driver = parts.make_driver(config, engine, opened.tokens, team.retriever)
    params = parts.load_params(opened, mesh, config.model.frozen, config.run.seed)
    return ModelJudge(engine, driver, params, config.team.searcher_tokens)
