"""From rewards and log-probabilities to one advantage per generated token (NumPy, on the host).

Shape letter: M generated tokens of one row.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mopd_jax.config import KLPlacement, LearnConfig, Objective
from mopd_jax.learn.rewards import objective, penalised, rewards
from mopd_jax.team.episode import Episode, Role, Row


@dataclass(frozen=True)
class RowScores:
    """Log-probabilities of one row's generated tokens, float32 [M], all from the same fused pass."""

    old: np.ndarray
    """The student's before the update."""
    teacher: np.ndarray | None = None
    """The frozen teacher's; needed on OPD rows."""
    reference: np.ndarray | None = None
    """The frozen reference's; needed on GRPO rows where `learn.kl` is not 0."""

    def __post_init__(self):
        for name, logps_M in (("teacher", self.teacher), ("reference", self.reference)):
            if logps_M is not None and len(logps_M) != len(self.old):
                raise ValueError(f"A row has {len(self.old)} log-probs of old and {len(logps_M)} of {name}.")


@dataclass(frozen=True)
class Outcomes:
    """Normalised rewards of a batch, one entry per row of all episodes in order."""

    values: list[float | None]
    """Advantage of the row's reward in its groups; None for a row without a reward."""
    tied_groups: int
    """Groups of two or more rows with equal rewards: their values are exactly 0."""
    single_groups: int
    """Groups of one row: its value is exactly 0."""


@dataclass(frozen=True)
class Advantages:
    """What the loss needs, one entry per row of all episodes in order."""

    values: list[np.ndarray]
    """float32 [M]: constant advantage of each generated token, 0 where `mask` is False."""
    masks: list[np.ndarray]
    """bool [M]: tokens that enter the loss."""
    tied_groups: int
    """See `Outcomes`."""
    single_groups: int
    """See `Outcomes`."""
    dropped_tokens: int
    """Tokens left out because one of their log-probabilities is not finite."""


def group_key(episode: Episode, row: Row) -> tuple:
    """Returns the group in which the row's reward is compared: never its text, never its place [D].

    All rows of a role for one draw of a question; for the Answerer the candidates of one answer request.
    """
    question = episode.question
    key = (row.role, question.dataset, question.split, question.id, episode.draw)
    return (*key, episode.workflow, row.session) if row.role is Role.ANSWERER else key


def _groups(episode: Episode, row: Row) -> list[tuple]:
    """The groups whose advantages a row adds up: its own, and for a leaf its tree's (Tree-GRPO)."""
    key = group_key(episode, row)
    return [key] if episode.tree is None else [key, (*key, episode.tree)]


def normalise(values: Sequence[float]) -> np.ndarray:
    """Returns (R − mean)/(std + 1e-6) of one group, float64 [group], with the unbiased std [D].

    A group of one, and one whose values are all equal, gives exact zeros: rounding in the mean would
    otherwise be blown up to an advantage.
    """
    values = np.asarray(values, np.float64)
    if values.max() == values.min():
        return np.zeros_like(values)
    return (values - values.mean()) / (values.std(ddof=1) + 1e-6)


def outcome_advantages(
    episodes: Sequence[Episode], learn: LearnConfig, scores: Sequence[RowScores] = ()
) -> Outcomes:
    """Returns the group-normalised rewards of the batch; a leaf of a tree has the sum of z over its tree's
    leaves and z over all leaves of the question.

    Args:
      episodes: the whole batch, since a group must be complete.
      learn: objectives, reward options, and where the KL penalty enters.
      scores: one per row; only `KLPlacement.SEQUENCE` reads them: it takes the row's KL penalty from its
        reward before the normalisation (never from a −1).
    """
    rows = flatten(episodes)
    earned = [reward for episode in episodes for reward in rewards(episode, learn)]
    groups = defaultdict(list)
    for index, (episode, row) in enumerate(rows):
        if earned[index] is None:
            continue
        if learn.kl_placement is KLPlacement.SEQUENCE and not penalised(episode, row, learn):
            earned[index] -= float(np.nansum(_kl_penalty(row, scores[index], learn)))
        for key in _groups(episode, row):
            groups[key].append(index)
    values: list[float | None] = [None] * len(rows)
    tied = single = 0
    for members in groups.values():
        normalised = normalise([earned[index] for index in members])
        single += len(members) == 1
        tied += len(members) > 1 and not normalised.any()
        for index, value in zip(members, normalised, strict=True):
            values[index] = (values[index] or 0.0) + float(value)
    return Outcomes(values, tied, single)


