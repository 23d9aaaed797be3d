"""Groups, normalisation, KL placement and distillation, with numbers worked out by hand."""

import functools
import operator
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_jax.config import KLPlacement, LearnConfig, Objective, PenaltyScope
from mopd_jax.learn.advantages import (
    RowScores,
    flatten,
    group_key,
    normalise,
    outcome_advantages,
    token_advantages,
)
from mopd_jax.team.episode import Role, Status
from tests.fakes import make_answers, make_episode, make_question, make_row

NO_KL = LearnConfig(kl=0.0)
STAGE_1 = LearnConfig(searcher=Objective.GRPO, kl=0.0)
SEVENTH = float(np.float32(0.9 + 0.1 * 5 / 6))


def logps(*values):
    return np.array(values, np.float32)


def answered(*bodies, **where):
    return make_episode(*make_answers(*bodies), **where)


def score_all(episodes, **models):
    """Scores of every row: log-probs −1 unless a model's are given."""
    return [
        RowScores(**{"old": np.full(row.mask.sum(), -1.0, np.float32), **models})
        for _, row in flatten(episodes)
    ]


def led(right, *, malformed=False, searches=0, **where):
    """An episode of a Leader and one answer."""
    status = Status.MALFORMED if malformed else Status.FINISHED
    rows = [make_row(Role.LEADER, status=status), make_row(Role.SEARCHER, "s", session=1, searches=searches)]
    return make_episode(*rows, *make_answers("Paris" if right else "Rome", session=2), **where)


# --- normalisation -------------------------------------------------------------------------------------


def test_normalise_with_the_unbiased_std():
    np.testing.assert_allclose(normalise([1, 0, 0]), [1.1547, -0.5773, -0.5773], atol=1e-4)
    np.testing.assert_allclose(normalise([1, -1]), [1 / (2**0.5 + 1e-6), -1 / (2**0.5 + 1e-6)], rtol=1e-12)
    assert normalise([1, 0]).dtype == np.float64


@pytest.mark.parametrize("group", [[SEVENTH] * 7, [5.0] * 3, [0.0] * 2, [0.3], [-1.0] * 5])
def test_a_tied_or_single_group_is_exactly_zero(group):
    assert normalise(group).tolist() == [0.0] * len(group)
    assert normalise(np.array(group, np.float32)).tolist() == [0.0] * len(group)


@given(st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=8), st.randoms())
def test_normalise_is_centred_ordered_and_blind_to_order(group, shuffle):
    values = normalise(group)
    assert abs(values.sum()) < 1e-6
    assert np.all((np.subtract.outer(group, group) > 0) <= (np.subtract.outer(values, values) >= 0))
    order = list(range(len(group)))
    shuffle.shuffle(order)
    np.testing.assert_allclose(normalise([group[i] for i in order]), values[order], atol=1e-9)


# --- groups --------------------------------------------------------------------------------------------


def test_two_questions_shuffled_keep_the_input_order():
    right = {"a": [1, 0, 0], "b": [0, 0, 0]}
    wanted = {("a", 1): 1.1547, ("a", 0): -0.5773, ("b", 0): 0.0}
    labels = [(q, r, w) for q, outcomes in right.items() for w, r in enumerate(outcomes)]
    for seed in range(5):
        random.Random(seed).shuffle(labels)
        episodes = [led(r, question=make_question(q), workflow=w) for q, r, w in labels]
        leaders = outcome_advantages(episodes, NO_KL).values[::3]
        np.testing.assert_allclose(leaders, [wanted[q, r] for q, r, _ in labels], atol=1e-4)


def test_groups_of_several_sizes():
    """Sizes 4, 3, 4, the middle all alike: zeros there and nowhere else."""
    outcomes = {"a": [1, 0, 0, 0], "b": [1, 1, 1], "c": [1, 1, 0, 0]}
    episodes = [
        led(r, question=make_question(q), workflow=w) for q, rs in outcomes.items() for w, r in enumerate(rs)
    ]
    found = outcome_advantages(episodes, NO_KL)
    leaders = found.values[::3]
    np.testing.assert_allclose(leaders[:4], [1.5, -0.5, -0.5, -0.5], atol=1e-5)
    assert leaders[4:7] == [0.0] * 3
    np.testing.assert_allclose(leaders[7:], [0.866, 0.866, -0.866, -0.866], atol=1e-4)
    assert (found.tied_groups, found.single_groups) == (1, 11)
    assert found.values[1::3] == [None] * 11


