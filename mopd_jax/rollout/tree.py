"""Tree-GRPO's rollouts: chains of the single agent that branch at earlier steps (arXiv 2509.21240).

A node is one complete step, a turn and what the environment answered. A branch takes over the steps up to its
node and goes on from there: what it shares is sampled once. Every leaf is a whole episode.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mopd_jax.config import TreeConfig
from mopd_jax.rollout.driver import Fork, Task
from mopd_jax.team.episode import Episode

Run = Callable[[Sequence[Task]], list[Episode]]
"""Runs workflows to their ends."""


@dataclass(frozen=True)
class Grown:
    """The trees of one draw of a question."""

    leaves: list[Episode]
    """What is kept, with the numbers of their trees; aborted workflows too, which have no rows."""
    pruned: list[Episode]
    """Leaves that were sampled and are not kept."""


def grow(run: Run, draws: Sequence[Sequence[Task]], tree: TreeConfig, seed: int) -> list[Grown]:
    """Returns the trees of each draw, or its chains as they are if `tree.rounds` is 0; all draws grow at the
    same time.

    Args:
      run: see `Run`.
      draws: the independent chains of each draw, numbered from 0; each starts a tree of that number.
      tree: how they branch.
      seed: enters every choice, as the draw and the number of the tree do; no choice depends on other draws.
    """
    if not tree.rounds:
        episodes = iter(run([chain for draw in draws for chain in draw]))
        return [Grown([next(episodes) for _ in draw], []) for draw in draws]
    trees = [[_Tree(chain, len(draw), seed) for chain in draw] for draw in draws]
    every = list(itertools.chain(*trees))
    _extend(run, [(t, [t.chain]) for t in every])
    for _ in range(tree.rounds):
        _extend(run, [(t, t.branch(tree.expansions)) for t in every])
    return [_together([t.prune(tree.leaves) for t in of_draw]) for of_draw in trees]


def _extend(run: Run, work: "Sequence[tuple[_Tree, list[Task]]]") -> None:
    """Runs the tasks of all trees together and gives each tree its own."""
    episodes = iter(run([task for _, tasks in work for task in tasks]))
    for tree, tasks in work:
        for task in tasks:
            tree.add(task, next(episodes))


def _together(trees: Sequence[Grown]) -> Grown:
    return Grown([e for t in trees for e in t.leaves], [e for t in trees for e in t.pruned])


class _Tree:
    """One chain and its branches."""

    def __init__(self, chain: Task, chains: int, seed: int):
        self.chain, self._chains = chain, chains
        self._members: list[tuple[Task, Episode]] = []
        q = chain.question
        parts = (seed, q.dataset, q.split, q.id, chain.draw, chain.workflow, "tree")
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
        self._rng = np.random.default_rng(int.from_bytes(digest))

    def add(self, task: Task, episode: Episode) -> None:
        self._members.append((task, dataclasses.replace(episode, tree=self.chain.workflow)))

    def branch(self, count: int) -> list[Task]:
        """Returns new branches at nodes drawn uniformly with replacement; none if there is no node."""
        nodes = list(self._nodes())
        if not nodes:
            return []
        drawn = self._rng.integers(len(nodes), size=count)
        # Chains take the numbers below `chains`, the branches of tree t those that leave t.
        first = len(self._members)
        return [
            dataclasses.replace(
                self.chain,
                workflow=self._chains * (first + i) + self.chain.workflow,
                fork=nodes[node],
            )
            for i, node in enumerate(drawn)
        ]

    def _nodes(self) -> Iterator[Fork]:
        """The root, and each step once that is not a last one."""
        for task, episode in self._members:
            if episode.aborted:
                continue
            shared = task.fork.turns + 1 if task.fork else 0
            (row,) = episode.rows
            yield from (Fork(episode, turns) for turns in range(shared, max(row.turns, 1)))

    def prune(self, keep: int) -> Grown:
        """Returns at most so many leaves, chosen at random, in the order in which they were sampled."""
        episodes = [episode for _, episode in self._members]
        leaves = [i for i, episode in enumerate(episodes) if not episode.aborted]
        kept = set(self._rng.permutation(leaves)[:keep])
        pruned = [episodes[i] for i in leaves if i not in kept]
        return Grown([e for i, e in enumerate(episodes) if e.aborted or i in kept], pruned)
