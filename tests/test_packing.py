"""Rows in rectangles: every token once, every generated position where its row says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_jax.learn.packing import Batch, pack


def make_rows(shapes: list[tuple[int, list[int]]], seed: int = 0) -> tuple[list, list]:
    """Returns ids and masks of rows given as (length, generated positions); ids 0 and 1 are frequent."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 4, length).astype(np.int32) for length, _ in shapes]
    masks = [np.isin(np.arange(length), generated) for length, generated in shapes]
    return ids, masks


def unpacked(batch: Batch) -> dict[tuple[int, int, int], np.ndarray]:
    """Returns the ids of every segment by (micro-batch, packed row, segment)."""
    found = {}
    for micro, packed in enumerate(batch.micros):
        for b, segments in enumerate(packed.segments):
            for segment in np.unique(segments[segments > 0]):
                found[micro, b, int(segment)] = packed.ids[b][segments == segment]
    return found


def segment_of(batch: Batch, index: int) -> tuple[int, int, int]:
    """Returns the key in `unpacked` of the row `index`, found by where its targets are predicted."""
    place = batch.places[index]
    packed = batch.micros[place.micro]
    source = packed.source[place.b, place.m]
    segments = np.unique(packed.segments[place.b, source])
    assert len(segments) == 1
    return place.micro, place.b, int(segments[0])


