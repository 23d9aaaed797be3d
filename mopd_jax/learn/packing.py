"""Rows of any length into rectangles: buckets, first fit, segment ids, generated positions gathered.

Shape letters: B packed rows of one micro-batch, T positions, M gathered (generated) positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np


@dataclass(frozen=True)
class Place:
    """Where a row's generated tokens lie."""

    micro: int
    """Micro-batch."""
    b: int
    """Packed row."""
    m: slice
    """Gathered positions."""


class Packed(NamedTuple):
    """One micro-batch."""

    ids: np.ndarray
    """int32 [B, T]"""
    positions: np.ndarray
    """int32 [B, T]: position inside the segment."""
    segments: np.ndarray
    """int32 [B, T]: 1, 2, … per row of the batch, 0 = padding."""
    source: np.ndarray
    """int32 [B, M]: the position that predicts the target, one before it."""
    targets: np.ndarray
    """int32 [B, M]: generated ids, 0 in the padding."""


@dataclass(frozen=True)
class Batch:
    """Micro-batches, of one shape per bucket, and where each input row went."""

    micros: tuple[Packed, ...]
    places: tuple[Place, ...]

    def scatter(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Lays per-row streams [generated tokens] out as float32 [B, M] per micro-batch, 0 elsewhere."""
        arrays = [np.zeros(packed.source.shape, np.float32) for packed in self.micros]
        for place, value in zip(self.places, values, strict=True):
            arrays[place.micro][place.b, place.m] = value
        return arrays

    def gather(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The inverse of `scatter`: takes every row's stream out of [B, M] arrays."""
        return [arrays[p.micro][p.b, p.m] for p in self.places]


def _first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Returns bins of row indices, longest rows placed first; equal lengths keep their order."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fit = next((b for b, left in enumerate(room) if left >= lengths[index]), None)
        if fit is None:
            fit = len(bins)
            bins.append([])
            room.append(capacity)
        bins[fit].append(index)
        room[fit] -= lengths[index]
    return bins


def _bucket(length: int, buckets: Sequence[int]) -> int:
    for bucket in buckets:
        if length <= bucket:
            return bucket
    raise ValueError(
        f"A row of {length} tokens fits no bucket of learn.row_buckets {tuple(buckets)}: "
        "add a longer bucket or lower team.row_tokens."
    )


def _quarter(count: int, length: int) -> int:
    """Returns the smallest quarter of `length` that holds `count`: few shapes, few compilations."""
    quarter = -(-length // 4)
    return min(length, quarter * max(1, -(-count // quarter)))


def micro_batch_rows(length: int, micro_batch_tokens: int, shards: int) -> int:
    """Returns B of micro-batches whose rows have `length` positions: whole rows, as many on every shard."""
    return shards * max(1, micro_batch_tokens // length // shards)


def micro_batch_shapes(length: int, micro_batch_tokens: int, shards: int) -> Packed:
    """Returns the largest micro-batch that `pack` makes of rows of `length`, as shapes: M = T, every
    position may be generated."""
    rows = micro_batch_rows(length, micro_batch_tokens, shards)
    return Packed(*[jax.ShapeDtypeStruct((rows, length), np.int32)] * len(Packed._fields))


def pack(
    ids: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    buckets: Sequence[int],
    micro_batch_tokens: int,
    shards: int,
) -> Batch:
    """Packs rows for the learner.

    A row goes where the shortest bucket holds it, since attention costs the square of T. Rows that would
    leave a micro-batch of their bucket partly empty move on to the next; only the last has padded rows.

    Args:
      ids: int32 [T_i] per row.
      masks: bool [T_i] per row, True on generated ids; the first id of a row is never generated.
      buckets: allowed T, ascending.
      micro_batch_tokens: B × T of a micro-batch, rounded to whole rows on every shard.
      shards: B is a multiple of this.

    Raises:
      ValueError: no rows, a row is longer than every bucket, or a first id is marked generated.
    """
    if not ids:
        raise ValueError("Nothing to pack: the batch has no rows with generated tokens.")
    if any(mask[0] for mask in masks):
        raise ValueError("The first id of a row cannot be generated: nothing predicts it.")
    own = [_bucket(len(row), buckets) for row in ids]
    micros: list[Packed] = []
    places: dict[int, Place] = {}
    waiting: list[int] = []
    for length in sorted(set(own)):
        waiting = sorted(waiting + [i for i, bucket in enumerate(own) if bucket == length])
        bins = [
            [waiting[i] for i in members] for members in _first_fit([len(ids[i]) for i in waiting], length)
        ]
        rows = micro_batch_rows(length, micro_batch_tokens, shards)
        count = -(-len(bins) // rows) if length == max(own) else len(bins) // rows
        waiting = [i for members in bins[count * rows :] for i in members]
        if count:
            packed, where = _fill(bins[: count * rows], ids, masks, (count, rows, length), len(micros))
            micros += packed
            places |= where
    return Batch(tuple(micros), tuple(places[i] for i in range(len(ids))))


def _fill(
    bins: Sequence[Sequence[int]],
    ids: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    shape: tuple[int, int, int],
    first: int,
) -> tuple[list[Packed], dict[int, Place]]:
    """Lays bins out in micro-batches [count, B, T], numbered from `first`; where each row went."""
    count, _, length = shape
    width = _quarter(max(sum(int(masks[i].sum()) for i in members) for members in bins), length)
    arrays = np.zeros((3, *shape), np.int32)
    gathered = np.zeros((2, *shape[:2], width), np.int32)
    places: dict[int, Place] = {}
    for number, members in enumerate(bins):
        # Bins are dealt out in turn, so that no micro-batch gets all the long rows.
        micro, b = number % count, number // count
        t = m = 0
        for segment, index in enumerate(members, start=1):
            n, generated = len(ids[index]), np.flatnonzero(masks[index])
            stretch = slice(m, m + len(generated))
            arrays[0, micro, b, t : t + n] = ids[index]
            arrays[1, micro, b, t : t + n] = np.arange(n)
            arrays[2, micro, b, t : t + n] = segment
            gathered[0, micro, b, stretch] = t + generated - 1
            gathered[1, micro, b, stretch] = ids[index][generated]
            places[index] = Place(first + micro, b, stretch)
            t, m = t + n, stretch.stop
    return [Packed(*arrays[:, i], *gathered[:, i]) for i in range(count)], places