def test_the_key_names_everything_that_separates_groups():
    episode = answered("Paris", question=make_question("7", "hotpotqa"), draw=3, workflow=2)
    assert group_key(episode, episode.rows[0]) == (Role.ANSWERER, "hotpotqa", "train", "7", 3, 2, 1)
    leader = make_row(Role.LEADER)
    assert group_key(episode, leader) == (Role.LEADER, "hotpotqa", "train", "7", 3)


def test_equal_ids_of_two_datasets_never_share_a_group():
    """nq/7 is always right, hotpotqa/7 always wrong: together they would differ, apart they are tied."""
    episodes = [
        led(right, question=make_question("7", name), workflow=w)
        for w in range(2)
        for name, right in (("nq", 1), ("hotpotqa", 0))
    ]
    found = outcome_advantages(episodes, NO_KL)
    assert found.values[::3] == [0.0] * 4
    assert found.tied_groups == 2


def test_two_draws_of_a_question_never_share_a_group():
    episodes = [led(draw == 0, draw=draw, workflow=w) for draw in range(2) for w in range(2)]
    assert outcome_advantages(episodes, NO_KL).values[::3] == [0.0] * 4


def test_roles_never_share_a_group():
    """Leader rewards 0.9 and 0, Searcher rewards 0.95 and 0.1: each pair gives ±0.7071."""
    learn = LearnConfig(searcher=Objective.GRPO, leader_bonus=False, kl=0.0)
    episodes = [led(1, searches=1), led(0, searches=2, workflow=1)]
    values = outcome_advantages(episodes, learn).values
    np.testing.assert_allclose(values, [0.7071, 0.7071, 0.0, -0.7071, -0.7071, 0.0], atol=1e-4)


def test_candidates_are_compared_within_their_own_request():
    """Two workflows of one question: the answerers of each form a group of five."""
    episodes = [answered("Paris", "a", "b", "c", "d"), answered(*["Paris"] * 5, workflow=1)]
    found = outcome_advantages(episodes, NO_KL)
    np.testing.assert_allclose(found.values[:5], [1.7888, *[-0.4472] * 4], atol=1e-4)
    assert found.values[5:] == [0.0] * 5
    assert (found.tied_groups, found.single_groups) == (1, 0)


def test_all_searcher_sessions_of_a_draw_form_one_group():
    sessions = [[1.0, 0.0], [0.0]]
    episodes = [
        make_episode(
            *[make_row(Role.SEARCHER, "s", session=i, searches=2 * int(a)) for i, a in enumerate(activities)],
            workflow=w,
        )
        for w, activities in enumerate(sessions)
    ]
    values = outcome_advantages(episodes, STAGE_1).values
    np.testing.assert_allclose(values, [1.1547, -0.5773, -0.5773], atol=1e-4)


def leaves(*trees, **where):
    """One draw of a single agent's trees; 1 is a right leaf, 0 a wrong one."""
    episodes = []
    for number, outcomes in enumerate(trees):
        for right in outcomes:
            row = make_row(Role.AGENT, "Paris" if right else "Rome")
            episodes.append(make_episode(row, workflow=len(episodes), **where))
            episodes[-1].tree = number
    return episodes


AGENT = LearnConfig(agent=Objective.GRPO, kl=0.0)


def test_a_leaf_adds_up_what_its_tree_and_its_question_say():
    """z of [1, 0, 0] and z of [1, 0, 0, 0, 0, 0]; a tied tree adds exactly 0."""
    found = outcome_advantages(leaves([1, 0, 0], [0, 0, 0]), AGENT)
    wanted = [3.1959, -0.9856, -0.9856, -0.4082, -0.4082, -0.4082]
    np.testing.assert_allclose(found.values, wanted, atol=1e-4)
    assert (found.tied_groups, found.single_groups) == (1, 0)