def token_advantages(
    episodes: Sequence[Episode], learn: LearnConfig, scores: Sequence[RowScores]
) -> Advantages:
    """Returns advantage and loss mask of every generated token of the batch.

    GRPO: the row's outcome advantage, under `KLPlacement.TOKEN` less kl · (log π_old − log π_ref) unless the
    row's reward is a −1. OPD: β · clip(log π_teacher − log π_old, ±clamp), never normalised [P]. Rows
    without an objective or a reward are masked out; rows of tied groups stay in.

    Args:
      episodes: the whole batch.
      learn: objectives and coefficients.
      scores: one per row of all episodes, in order.

    Raises:
      ValueError: scores are missing or of another length than the row's generated tokens.
    """
    rows = flatten(episodes)
    if len(scores) != len(rows):
        raise ValueError(f"Found scores of {len(scores)} rows for {len(rows)} rows.")
    outcomes = outcome_advantages(episodes, learn, scores)
    values, masks, dropped = [], [], 0
    for (episode, row), scored, outcome in zip(rows, scores, outcomes.values, strict=True):
        signal_M = _signal(episode, row, learn, scored, outcome)
        known_M = np.isfinite(signal_M) & _known(row, scored)
        learns = outcome is not None or objective(episode, row, learn) is Objective.OPD
        mask_M = known_M & learns
        values.append(np.where(mask_M, signal_M, 0.0).astype(np.float32))
        masks.append(mask_M)
        dropped += int(np.sum(~known_M)) if learns else 0
    return Advantages(values, masks, outcomes.tied_groups, outcomes.single_groups, dropped)


def flatten(episodes: Sequence[Episode]) -> list[tuple[Episode, Row]]:
    """Returns every row with its episode, in the order in which scores and advantages are listed."""
    return [(episode, row) for episode in episodes for row in episode.rows]


def _signal(
    episode: Episode, row: Row, learn: LearnConfig, scored: RowScores, outcome: float | None
) -> np.ndarray:
    """float64 [M]: advantages, NaN where a log-prob they rest on is not finite."""
    if objective(episode, row, learn) is Objective.OPD:
        ratio_M = _log_ratio(scored.teacher, scored.old, "teacher")
        return learn.beta * np.clip(ratio_M, -learn.log_ratio_clamp, learn.log_ratio_clamp)
    if outcome is None:
        return np.zeros(len(scored.old))
    if learn.kl_placement is KLPlacement.TOKEN and not penalised(episode, row, learn):
        return outcome - _kl_penalty(row, scored, learn)
    return np.full(len(scored.old), outcome)


def _kl_penalty(row: Row, scored: RowScores, learn: LearnConfig) -> np.ndarray:
    """kl · (log π_old − log π_ref), float64 [M]; 0 for a role that is spared the penalty."""
    if learn.kl == 0 or (row.role is Role.SEARCHER and not learn.searcher_kl):
        return np.zeros(len(scored.old))
    return -learn.kl * _log_ratio(scored.reference, scored.old, "reference")


def _log_ratio(logps_M: np.ndarray | None, old_M: np.ndarray, model: str) -> np.ndarray:
    """log π_model − log π_old, float64 [M]; NaN where either is infinite, so that no clamp hides it."""
    if logps_M is None:
        raise ValueError(f"A row's objective needs log-probs of the {model}, found none: score it with one.")
    unknown_M = np.full(len(old_M), np.nan)
    finite_M = np.isfinite(logps_M) & np.isfinite(old_M)
    return np.subtract(logps_M, old_M, out=unknown_M, where=finite_M, dtype=np.float64)


def _known(row: Row, scored: RowScores) -> np.ndarray:
    """bool [M]: tokens whose log-probs are finite under the sampler and under the student."""
    sampled_M = row.logps[row.mask]
    if len(scored.old) != len(sampled_M):
        raise ValueError(f"Found {len(scored.old)} scores for a row's {len(sampled_M)} generated tokens.")
    return np.isfinite(sampled_M) & np.isfinite(scored.old)
