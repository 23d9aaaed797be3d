"""Episodes to what the learner eats: packed rows and the streams of the single loss.

Shape letters: B packed rows, M gathered (generated) positions of a packed row.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from mopd_jax.config import Denominator, LearnConfig
from mopd_jax.learn.advantages import Advantages
from mopd_jax.learn.loss import Streams
from mopd_jax.learn.packing import Batch, Packed, pack
from mopd_jax.team.episode import Episode, Role, Row


@dataclass(frozen=True)
class TokenRows:
    """The rows of a batch that hold generated tokens, and where they are packed."""

    twins: tuple[tuple[int, ...], ...]
    """Positions among all rows: those of one tuple are equal in everything and are packed as one row."""
    batch: Batch

    def gather(self, arrays: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
        """Returns the streams of all `count` rows [generated tokens], empty where a row has none."""
        streams = [np.zeros(0, np.float32)] * count
        for twins, stream in zip(self.twins, self.batch.gather(arrays), strict=True):
            for index in twins:
                streams[index] = stream
        return streams

    def scatter(self, streams: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Lays out streams in which twins agree, the inverse of `gather`: float32 [B, M] per micro-batch."""
        return self.batch.scatter([streams[twins[0]] for twins in self.twins])

    def scatter_sum(self, streams: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Lays out streams, summed over twins: float32 [B, M] per micro-batch."""
        return self.batch.scatter([sum(streams[index] for index in twins) for twins in self.twins])


def pack_rows(
    rows: Sequence[Row], learn: LearnConfig, shards: int, keys: Sequence[Hashable] | None = None
) -> TokenRows:
    """Packs the rows that hold generated tokens; see `packing.pack` for the errors.

    Args:
      rows: of the whole batch.
      learn: buckets and size of a micro-batch.
      shards: over which rows are split.
      keys: one per row; rows with equal keys are packed once (see `twin_keys`). None: every row is.
    """
    twins: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        if row.mask.any():
            twins.setdefault(index if keys is None else keys[index], []).append(index)
    kept = [rows[indices[0]] for indices in twins.values()]
    batch = pack(
        [row.ids for row in kept],
        [row.mask for row in kept],
        learn.row_buckets,
        learn.micro_batch_tokens,
        shards,
    )
    return TokenRows(tuple(map(tuple, twins.values())), batch)


def twin_keys(episodes: Sequence[Episode]) -> list[Hashable]:
    """Returns one key per row of all episodes, in order, equal for candidates that gave the same answer.

    Candidates of one answer request share prompt and reward group: with the same ids and log-probs they have
    the same reward and advantage, so that one row with the summed weight gives the same loss and gradient.
    """
    return [
        (number, row.session, row.ids.tobytes(), row.logps.tobytes())
        if row.role is Role.ANSWERER
        else (number, position)
        for number, episode in enumerate(episodes)
        for position, row in enumerate(episode.rows)
    ]


def generated_tokens(rows: Sequence[Row]) -> Counter[Role]:
    """Returns the number of generated tokens by role, whatever the role's objective."""
    counts: Counter[Role] = Counter()
    for row in rows:
        counts[row.role] += int(row.mask.sum())
    return counts


def token_weights(rows: Sequence[Row], masks: Sequence[np.ndarray], learn: LearnConfig) -> list[np.ndarray]:
    """Returns m_t / N per row, float32 [generated tokens].

    N counts the generated tokens of all rows, or of the row's role, whether or not they enter the
    loss: an ablation of one role does not rescale the others [D].
    """
    counts = generated_tokens(rows)
    total = counts.total()
    whole = learn.denominator is Denominator.ALL
    return [
        (mask / (total if whole else counts[row.role])).astype(np.float32)
        for row, mask in zip(rows, masks, strict=True)
    ]


def policy_streams(
    rows: Sequence[Row],
    packed: TokenRows,
    advantages: Advantages,
    old: Sequence[np.ndarray],
    learn: LearnConfig,
) -> list[Streams]:
    """Returns the loss streams of every micro-batch.

    Args:
      rows: all rows of the batch's episodes.
      packed: where they lie.
      advantages: per row.
      old: log π_old of the fused pass, per row.
      learn: denominator, and whether the sampler's weight is used.
    """
    weighted = learn.sampler_weight_cap > 0
    sampler = [row.logps[row.mask] for row in rows] if weighted else None
    columns = [
        packed.scatter(advantages.values),
        packed.scatter_sum(token_weights(rows, advantages.masks, learn)),
        packed.scatter(old),
        packed.scatter(sampler) if weighted else [None] * len(packed.batch.micros),
    ]
    return [Streams(*micro) for micro in zip(*columns, strict=True)]


def imitation_streams(rows: Sequence[Row], packed: TokenRows) -> list[Streams]:
    """Returns the streams of a supervised batch: advantage 1 on every generated token, ρ = 1."""
    masks = [np.ones(int(row.mask.sum()), bool) for row in rows]
    weights = token_weights(rows, masks, LearnConfig())
    columns = packed.scatter(masks), packed.scatter_sum(weights)
    return [Streams(advantage, weight) for advantage, weight in zip(*columns, strict=True)]


def stream_shapes(packed: Packed, learn: LearnConfig, supervised: bool) -> Streams:
    """Returns the streams of a micro-batch of these shapes, as shapes: those of `imitation_streams` for a
    supervised batch, else those of `policy_streams`."""
    values = jax.ShapeDtypeStruct(packed.source.shape, np.float32)
    if supervised:
        return Streams(values, values)
    return Streams(values, values, values, values if learn.sampler_weight_cap > 0 else None)


def only(role: Role, rows: Sequence[Row], packed: TokenRows, streams: Sequence[Streams]) -> list[Streams]:
    """Returns the streams with every other role's weight set to 0."""
    mine = packed.scatter([np.full(int(row.mask.sum()), row.role is role) for row in rows])
    return [s.replace(weight=s.weight * m) for s, m in zip(streams, mine, strict=True)]
