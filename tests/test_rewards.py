"""The reward table of the method, row by row."""

import pytest

from mopd_jax.config import AgentReward, LearnConfig, Objective, PenaltyScope, SearcherReward
from mopd_jax.learn.rewards import rewards, team_outcome
from mopd_jax.team.episode import Role, Status
from tests.fakes import make_answers, make_episode, make_question, make_row

STAGE_1 = LearnConfig(searcher=Objective.GRPO)
STAGE_2 = LearnConfig()


def searcher(searches=1, status=Status.FINISHED, session=0):
    return make_row(Role.SEARCHER, "s", status=status, searches=searches, session=session)


def leader(status=Status.FINISHED):
    return make_row(Role.LEADER, status=status)


def test_team_outcome_is_the_best_candidates():
    assert team_outcome(make_episode(*make_answers("Rome", "the Paris.", "Bonn"))) == 1.0
    assert team_outcome(make_episode(*make_answers("Rome", "Bonn"))) == 0.0
    assert team_outcome(make_episode(*make_answers("", ""))) == 0.0


def test_without_an_answer_request_the_outcome_is_0_whatever_a_summary_holds():
    summary = make_row(Role.SEARCHER, "Paris", session=1, searches=1)
    episode = make_episode(leader(Status.MALFORMED), summary)
    assert team_outcome(episode) == 0.0
    assert rewards(episode, STAGE_2) == [-1.0, None]
    assert rewards(make_episode(leader(Status.CONTEXT), summary), STAGE_2) == [pytest.approx(0.1 / 6), None]


@pytest.mark.parametrize(
    ("searches", "status", "right", "expected"),
    [
        (0, Status.FINISHED, True, 0.9),
        (1, Status.FINISHED, True, 0.95),
        (2, Status.FINISHED, True, 1.0),
        (4, Status.FINISHED, True, 1.0),
        (0, Status.FINISHED, False, 0.0),
        (1, Status.FINISHED, False, 0.05),
        (3, Status.FINISHED, False, 0.1),
        (2, Status.MALFORMED, True, -1.0),
        (2, Status.LENGTH, True, -1.0),
        (2, Status.CONTEXT, True, 0.9),
    ],
)
def test_stage_1_searcher(searches, status, right, expected):
    """0.9 E + 0.1 a, a only for searches followed by a summary."""
    episode = make_episode(searcher(searches, status), *make_answers("Paris" if right else "Rome", "Bonn"))
    assert rewards(episode, STAGE_1) == [pytest.approx(expected), float(right), 0.0]


@pytest.mark.parametrize(
    ("sessions", "right", "expected"),
    [
        ([], True, 0.9),
        ([2, 3], True, 0.9 + 0.1 * 5 / 6),
        ([4, 4, 4], True, 1.0),
        ([1], False, 0.1 / 6),
        ([3, 3], False, 0.1),
    ],
)
def test_stage_2_leader(sessions, right, expected):
    """0.9 E + 0.1 min(6, s)/6 over all sessions; the Searcher has no reward."""
    searchers = [searcher(n, session=i) for i, n in enumerate(sessions, 1)]
    episode = make_episode(leader(), *searchers, *make_answers("Paris" if right else "Rome"))
    assert rewards(episode, STAGE_2) == [
        pytest.approx(expected, abs=1e-15),
        *[None] * len(sessions),
        float(right),
    ]


def test_searches_of_a_malformed_session_count_for_the_leader():
    episode = make_episode(leader(), searcher(3, Status.MALFORMED, session=1), *make_answers("Rome"))
    assert rewards(episode, STAGE_2) == [pytest.approx(0.05), None, 0.0]


def test_each_candidate_earns_its_own_match():
    rows = make_answers("Paris", "Rome", "", "paris", session=0)
    rows[1].status = Status.LENGTH
    cut = make_row(Role.ANSWERER, status=Status.CONTEXT, candidate=4)
    episode = make_episode(leader(), *rows, cut)
    assert rewards(episode, STAGE_2) == [0.9, 1.0, -1.0, -1.0, 1.0, 0.0]


def test_a_candidate_without_an_answer_is_never_right():
    """Not even where the gold answer is as empty as its body."""
    rows = make_answers("", "Rome")
    assert team_outcome(make_episode(*rows, question=make_question(answers=("",)))) == 0.0


def test_penalty_of_the_whole_workflow():
    """One malformed Searcher costs all its workflow's Searchers, and nobody else."""
    rows = [leader(), searcher(2, session=1), searcher(1, Status.MALFORMED, session=2)]
    episode = make_episode(*rows, *make_answers("Paris", session=3))
    row = LearnConfig(searcher=Objective.GRPO)
    workflow = LearnConfig(searcher=Objective.GRPO, penalty_scope=PenaltyScope.WORKFLOW)
    assert rewards(episode, row) == [pytest.approx(0.95), 1.0, -1.0, 1.0]
    assert rewards(episode, workflow) == [pytest.approx(0.95), -1.0, -1.0, 1.0]
    well_formed = make_episode(leader(Status.MALFORMED), searcher(2, session=1))
    assert rewards(well_formed, workflow) == [-1.0, pytest.approx(0.1)]


def test_outcome_only_rewards():
    learn = LearnConfig(searcher=Objective.GRPO, searcher_reward=SearcherReward.OUTCOME, leader_bonus=False)
    rows = [leader(), searcher(2, session=1), searcher(2, Status.MALFORMED, session=2)]
    assert rewards(make_episode(*rows, *make_answers("Paris")), learn) == [1.0, 1.0, -1.0, 1.0]
    assert rewards(make_episode(*rows, *make_answers("Rome")), learn) == [0.0, 0.0, -1.0, 0.0]


def test_roles_that_are_not_rewarded():
    rows = [leader(Status.MALFORMED), searcher(1, Status.MALFORMED, session=1)]
    episode = make_episode(*rows, *make_answers("Paris"))
    nobody = LearnConfig(leader=Objective.NONE, searcher=Objective.NONE, answerer=Objective.NONE)
    assert rewards(episode, nobody) == [None] * 3
    assert rewards(episode, LearnConfig(leader=Objective.NONE)) == [None, None, 1.0]
    episode.aborted = True
    assert rewards(episode, STAGE_2) == [None] * 3


@pytest.mark.parametrize(
    ("status", "body", "exact", "graded"),
    [
        (Status.FINISHED, "Paris", 1.0, 1.0),
        (Status.FINISHED, "Rome", 0.0, 0.2),
        (Status.MALFORMED, "Paris", -1.0, 0.8),
        (Status.MALFORMED, "Rome", -1.0, 0.1),
        (Status.MALFORMED, "", -1.0, 0.0),
        (Status.LENGTH, "", -1.0, 0.0),
        (Status.CONTEXT, "", 0.0, 0.0),
    ],
)
def test_the_single_agent(status, body, exact, graded):
    episode = make_episode(make_row(Role.AGENT, body, status=status))
    learn = LearnConfig(agent=Objective.GRPO)
    assert rewards(episode, learn) == [exact]
    learn.agent_reward = AgentReward.GRADED
    assert rewards(episode, learn) == [graded]
    assert team_outcome(episode) == max(0.0, exact)
    assert rewards(episode, LearnConfig()) == [None]
