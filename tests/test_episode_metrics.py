"""Figures of a batch, every one worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from mopd_jax.config import LearnConfig, Objective
from mopd_jax.learn.advantages import Advantages, RowScores
from mopd_jax.run.episode_metrics import behaviour, first_answer_em, learning
from mopd_jax.team.episode import Episode, Role, Row, Status
from tests.fakes import make_answers, make_episode, make_question, make_row


def spent(episode: Episode, calls: int, tokens_in: int, tokens_out: int, queries: tuple[str, ...]) -> Episode:
    return replace(episode, calls=calls, input_tokens=tokens_in, output_tokens=tokens_out, queries=queries)


@pytest.fixture
def episodes() -> list[Episode]:
    leader, searcher = Role.LEADER, Role.SEARCHER
    return [
        # The first answer is wrong, the second right; the same query twice.
        spent(
            make_episode(
                make_row(leader), make_row(searcher, "s", searches=2), *make_answers("Rome", "Paris")
            ),
            calls=6, tokens_in=100, tokens_out=10, queries=("q", "q"),
        ),
        # Right at once; a Searcher that was cut at its token limit, one that had no room left.
        spent(
            make_episode(
                make_row(leader),
                make_row(searcher, status=Status.LENGTH, searches=1),
                make_row(searcher, status=Status.CONTEXT, session=2, searches=3),
                *make_answers("the Paris!", ""),
            ),
            calls=9, tokens_in=300, tokens_out=30, queries=("a", "b", "c", "d"),
        ),
        # A malformed Leader: no search, no answer.
        spent(make_episode(make_row(leader, status=Status.MALFORMED)), 1, 50, 2, ()),
        # A malformed Searcher, and a first candidate that gave no answer.
        spent(
            make_episode(
                make_row(leader),
                make_row(searcher, status=Status.MALFORMED, searches=1),
                *make_answers("", "Lyon"),
            ),
            calls=4, tokens_in=30, tokens_out=6, queries=("x",),
        ),
        # Aborted: counted, and nothing else of it, whatever it had spent before.
        replace(spent(Episode(make_question("8"), 0, 0), 7, 9999, 999, ("z",)), aborted=True, searches=5),
    ]  # fmt: skip


def test_behaviour(episodes):
    assert behaviour(episodes) == pytest.approx(
        {
            "outcome": 2 / 4,
            "em": 1 / 4,
            "em/answerer": 2 / 6,
            "searches": (2 + 4 + 0 + 1) / 4,
            "no_search": 1 / 4,
            "repeated_query": 1 / 4,
            "input_tokens": (100 + 300 + 50 + 30) / 4,
            "output_tokens": (10 + 30 + 2 + 6) / 4,
            "calls": (6 + 9 + 1 + 4) / 4,
            "aborted": 1 / 5,
            "malformed/leader": 1 / 4,
            "truncated_length/leader": 0,
            "truncated_context/leader": 0,
            "malformed/searcher": 1 / 4,
            "truncated_length/searcher": 1 / 4,
            "truncated_context/searcher": 1 / 4,
            "malformed/answerer": 2 / 6,
            "truncated_length/answerer": 0,
            "truncated_context/answerer": 0,
        }
    )


def test_behaviour_of_a_batch_that_was_aborted_as_a_whole(episodes):
    metrics = behaviour(episodes[-1:])
    assert metrics.pop("aborted") == 1
    assert len(metrics) == 8 and np.isnan(list(metrics.values())).all()


def test_the_answer_is_the_first_candidate_s(episodes):
    assert [first_answer_em(episode) for episode in episodes] == [0, 1, 0, 0, 0]


def logps(*values) -> np.ndarray:
    return np.array(values, np.float32)


def sampled(row: Row, *values: float) -> Row:
    stream = np.zeros(len(row.ids), np.float32)
    stream[row.mask] = values
    return replace(row, logps=stream)


def learn_from(*rows: Row, scores: list[RowScores], entropies: list[np.ndarray], learn: LearnConfig) -> dict:
    """The figures of one workflow of these rows; 3 tied and 2 single groups, 4 dropped tokens."""
    masks = [np.ones(len(s.old), bool) for s in scores]
    values = [np.zeros(len(s.old), np.float32) for s in scores]
    return learning([make_episode(*rows)], learn, scores, entropies, Advantages(values, masks, 3, 2, 4))


def test_learning():
    rows = [
        sampled(make_row(Role.LEADER, searches=0), -1.0, -2.0),
        sampled(make_row(Role.SEARCHER, "s", searches=2), -3.0, -1.0),
        sampled(make_row(Role.ANSWERER, "Rome", mask=(0, 1)), -0.5),
        sampled(make_row(Role.ANSWERER, "Paris", mask=(0, 1), candidate=1), -2.5),
    ]
    scores = [
        RowScores(logps(-1.25, -2.0), teacher=logps(-1.0, -1.0), reference=logps(-1.25, -3.0)),
        RowScores(logps(-3.0, -1.5), teacher=logps(-2.0, -2.5), reference=logps(-4.0, -1.5)),
        RowScores(logps(-0.5), teacher=logps(-0.5), reference=logps(-0.25)),
        RowScores(logps(-3.0), teacher=logps(-1.0), reference=logps(-3.25)),
    ]
    entropies = [logps(1.0, 2.0), logps(0.5, 0.0), logps(3.0), logps(4.0)]
    metrics = learn_from(*rows, scores=scores, entropies=entropies, learn=LearnConfig())
    expected = {
        "groups/tied": 3,
        "groups/single": 2,
        "tokens/dropped": 4,
        # 0.9 E + 0.1 · 2/6; the Searcher is distilled and earns nothing; EM of each candidate.
        "reward/leader": 0.9 + 0.1 * 2 / 6,
        "reward/answerer": 1 / 2,
        "tokens/leader": 2,
        "tokens/searcher": 2,
        "tokens/answerer": 2,
        "entropy/leader": 1.5,
        "entropy/searcher": 0.25,
        "entropy/answerer": 3.5,
        # KL: log π − log π_ref on the sampled tokens; ratio: log π_teacher − log π.
        "kl/leader": (0.0 + 1.0) / 2,
        "kl/searcher": (1.0 + 0.0) / 2,
        "kl/answerer": (-0.25 + 0.25) / 2,
        "log_ratio/leader": (0.25 + 1.0) / 2,
        "log_ratio/searcher": (1.0 - 1.0) / 2,
        "log_ratio/answerer": (0.0 + 2.0) / 2,
        # |log π − log π_sampler|: 0.25, 0, 0, 0.5, 0, 0.5
        "gap": 1.25 / 6,
        "gap_max": 0.5,
    }
    assert metrics == pytest.approx(expected)


def test_a_stage_1_searcher_is_rewarded_and_a_model_that_is_not_there_is_not_measured():
    rows = [make_row(Role.SEARCHER, "s", searches=1), *make_answers("Paris", "")]
    scores = [RowScores(logps(-1.0, -1.0)) for _ in rows]
    learn = LearnConfig(leader=Objective.NONE, searcher=Objective.GRPO)
    metrics = learn_from(*rows, scores=scores, entropies=[logps(1.0, 1.0)] * 3, learn=learn)
    assert metrics["reward/searcher"] == pytest.approx(0.9 + 0.1 * 0.5)
    assert metrics["reward/answerer"] == (1 - 1) / 2
    assert not [name for name in metrics if name.startswith(("kl/", "log_ratio/")) or "leader" in name]


def test_a_log_prob_that_is_not_finite_is_never_averaged_in():
    rows = [sampled(make_row(Role.SEARCHER, mask=(0, 1, 1, 1)), -1.0, np.nan, -1.0)]
    scores = [RowScores(logps(-1.5, -1.0, np.nan), teacher=logps(-1.0, -np.inf, -1.0))]
    entropies = [logps(np.nan, 1.0, 2.0)]
    metrics = learn_from(*rows, scores=scores, entropies=entropies, learn=LearnConfig())
    shown = ("gap", "gap_max", "log_ratio/searcher", "entropy/searcher")
    assert [metrics[name] for name in shown] == [0.5, 0.5, 0.5, 1.5]


def test_a_sampler_without_one_finite_log_prob_shows_no_gap():
    rows = [sampled(make_row(Role.SEARCHER), np.nan, np.nan)]
    scores = [RowScores(logps(-1.0, -1.0), teacher=logps(-1.0, -1.0))]
    metrics = learn_from(*rows, scores=scores, entropies=[logps(1.0, 1.0)], learn=LearnConfig())
    assert np.isnan([metrics["gap"], metrics["gap_max"]]).all()