def test_two_short_rows_share_a_packed_row():
    ids = [np.array(row, np.int32) for row in ([5, 6, 7], [1, 2, 3, 4, 9], [8, 8])]
    masks = [np.array(mask, bool) for mask in ([0, 1, 1], [0, 0, 1, 0, 1], [0, 1])]
    (packed,) = pack(ids, masks, buckets=(4, 8, 16), micro_batch_tokens=16, shards=1).micros
    # The longest row needs 8 tokens; longest first: rows 1 and 0 fill the first, row 2 opens another.
    np.testing.assert_array_equal(packed.ids, [[1, 2, 3, 4, 9, 5, 6, 7], [8, 8, 0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(packed.positions, [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(packed.segments, [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(packed.source, [[1, 3, 5, 6], [0, 0, 0, 0]])
    np.testing.assert_array_equal(packed.targets, [[3, 9, 6, 7], [8, 0, 0, 0]])
    assert all(array.dtype == np.int32 for array in packed)


def test_scatter_lays_streams_beside_their_targets():
    ids = [np.array(row, np.int32) for row in ([5, 6, 7], [1, 2, 3, 4, 9], [8, 8])]
    masks = [np.array(mask, bool) for mask in ([0, 1, 1], [0, 0, 1, 0, 1], [0, 1])]
    batch = pack(ids, masks, buckets=(8,), micro_batch_tokens=16, shards=1)
    (laid,) = batch.scatter([np.array([0.5, 0.6]), np.array([-1.0, -2.0]), np.array([7.0])])
    np.testing.assert_array_equal(laid, np.float32([[-1, -2, 0.5, 0.6], [7, 0, 0, 0]]))
    assert laid.dtype == np.float32
    assert [list(stream) for stream in batch.gather([laid])] == [[0.5, np.float32(0.6)], [-1, -2], [7]]


row_shapes = st.integers(2, 16).flatmap(
    lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n - 1), min_size=1, unique=True))
)


@settings(deadline=None, max_examples=80)
@given(
    st.lists(row_shapes, min_size=1, max_size=14),
    st.sampled_from([(16,), (4, 8, 16), (5, 11, 16)]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 16, 40, 64, 1000]),
)
def test_nothing_is_lost_moved_or_doubled(shapes, buckets, shards, micro_batch_tokens):
    ids, masks = make_rows(shapes)
    batch = pack(ids, masks, buckets, micro_batch_tokens, shards)

    # Every row is one whole segment, in some place of its own, and no token is beside them.
    found = unpacked(batch)
    keys = [segment_of(batch, index) for index in range(len(ids))]
    assert len(set(keys)) == len(ids) == len(found)
    for key, row in zip(keys, ids, strict=True):
        np.testing.assert_array_equal(found[key], row)
    for packed in batch.micros:
        assert not packed.ids[packed.segments == 0].any()

    # Positions count inside a segment; a target is its row's generated id and its source stands before it.
    for (micro, b, segment), index in zip(keys, range(len(ids)), strict=True):
        packed, place = batch.micros[micro], batch.places[index]
        mine = packed.segments[b] == segment
        np.testing.assert_array_equal(packed.positions[b][mine], np.arange(len(ids[index])))
        np.testing.assert_array_equal(packed.targets[b, place.m], ids[index][masks[index]])
        np.testing.assert_array_equal(
            packed.positions[b, packed.source[b, place.m]] + 1, masks[index].nonzero()[0]
        )

    # One shape per bucket: whole packed rows on every shard, as many as the tokens allow.
    shapes = {packed.ids.shape[1]: tuple(array.shape for array in packed) for packed in batch.micros}
    assert all(
        shapes[packed.ids.shape[1]] == tuple(array.shape for array in packed) for packed in batch.micros
    )
    for length, ((rows, _), *_, (_, width)) in shapes.items():
        assert rows % shards == 0 and rows * length <= max(micro_batch_tokens, shards * length)
        assert width in {min(length, -(-length // 4) * quarters) for quarters in (1, 2, 3, 4)}
    # No row lies in a shorter bucket than holds it; only the longest that is needed has padded rows, and a
    # micro-batch of it is opened only when the ones before it cannot hold the packed rows.
    longest = min(bucket for bucket in buckets if bucket >= max(map(len, ids)))
    assert max(shapes) == longest
    for packed in batch.micros:
        assert packed.ids.shape[1] == longest or packed.segments.any(axis=1).all()
    last = [packed for packed in batch.micros if packed.ids.shape[1] == longest]
    used = sum(int(packed.segments.any(axis=1).sum()) for packed in last)
    assert len(last) == -(-used // len(last[0].ids))


@settings(deadline=None, max_examples=30)
@given(st.lists(row_shapes, min_size=1, max_size=14), st.sampled_from([16, 64]))
def test_gather_undoes_scatter_and_padding_is_zero(shapes, micro_batch_tokens):
    ids, masks = make_rows(shapes)
    batch = pack(ids, masks, (16,), micro_batch_tokens, 2)
    streams = [
        np.random.default_rng(i).normal(size=mask.sum()).astype(np.float32) for i, mask in enumerate(masks)
    ]
    laid = batch.scatter(streams)
    for stream, back in zip(streams, batch.gather(laid), strict=True):
        np.testing.assert_array_equal(stream, back)
    assert sum(np.count_nonzero(array) for array in laid) == sum(map(len, streams))


def test_short_rows_fill_micro_batches_of_their_own_and_the_rest_moves_on():
    """Two packed rows of 8 are a micro-batch of 16 tokens: 7 and 6 fill one, 3 joins the rows of 16."""
    ids, masks = make_rows([(n, [1]) for n in (3, 6, 16, 7, 12)])
    batch = pack(ids, masks, (8, 16), 16, 1)
    lengths = [
        [np.unique(row[row > 0], return_counts=True)[1].tolist() for row in p.segments] for p in batch.micros
    ]
    assert lengths == [[[7], [6]], [[16]], [[12, 3]]]
    assert [place.micro for place in batch.places] == [2, 0, 1, 0, 2]


def test_order_of_the_rows_changes_only_places():
    shapes = [(n, [n - 1, n // 2]) for n in (3, 16, 9, 4, 12, 7, 7)]
    ids, masks = make_rows(shapes)
    order = [4, 0, 6, 2, 1, 5, 3]
    batch = pack(ids, masks, (16,), 64, 1)
    shuffled = pack([ids[i] for i in order], [masks[i] for i in order], (16,), 64, 1)
    for new, old in enumerate(order):
        np.testing.assert_array_equal(
            unpacked(shuffled)[segment_of(shuffled, new)], unpacked(batch)[segment_of(batch, old)]
        )


def test_first_fit_fills_gaps():
    """Lengths 10, 6, 5, 5, 4, 2 in rows of 16: 10 + 6, 5 + 5 + 4 + 2."""
    ids, masks = make_rows([(n, [1]) for n in (5, 2, 10, 4, 6, 5)])
    (packed,) = pack(ids, masks, (16,), 32, 1).micros
    assert [np.unique(s, return_counts=True)[1].tolist() for s in packed.segments] == [[10, 6], [5, 5, 4, 2]]


def test_long_rows_are_dealt_over_the_micro_batches():
    ids, masks = make_rows([(n, [1]) for n in (16, 15, 14, 13)])
    batch = pack(ids, masks, (16,), 32, 1)
    lengths = [(packed.segments > 0).sum(axis=1).tolist() for packed in batch.micros]
    assert lengths == [[16, 14], [15, 13]]


@pytest.mark.parametrize(("longest", "bucket"), [(2, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16)])
def test_the_shortest_bucket_that_holds_the_longest_row(longest, bucket):
    ids, masks = make_rows([(2, [1]), (longest, [1])])
    assert pack(ids, masks, (4, 8, 16), 64, 1).micros[0].ids.shape == (64 // bucket, bucket)


@pytest.mark.parametrize(
    ("generated", "width"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 12), (12, 12), (13, 15), (14, 15)]
)
def test_the_generated_positions_take_whole_quarters(generated, width):
    """A quarter of 15 is 4; four of them would be more than there are positions."""
    ids, masks = make_rows([(15, list(range(1, generated + 1)))])
    assert pack(ids, masks, (15,), 15, 1).micros[0].source.shape == (1, width)


def test_a_generated_id_that_looks_like_padding_stays():
    """Padding is id 0: rows of zeros are told from it by their lengths alone."""
    ids = [np.zeros(5, np.int32), np.zeros(3, np.int32)]
    masks = [np.array([0, 1, 0, 1, 1], bool), np.array([0, 0, 1], bool)]
    batch = pack(ids, masks, (8,), 8, 1)
    (packed,) = batch.micros
    np.testing.assert_array_equal(packed.segments, [[1, 1, 1, 1, 1, 2, 2, 2]])
    np.testing.assert_array_equal(packed.source, [[0, 2, 3, 6]])
    assert batch.places[0].m == slice(0, 3) and batch.places[1].m == slice(3, 4)
    np.testing.assert_array_equal(batch.scatter([np.ones(3), np.ones(1)])[0], [[1, 1, 1, 1]])


def test_what_cannot_be_packed_is_refused_in_words():
    ids, masks = make_rows([(9, [1])])
    with pytest.raises(ValueError, match=r"row of 9 tokens fits no bucket of learn\.row_buckets \(4, 8\)"):
        pack(ids, masks, (4, 8), 64, 1)
    with pytest.raises(ValueError, match="Nothing to pack"):
        pack([], [], (4, 8), 64, 1)
    with pytest.raises(ValueError, match="first id of a row cannot be generated"):
        pack(ids, [np.arange(9) == 0], (16,), 64, 1)
    with pytest.raises(ValueError, match="zip"):
        pack(ids, masks, (16,), 64, 1).scatter([])