def test_a_tree_of_one_leaf_leaves_the_question_alone():
    found = outcome_advantages(leaves([1], [0]), AGENT)
    np.testing.assert_allclose(found.values, [0.7071, -0.7071], atol=1e-4)
    assert found.single_groups == 2


def test_trees_of_two_draws_and_questions_never_meet():
    """Each pair of right and wrong is ±0.7071 in its tree and ±0.7071 in its question."""
    episodes = leaves([1, 0]) + leaves([1, 0], draw=1) + leaves([1, 0], question=make_question("8"))
    np.testing.assert_allclose(outcome_advantages(episodes, AGENT).values, [1.4142, -1.4142] * 3, atol=1e-4)


def test_an_aborted_workflow_leaves_the_others_their_own_mean():
    """n = 2 of 3 remain: ±0.7071, as if the third had never been."""
    episodes = [led(1), led(0, workflow=1), led(1, workflow=2)]
    episodes[2].aborted = True
    found = outcome_advantages(episodes, NO_KL)
    np.testing.assert_allclose(found.values[0:6:3], [0.7071, -0.7071], atol=1e-4)
    assert found.values[6:] == [None] * 3
    advantages = token_advantages(episodes, NO_KL, score_all(episodes, teacher=logps(-1, -1)))
    assert [m.any() for m in advantages.masks] == [True] * 6 + [False] * 3


def test_seven_equal_leader_rewards_are_exactly_zero():
    episodes = [led(1, searches=5, workflow=w) for w in range(7)]
    assert outcome_advantages(episodes, NO_KL).values[::3] == [0.0] * 7


# --- KL ------------------------------------------------------------------------------------------------


def test_token_kl_is_added_after_the_normalisation():
    """A = ±0.7071 − 1e-3 · (old − ref), and a tied group keeps its KL alone."""
    episodes = [led(1), led(0, workflow=1)]
    learn = LearnConfig(kl=1e-3, leader_bonus=False)
    scores = score_all(episodes, teacher=logps(-1, -1), reference=logps(-3.0, -0.5))
    found = token_advantages(episodes, learn, scores)
    a = 0.9 / (0.9 / 2**0.5 + 1e-6) / 2
    np.testing.assert_allclose(found.values[0], [a - 2e-3, a + 0.5e-3], rtol=1e-6)
    np.testing.assert_allclose(found.values[3], [-a - 2e-3, -a + 0.5e-3], rtol=1e-6)
    np.testing.assert_allclose(found.values[2], [-2e-3, 0.5e-3], rtol=1e-6)
    assert found.values[0].dtype == np.float32 and found.masks[0].dtype == bool


def test_sequence_kl_enters_before_the_normalisation():
    """It blows a tied pair up to ±0.7071, the row further from the reference being the worse."""
    episodes = [answered("Paris", "Paris")]
    learn = LearnConfig(kl=0.5, kl_placement=KLPlacement.SEQUENCE)
    scores = [
        RowScores(old=logps(-1, -1), reference=logps(-2, -1)),
        RowScores(old=logps(-1, -1), reference=logps(-1, -1)),
    ]
    found = token_advantages(episodes, learn, scores)
    a = 0.25 / (0.5 / 2**0.5 + 1e-6)
    np.testing.assert_allclose(found.values, [[-a, -a], [a, a]], rtol=1e-6)
    assert outcome_advantages(episodes, NO_KL).values == [0.0, 0.0]


def test_a_penalty_replaces_the_kl_as_well():
    """Rewards −1 and 0: the malformed row's tokens carry the bare ∓0.7071."""
    rows = make_answers("", "Rome")
    for status in (Status.MALFORMED, Status.LENGTH):
        rows[0].status = status
        episodes = [make_episode(*rows)]
        token = LearnConfig(kl=0.1)
        scores = score_all(episodes, reference=logps(-3, -1))
        a = 0.5 / (1 / 2**0.5 + 1e-6)
        values = token_advantages(episodes, token, scores).values
        np.testing.assert_allclose(values, [[-a, -a], [a - 0.2, a]], rtol=1e-6)
        sequence = LearnConfig(kl=0.1, kl_placement=KLPlacement.SEQUENCE)
        b = 0.4 / (0.8 / 2**0.5 + 1e-6)
        values = token_advantages(episodes, sequence, scores).values
        np.testing.assert_allclose(values, [[-b, -b], [b, b]], rtol=1e-6)


