"""What each row of an episode earns."""

from mopd_jax.config import AgentReward, LearnConfig, Objective, PenaltyScope, SearcherReward
from mopd_jax.data.answers import exact_match
from mopd_jax.objective_rules import REWARDED
from mopd_jax.team.episode import Episode, Role, Row, Status

PENALTY = -1.0
"""Total reward of a malformed row, in place of everything else, the KL term included [P]."""
ANSWERING = (Role.ANSWERER, Role.AGENT)
"""Roles whose last word is an answer."""


def team_outcome(episode: Episode) -> float:
    """Returns E: 1.0 if any candidate's answer is right, else 0.0; 0.0 without an answer request."""
    return max((_exact_match(episode, row) for row in episode.rows), default=0.0)


def objective(episode: Episode, row: Row, learn: LearnConfig) -> Objective:
    """Returns what the row learns from: its role's objective, nothing in an aborted workflow."""
    if episode.aborted:
        return Objective.NONE
    by_role = {
        Role.LEADER: learn.leader,
        Role.SEARCHER: learn.searcher,
        Role.ANSWERER: learn.answerer,
        Role.AGENT: learn.agent,
    }
    return by_role[row.role]


def penalised(episode: Episode, row: Row, learn: LearnConfig) -> bool:
    """Returns whether −1 replaces the row's whole reward.

    So it is for a malformed row and for one cut at the token limit before its action closed; under
    `PenaltyScope.WORKFLOW` also for every Searcher row of a workflow with such a Searcher row [D].
    A row that ended for want of context keeps its ordinary reward; the graded reward knows no −1.
    """
    if row.role is Role.AGENT and learn.agent_reward is AgentReward.GRADED:
        return False
    if row.role is Role.SEARCHER and learn.penalty_scope is PenaltyScope.WORKFLOW:
        return any(_ill_formed(other) for other in episode.rows if other.role is Role.SEARCHER)
    return _ill_formed(row)


def rewards(episode: Episode, learn: LearnConfig) -> list[float | None]:
    """Returns one reward per row of the episode, None where the row's role has none or its judge
    gave none.

    Answerer candidate and single agent: its own EM [P]. Searcher: 0.9 E + 0.1 a [P], or E. Leader:
    0.9 E + 0.1 min(6, s)/6 [P], or E. Searcher with a critic: the judge's score. See `penalised` for the −1.
    """
    outcome = team_outcome(episode)

    def reward(row: Row) -> float | None:
        aim = objective(episode, row, learn)
        if aim not in REWARDED:
            return None
        if penalised(episode, row, learn):
            return PENALTY
        if aim is Objective.CRITIC:
            return row.score
        if row.role is Role.AGENT and learn.agent_reward is AgentReward.GRADED:
            return _graded(episode, row)
        if row.role in ANSWERING:
            return _exact_match(episode, row)
        if row.role is Role.SEARCHER:
            activity = learn.searcher_reward is SearcherReward.ACTIVITY
            return 0.9 * outcome + 0.1 * _activity(row) if activity else outcome
        return 0.9 * outcome + 0.1 * min(6, episode.searches) / 6 if learn.leader_bonus else outcome

    return [reward(row) for row in episode.rows]


def _ill_formed(row: Row) -> bool:
    return row.status in (Status.MALFORMED, Status.LENGTH)


def _exact_match(episode: Episode, row: Row) -> float:
    if row.role not in ANSWERING or row.status is not Status.FINISHED:
        return 0.0
    return exact_match(row.body, episode.question.answers)


def _graded(episode: Episode, row: Row) -> float:
    """Tree-GRPO's reward [D]: 1 for the right answer in the right format, 0.8 in a wrong one; 0.2 for the
    right format alone, 0.1 for any answer, else 0."""
    if row.status is Status.FINISHED:
        return 1.0 if _exact_match(episode, row) else 0.2
    if not row.body:
        return 0.0
    return 0.8 if exact_match(row.body, episode.question.answers) else 0.1


def _activity(row: Row) -> float:
    """a: 0.5 for exactly one search then a summary, 1.0 for two or more then a summary, else 0 [P]."""
    if row.status is not Status.FINISHED:
        return 0.0
    return 0.5 * min(2, row.searches)
