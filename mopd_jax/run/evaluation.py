"""Runs a team on questions, several attempts each, and records every attempt."""

import functools
import json
from collections.abc import Sequence

from etils import epath

from mopd_jax.config import Config
from mopd_jax.data.answers import contains, token_f1
from mopd_jax.data.questions import fingerprint
from mopd_jax.data.recall import gold_recall
from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.cache import CachedSearch
from mopd_jax.retrieval.search import Retriever
from mopd_jax.rollout.driver import Driver, Task, WorkflowFactory
from mopd_jax.run import hosts, parts
from mopd_jax.run.episode_metrics import first_answer_em
from mopd_jax.run.parts import Team
from mopd_jax.run.results import Conditions, Record, Result
from mopd_jax.team.episode import Episode, Question


def attempts_at(questions: Sequence[Question], attempts: int) -> list[Task]:
    """Returns every attempt at every question; attempts differ in their sampling keys alone."""
    return [Task(question, attempt, 0) for question in questions for attempt in range(attempts)]


def record(episode: Episode) -> Record:
    """Returns what an attempt came to. An aborted one counts as wrong and is marked."""
    answer = episode.answers[0] if episode.answers else ""
    golds = episode.question.answers
    rows: dict[str, dict[str, int]] = {}
    for row in episode.rows:
        statuses = rows.setdefault(row.role.value, {})
        statuses[row.status.value] = statuses.get(row.status.value, 0) + 1
    return Record(
        dataset=episode.question.dataset,
        split=episode.question.split,
        id=episode.question.id,
        attempt=episode.draw,
        answer=answer,
        em=first_answer_em(episode),
        f1=token_f1(answer, golds),
        containment=contains(answer, golds),
        recall=gold_recall(golds, [d for found in episode.documents for d in found]),
        searches=episode.searches,
        calls=episode.calls,
        input_tokens=episode.input_tokens,
        output_tokens=episode.output_tokens,
        aborted=episode.aborted,
        rows=rows,
    )


def conditions(config: Config, questions: Sequence[Question], retriever: str) -> Conditions:
    """Returns what must agree for two results to stand in one table."""
    limits = {name: value for name, value in vars(config.team).items() if isinstance(value, int)}
    del limits["candidates"]  # training only: an evaluation samples one answer
    return Conditions(fingerprint(questions), retriever, limits | {"k": config.retrieval.k})


class TooManyAborted(Refusal):
    """The searches of too many workflows failed: there is nothing sound to learn from or to report."""


def check_aborted(episodes: Sequence[Episode], limit: float, retriever: Retriever) -> None:
    """Raises `TooManyAborted` if failed searches aborted more than the share `limit` of the workflows."""
    share = sum(episode.aborted for episode in episodes) / len(episodes)
    if share > limit:
        raise TooManyAborted(
            f"{share:.0%} of the workflows were aborted by failed searches, retrieval.max_aborted_share is "
            f"{limit:.0%}: look at the retriever {retriever.identity}."
        )


def take_cache_hits(retriever: CachedSearch) -> dict[str, float]:
    """Returns, as a metric, the share of the queries since the last call whose results were remembered, over
    all processes; nothing where there were no queries. All processes call it at the same point."""
    asked, known = (sum(counts) for counts in zip(*hosts.gather(retriever.take_counts()), strict=True))
    return {"search/cache_hits": known / asked} if asked else {}


def load_team(config: Config) -> Team:
    """Returns the team that is evaluated, with its weights: those of `model.init`, and for the Searcher those
    of `model.searcher`, where there are any.

    Raises:
      Refusal: see `parts.open_beside` and `parts.make_team`.
    """
    policy, spec = parts.open_model(config.model.init, config), config.model.searcher
    searcher = parts.open_beside(policy, spec, config, "Searcher") if spec else None
    team = parts.make_team(config, policy, candidates=1, searcher=searcher)
    for engine, opened in ((team.engine, policy), (team.searcher, searcher)):
        if engine:
            engine.load(parts.load_params(opened, team.mesh, config.model.rollout, config.run.seed))
    return team


def evaluate_team(
    system: str,
    config: Config,
    driver: Driver,
    workflow: WorkflowFactory,
    questions: Sequence[Question],
    attempts: int,
) -> tuple[Result, list[Episode]]:
    """Returns one record per attempt, in the order of the questions, and the episodes behind them.

    Args:
      system: name of the result.
      config: limits and documents per search, which the result carries.
      driver: over engines that hold the weights to be evaluated.
      workflow: samples one answer per request.
      questions: all of them are asked, whatever the number of slots; processes share them out.
      attempts: independent attempts per question.

    Raises:
      TooManyAborted: the retriever failed too often for a sound result.
    """
    ask = functools.partial(driver.run, workflow)
    episodes = hosts.spread(ask, attempts_at(questions, attempts), together=attempts)
    check_aborted(episodes, config.retrieval.max_aborted_share, driver.retriever)
    asked_under = conditions(config, questions, driver.retriever.identity)
    return Result(system, config.run.seed, asked_under, tuple(map(record, episodes))), episodes


def write_episodes(episodes: Sequence[Episode], path: epath.PathLike) -> None:
    """Writes what every workflow did, one JSON line each: answers, queries, ids and titles of the documents
    found (titles repeat in a corpus), how rows ended."""
    epath.Path(path).write_text("".join(json.dumps(_shown(e), ensure_ascii=False) + "\n" for e in episodes))


def _shown(episode: Episode) -> dict:
    return {
        "dataset": episode.question.dataset,
        "id": episode.question.id,
        "attempt": episode.draw,
        "question": episode.question.text,
        "gold": episode.question.answers,
        "answers": episode.answers,
        "searches": [
            {
                "query": query,
                "documents": [{"id": d.id, "title": d.title} for d in found],
            }
            for query, found in zip(episode.queries, episode.documents, strict=True)
        ],
        "rows": [
            {
                "role": r.role.value,
                "turns": r.turns,
                "status": r.status.value,
                "reason": r.reason,
                "body": r.body,
            }
            for r in episode.rows
        ],
        "aborted": episode.aborted,
    }