def test_the_kl_is_replaced_in_every_row_that_the_penalty_reaches():
    good = make_row(Role.SEARCHER, "s", session=0, searches=2)
    bad = make_row(Role.SEARCHER, status=Status.MALFORMED, session=1)
    episodes = [make_episode(good, bad)]
    scores = score_all(episodes, reference=logps(-3, -1))
    learn = LearnConfig(searcher=Objective.GRPO, penalty_scope=PenaltyScope.WORKFLOW)
    found = token_advantages(episodes, learn, scores)
    assert np.array_equal(found.values, np.zeros((2, 2)))
    assert found.tied_groups == 1 and all(m.all() for m in found.masks)


# --- distillation --------------------------------------------------------------------------------------


def distilled(teacher, old, mask=(0, 1, 1), learn=NO_KL, status=Status.FINISHED):
    row = make_row(Role.SEARCHER, "s", mask=mask, status=status)
    return token_advantages([make_episode(row)], learn, [RowScores(logps(*old), teacher=logps(*teacher))])


@pytest.mark.parametrize("mask", [(0, 1), (0, 1, 0, 0, 1, 1, 0), (0, 1, 1, 1)])
def test_a_teacher_like_the_student_gives_exactly_zero(mask):
    old = np.random.default_rng(0).normal(-2, 1, sum(mask))
    found = distilled(old, old, mask)
    assert found.values[0].tolist() == [0.0] * sum(mask)
    assert found.masks[0].all()


def test_distillation_is_the_log_ratio_times_beta_never_normalised():
    found = distilled(teacher=(-1.0, -3.0), old=(-2.0, -1.0))
    np.testing.assert_allclose(found.values[0], [0.01, -0.02], rtol=1e-6)
    found = distilled(teacher=(-1.0, -3.0), old=(-2.0, -1.0), learn=LearnConfig(beta=1.0, kl=0.0))
    np.testing.assert_allclose(found.values[0], [1.0, -2.0], rtol=1e-6)


def test_the_log_ratio_is_clamped():
    found = distilled(teacher=(-1.0, -40.0), old=(-30.0, -1.0))
    np.testing.assert_allclose(found.values[0], [0.1, -0.1], rtol=1e-6)


def test_a_malformed_distilled_row_is_still_distilled_and_has_no_kl():
    for status in Status:
        found = distilled((-1.0, -3.0), (-2.0, -1.0), learn=LearnConfig(), status=status)
        np.testing.assert_allclose(found.values[0], [0.01, -0.02], rtol=1e-6)
        assert found.masks[0].all()


# --- masks ---------------------------------------------------------------------------------------------


def test_an_objective_of_none_masks_the_role_and_nothing_else():
    episodes = [led(1), led(0, workflow=1)]
    learn = LearnConfig(searcher=Objective.NONE, answerer=Objective.NONE, kl=0.0)
    found = token_advantages(episodes, learn, score_all(episodes))
    assert [m.tolist() for m in found.masks] == [[True] * 2, [False] * 2, [False] * 2] * 2
    assert [v.any() for v in found.values] == [True, False, False] * 2


