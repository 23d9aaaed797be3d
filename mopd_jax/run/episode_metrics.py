"""What a batch of episodes says about the team, as a flat dict of numbers.

Names are `item` or `item/role`; shares lie in [0, 1], log-probabilities are in nats, costs are per
workflow. `outcome` is E (any candidate right), `em` the first candidate's exact match.
"""

from collections.abc import Sequence

import numpy as np

from mopd_jax.config import LearnConfig, Objective
from mopd_jax.data.answers import exact_match
from mopd_jax.learn.advantages import Advantages, RowScores, flatten
from mopd_jax.learn.rewards import ANSWERING, rewards, team_outcome
from mopd_jax.learn.streams import generated_tokens
from mopd_jax.rollout.tree import Grown
from mopd_jax.team.episode import Episode, Role, Row, Status

Metrics = dict[str, float]


def _finite(values) -> np.ndarray:
    values = np.asarray(values, np.float64)
    return values[np.isfinite(values)]


def _mean(values) -> float:
    """Mean of the finite values, NaN of none."""
    values = _finite(values)
    return float(values.mean()) if len(values) else float("nan")


def first_answer_em(episode: Episode) -> float:
    """Returns EM of candidate 0, the workflow's answer; 0 without one."""
    return exact_match(episode.answers[0], episode.question.answers) if episode.answers else 0.0


def behaviour(episodes: Sequence[Episode]) -> Metrics:
    """Returns outcome, searches, row statuses and token counts; aborted workflows only count as such.

    `em/answerer` is the mean over all candidates, `em` that of the first ones (the single agent gives one).
    """
    done = [e for e in episodes if not e.aborted]
    metrics = {
        "outcome": _mean([team_outcome(e) for e in done]),
        "em": _mean([first_answer_em(e) for e in done]),
        "searches": _mean([e.searches for e in done]),
        "no_search": _mean([e.searches == 0 for e in done]),
        "repeated_query": _mean([len(set(e.queries)) < len(e.queries) for e in done]),
        "input_tokens": _mean([e.input_tokens for e in done]),
        "output_tokens": _mean([e.output_tokens for e in done]),
        "calls": _mean([e.calls for e in done]),
        "aborted": _mean([e.aborted for e in episodes]),
    }
    rows = [row for e in done for row in e.rows]
    for role in ANSWERING:
        if answers := [(e, row) for e in done for row in e.rows if row.role is role]:
            metrics[f"em/{role.value}"] = _mean(
                [
                    row.status is Status.FINISHED and exact_match(row.body, e.question.answers)
                    for e, row in answers
                ]
            )
    for role in _roles(rows):
        statuses = [row.status for row in rows if row.role is role]
        for name, status in (
            ("malformed", Status.MALFORMED),
            ("truncated_length", Status.LENGTH),
            ("truncated_context", Status.CONTEXT),
        ):
            metrics[f"{name}/{role.value}"] = _mean([s is status for s in statuses])
    return metrics


def tree_costs(grown: Sequence[Grown]) -> Metrics:
    """Returns what all trees of a step cost, pruned leaves included, and what the leaves that were kept would
    have cost one by one (`_alone`): model calls and sampled tokens.

    The costs of `behaviour` are those of a leaf's own steps.
    """
    leaves = [e for trees in grown for e in trees.leaves]
    sampled = leaves + [e for trees in grown for e in trees.pruned]
    rows = [row for e in leaves for row in e.rows]
    return {
        "tree/leaves": len(rows),
        "tree/pruned": len(sampled) - len(leaves),
        "tree/calls": sum(e.calls for e in sampled),
        "tree/calls_alone": sum(row.turns for row in rows),
        "tree/output_tokens": sum(e.output_tokens for e in sampled),
        "tree/output_tokens_alone": sum(int(row.mask.sum()) for row in rows),
    }


def learning(
    episodes: Sequence[Episode],
    learn: LearnConfig,
    scores: Sequence[RowScores],
    entropies: Sequence[np.ndarray],
    advantages: Advantages,
) -> Metrics:
    """Returns rewards, sessions that their judge left without one, divergences, entropies and the sampler's
    gap; lists run over all rows in order."""
    rows = [row for _, row in flatten(episodes)]
    earned = [reward for episode in episodes for reward in rewards(episode, learn)]
    counts = generated_tokens(rows)
    metrics: Metrics = {
        "groups/tied": advantages.tied_groups,
        "groups/single": advantages.single_groups,
        "tokens/dropped": advantages.dropped_tokens,
    }
    for role in _roles(rows):
        mine = [i for i, row in enumerate(rows) if row.role is role]
        if role_rewards := [earned[i] for i in mine if earned[i] is not None]:
            metrics[f"reward/{role.value}"] = _mean(role_rewards)
        if role is Role.SEARCHER and learn.searcher is Objective.CRITIC:
            metrics[f"unscored/{role.value}"] = sum(earned[i] is None for i in mine)
        metrics[f"tokens/{role.value}"] = counts[role]
        metrics[f"entropy/{role.value}"] = _mean(np.concatenate([entropies[i] for i in mine]))
        for name, model, sign in (("kl", "reference", -1), ("log_ratio", "teacher", 1)):
            ratios = [
                getattr(scores[i], model) - scores[i].old
                for i in mine
                if getattr(scores[i], model) is not None
            ]
            if ratios:
                metrics[f"{name}/{role.value}"] = sign * _mean(np.concatenate(ratios))
    gaps = [score.old - row.logps[row.mask] for score, row in zip(scores, rows, strict=True)]
    gap = _finite(np.abs(np.concatenate(gaps)))
    return metrics | {"gap": _mean(gap), "gap_max": float(gap.max()) if len(gap) else float("nan")}


def _roles(rows: Sequence[Row]) -> list[Role]:
    present = {row.role for row in rows}
    return [role for role in Role if role in present]
