"""What the loss is told of each token: weights by hand, nothing of what the environment wrote."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from mopd_jax.config import Denominator, LearnConfig
from mopd_jax.learn.advantages import Advantages
from mopd_jax.learn.loss import policy_loss
from mopd_jax.learn.streams import (
    generated_tokens,
    imitation_streams,
    only,
    pack_rows,
    policy_streams,
    stream_shapes,
    token_weights,
    twin_keys,
)
from mopd_jax.team.episode import Role, Row, Status
from tests.fakes import make_answers, make_episode, make_row

LEARN = LearnConfig(row_buckets=(8,), micro_batch_tokens=16)

# 2 + 5 + 1 generated tokens, and a Leader that ended before it said anything.
ROWS = [
    make_row(Role.LEADER, mask=(0, 1, 0, 1)),
    make_row(Role.SEARCHER, mask=(0, 1, 1, 1, 0, 0, 1, 1)),
    make_row(Role.LEADER, mask=(0, 0, 0), status=Status.CONTEXT),
    make_row(Role.ANSWERER, mask=(0, 0, 1)),
]
ALL = [np.ones(int(row.mask.sum()), bool) for row in ROWS]


def numbered(rows: list[Row], start: float) -> list[np.ndarray]:
    """Streams start, start + 1, … over the generated tokens of all rows: each tells whose it is."""
    ends = np.cumsum([row.mask.sum() for row in rows])
    values = start + np.arange(ends[-1], dtype=np.float32)
    return np.split(values, ends[:-1])


def advantages_of(values: list[np.ndarray], masks: list[np.ndarray] = ALL) -> Advantages:
    return Advantages(values, masks, tied_groups=0, single_groups=0, dropped_tokens=0)


def sampled(rows: list[Row]) -> list[Row]:
    """The rows with sampler log-probs −100, −99, …"""
    logps = numbered(rows, -100.0)
    streams = [np.zeros(len(row.ids), np.float32) for row in rows]
    for row, stream, values in zip(rows, streams, logps, strict=True):
        stream[row.mask] = values
    return [replace(row, logps=stream) for row, stream in zip(rows, streams, strict=True)]


def test_generated_tokens_are_counted_by_role_whatever_they_learn():
    assert generated_tokens(ROWS) == {Role.LEADER: 2, Role.SEARCHER: 5, Role.ANSWERER: 1}


def test_denominator_all_divides_by_the_whole_batch():
    weights = token_weights(ROWS, ALL, LEARN)
    assert [w.tolist() for w in weights] == [[1 / 8] * 2, [1 / 8] * 5, [], [1 / 8]]
    assert all(w.dtype == np.float32 for w in weights)


def test_denominator_role_divides_each_role_by_its_own_tokens():
    weights = token_weights(ROWS, ALL, LearnConfig(denominator=Denominator.ROLE))
    np.testing.assert_allclose(np.concatenate(weights), [1 / 2] * 2 + [1 / 5] * 5 + [1], rtol=1e-7)


@pytest.mark.parametrize("denominator", Denominator)
def test_a_role_that_learns_nothing_rescales_nobody(denominator):
    learn = LearnConfig(denominator=denominator)
    masks = [mask & (row.role is not Role.SEARCHER) for row, mask in zip(ROWS, ALL, strict=True)]
    ablated, whole = token_weights(ROWS, masks, learn), token_weights(ROWS, ALL, learn)
    for row, mine, before in zip(ROWS, ablated, whole, strict=True):
        expected = np.zeros(5) if row.role is Role.SEARCHER else before
        np.testing.assert_array_equal(mine, expected)


def test_a_token_that_is_left_out_still_counts_in_the_denominator():
    masks = [mask.copy() for mask in ALL]
    masks[1][[0, 3]] = False
    np.testing.assert_allclose(token_weights(ROWS, masks, LEARN)[1], [0, 1 / 8, 1 / 8, 0, 1 / 8])


def test_rows_without_a_generated_token_are_not_packed_but_keep_their_place():
    packed = pack_rows(ROWS, LEARN, shards=1)
    assert packed.twins == ((0,), (1,), (3,))
    arrays = packed.scatter(numbered(ROWS, 1.0))
    assert sorted(np.concatenate([a.ravel() for a in arrays])) == [0] * (arrays[0].size - 8) + list(
        range(1, 9)
    )
    back = packed.gather(arrays, len(ROWS))
    assert [stream.tolist() for stream in back] == [[1, 2], [3, 4, 5, 6, 7], [], [8]]


def test_policy_streams_lie_beside_their_targets():
    rows = sampled(ROWS)
    packed = pack_rows(rows, LEARN, shards=1)
    advantages = advantages_of(numbered(rows, 10.0))
    streams = policy_streams(rows, packed, advantages, numbered(rows, -50.0), LEARN)
    assert len(streams) == len(packed.batch.micros)
    for name, start in (("advantage", 10.0), ("old", -50.0), ("sampler", -100.0)):
        found = packed.gather([getattr(s, name) for s in streams], len(rows))
        for mine, expected in zip(found, numbered(rows, start), strict=True):
            np.testing.assert_array_equal(mine, expected)
    np.testing.assert_allclose(sum(s.weight.sum() for s in streams), 1.0, rtol=1e-6)
    assert all(x.dtype == np.float32 for s in streams for x in (s.advantage, s.weight, s.old, s.sampler))


def test_without_a_cap_the_sampler_is_not_heard():
    packed = pack_rows(ROWS, LEARN, shards=1)
    learn = replace(LEARN, sampler_weight_cap=0.0)
    streams = policy_streams(ROWS, packed, advantages_of(numbered(ROWS, 0.0)), numbered(ROWS, -9.0), learn)
    assert [s.sampler for s in streams] == [None] * len(streams)


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_stream_shapes_are_those_of_real_streams(cap):
    learn = replace(LEARN, sampler_weight_cap=cap)
    packed = pack_rows(ROWS, learn, shards=1)
    values = numbered(ROWS, 1.0)
    policy = policy_streams(ROWS, packed, advantages_of(values), values, learn)[0]
    for supervised, real in ((False, policy), (True, imitation_streams(ROWS, packed)[0])):
        shapes = stream_shapes(packed.batch.micros[0], learn, supervised)
        assert jax.tree.structure(shapes) == jax.tree.structure(real)
        for promised, found in zip(jax.tree.leaves(shapes), jax.tree.leaves(real), strict=True):
            assert (promised.shape, promised.dtype) == (found.shape, found.dtype)


def test_what_the_environment_wrote_changes_neither_counts_nor_streams_nor_the_loss():
    """Retrieved documents are mask 0: with the logits fixed, other documents leave everything as it is."""
    rows = sampled(ROWS)
    others = [replace(row, ids=np.where(row.mask, row.ids, 77).astype(np.int32)) for row in rows]
    assert generated_tokens(others) == generated_tokens(rows)
    pairs = []
    for batch in (rows, others):
        packed = pack_rows(batch, LEARN, shards=1)
        advantages = advantages_of(numbered(batch, 1.0))
        pairs.append((packed, policy_streams(batch, packed, advantages, numbered(batch, -3.0), LEARN)))
    (packed, streams), (other_packed, other_streams) = pairs
    assert packed.batch.places == other_packed.batch.places
    rng = np.random.default_rng(0)
    for micro, other_micro, mine, other in zip(
        packed.batch.micros, other_packed.batch.micros, streams, other_streams, strict=True
    ):
        np.testing.assert_array_equal(micro.source, other_micro.source)
        np.testing.assert_array_equal(micro.targets, other_micro.targets)
        assert (micro.ids != other_micro.ids).any()
        for name in ("advantage", "weight", "old", "sampler"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(other, name))
        logps = rng.uniform(-4, -1, mine.old.shape).astype(np.float32)
        sums, other_sums = policy_loss(logps, mine, 0.2, 2.0), policy_loss(logps, other, 0.2, 2.0)
        assert sums.loss == other_sums.loss != 0


def test_only_silences_the_other_roles():
    packed = pack_rows(ROWS, LEARN, shards=1)
    streams = policy_streams(ROWS, packed, advantages_of(numbered(ROWS, 1.0)), numbered(ROWS, -9.0), LEARN)
    for role, count in ((Role.LEADER, 2), (Role.SEARCHER, 5), (Role.ANSWERER, 1)):
        alone = only(role, ROWS, packed, streams)
        weights = packed.gather([s.weight for s in alone], len(ROWS))
        for row, mine in zip(ROWS, weights, strict=True):
            expected = 1 / 8 if row.role is role else 0.0
            np.testing.assert_array_equal(mine, np.full(int(row.mask.sum()), expected))
        assert sum(np.count_nonzero(s.weight) for s in alone) == count
        for mine, whole in zip(alone, streams, strict=True):
            np.testing.assert_array_equal(mine.advantage, whole.advantage)
            np.testing.assert_array_equal(mine.old, whole.old)


def test_only_equal_candidates_of_one_request_are_twins():
    answers = make_answers("Paris", "Paris", "Rome", "Paris", "Paris")
    answers[2].ids = answers[2].ids + 1
    answers[3].logps = answers[3].logps * 2
    searches = [make_row(Role.SEARCHER), make_row(Role.SEARCHER)]
    later = make_answers("Paris", session=2)
    episodes = [make_episode(*searches, *answers, *later), make_episode(*answers[:1], workflow=1)]
    rows = [row for episode in episodes for row in episode.rows]
    packed = pack_rows(rows, LEARN, 1, twin_keys(episodes))
    assert packed.twins == ((0,), (1,), (2, 3, 6), (4,), (5,), (7,), (8,))


def test_twins_share_one_packed_row_and_add_their_weights():
    rows = make_answers("Paris", "Paris", "Paris")
    packed = pack_rows(rows, LEARN, 1, twin_keys([make_episode(*rows)]))
    assert int((packed.batch.micros[0].segments > 0).sum()) == len(rows[0].ids)
    values = [np.array([3.0, 5.0], np.float32)] * 3
    arrays = packed.scatter(values)
    assert arrays[0].sum() == 8
    assert [stream.tolist() for stream in packed.gather(arrays, 3)] == [[3, 5]] * 3
    assert packed.scatter_sum(values)[0].sum() == 24


def test_imitation_weighs_all_generated_tokens_alike():
    packed = pack_rows(ROWS, LEARN, shards=1)
    streams = imitation_streams(ROWS, packed)
    weights = packed.gather([s.weight for s in streams], len(ROWS))
    assert [w.tolist() for w in weights] == [[1 / 8] * 2, [1 / 8] * 5, [], [1 / 8]]
    for s in streams:
        np.testing.assert_array_equal(s.advantage, s.weight > 0)
        assert s.old is None and s.sampler is None


def test_a_batch_in_which_every_workflow_was_aborted_is_an_error():
    with pytest.raises(ValueError, match="no rows with generated tokens"):
        pack_rows([], LEARN, shards=1)
    with pytest.raises(ValueError, match="no rows with generated tokens"):
        pack_rows([ROWS[2]], LEARN, shards=1)