def test_tied_and_single_rows_stay_in_the_loss():
    episodes = [led(0)]
    found = token_advantages(episodes, NO_KL, score_all(episodes, teacher=logps(-1, -1)))
    assert all(m.all() for m in found.masks)
    assert (found.tied_groups, found.single_groups, found.dropped_tokens) == (0, 2, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_whose_log_prob_is_not_finite_is_dropped_and_counted(bad):
    found = distilled(teacher=(bad, -1.5), old=(-1.0, -1.0))
    assert found.masks[0].tolist() == [False, True]
    np.testing.assert_allclose(found.values[0], [0.0, -0.005], rtol=1e-6)
    assert found.dropped_tokens == 1
    found = distilled(teacher=(bad, -1.5), old=(bad, -1.0))
    assert found.masks[0].tolist() == [False, True] and found.dropped_tokens == 1


def test_a_dropped_token_is_dropped_under_every_model():
    episodes = [answered("Paris", "Rome")]
    ok, bad = logps(-1, -1), logps(-1, np.nan)
    both = [RowScores(ok, reference=ok)]
    for first in (RowScores(bad, reference=ok), RowScores(ok, reference=bad)):
        found = token_advantages(episodes, LearnConfig(), [first, *both])
        assert [m.tolist() for m in found.masks] == [[True, False], [True, True]]
        assert found.dropped_tokens == 1 and np.isfinite(found.values).all()
    episodes[0].rows[0].logps[2] = np.nan
    found = token_advantages(episodes, LearnConfig(), both * 2)
    assert found.masks[0].tolist() == [True, False] and found.dropped_tokens == 1


def test_a_dropped_token_does_not_reach_the_sequence_kl():
    episodes = [answered("Paris", "Rome")]
    learn = LearnConfig(kl=0.1, kl_placement=KLPlacement.SEQUENCE)
    scores = [
        RowScores(logps(-1, np.nan), reference=logps(-2, -1)),
        RowScores(logps(-1, -1), reference=logps(-1, -1)),
    ]
    found = token_advantages(episodes, learn, scores)
    a = 0.45 / (0.9 / 2**0.5 + 1e-6)
    np.testing.assert_allclose(found.values[0], [a, 0.0], rtol=1e-6)


def test_a_row_without_sampled_tokens_still_counts_in_its_group():
    """A candidate without room: reward 0, no token to train, the other one compared with it."""
    rows = [*make_answers("Paris"), make_row(Role.ANSWERER, status=Status.CONTEXT, session=1, mask=(0, 0))]
    episodes = [make_episode(*rows)]
    found = token_advantages(episodes, NO_KL, score_all(episodes))
    np.testing.assert_allclose(found.values[0], [0.7071, 0.7071], atol=1e-4)
    assert len(found.values[1]) == len(found.masks[1]) == 0


# --- order and refusals --------------------------------------------------------------------------------


def test_advantages_do_not_depend_on_the_order_of_episodes():
    rng = np.random.default_rng(1)
    episodes = [led(w % 2, searches=w, workflow=w) for w in range(5)]
    scores = [
        [RowScores(*rng.normal(-1, 1, (3, 2)).astype(np.float32)) for _ in episode.rows]
        for episode in episodes
    ]
    straight = token_advantages(episodes, LearnConfig(), functools.reduce(operator.iadd, scores, []))
    back = token_advantages(episodes[::-1], LearnConfig(), functools.reduce(operator.iadd, scores[::-1], []))
    by_episode = [back.values[i : i + 3] for i in range(0, 15, 3)][::-1]
    np.testing.assert_allclose(np.concatenate(by_episode), straight.values, rtol=1e-6)


def test_missing_or_uneven_scores_are_refused():
    episodes = [led(1)]
    with pytest.raises(ValueError, match="scores of 0 rows for 3 rows"):
        token_advantages(episodes, NO_KL, [])
    with pytest.raises(ValueError, match="log-probs of the teacher"):
        token_advantages(episodes, NO_KL, score_all(episodes))
    with pytest.raises(ValueError, match="log-probs of the reference"):
        token_advantages(episodes, LearnConfig(), score_all(episodes, teacher=logps(-1, -1)))
    with pytest.raises(ValueError, match="2 log-probs of old and 3 of teacher"):
        RowScores(logps(-1, -1), teacher=logps(-1, -1, -1))
    with pytest.raises(ValueError, match="3 scores for a row's 2 generated tokens"):
        learn = LearnConfig(searcher=Objective.NONE, kl=0.0)
        token_advantages(episodes, learn, [RowScores(logps(-1, -1, -1))] * 3)
