"""Trees of the single agent: what a branch shares, where branches start, what is kept and what it cost."""

import collections
import itertools

import numpy as np
import pytest

from mopd_jax.config import LearnConfig, TeamConfig, TreeConfig
from mopd_jax.data import miniature
from mopd_jax.learn.streams import generated_tokens, pack_rows, twin_keys
from mopd_jax.retrieval.miniature import MiniatureSearch
from mopd_jax.rollout.driver import Driver, Fork, Task
from mopd_jax.rollout.render import Renderer
from mopd_jax.rollout.tree import Grown, grow
from mopd_jax.run.episode_metrics import tree_costs
from mopd_jax.team.episode import Episode, Message, Question, Role, Row, Status
from mopd_jax.team.workflows import single
from tests import engines
from tests.engines import ScriptedEngine, logps_of
from tests.fakes import make_episode, make_row

TOKENS, PROMPTS, WORLD = engines.tokens(), miniature.PROMPTS, miniature.World(0)
EOS = TOKENS.end_of_turn_id
QUESTION = WORLD.questions("train")[0]
TREE = TreeConfig(rounds=1)


def chains(count: int = 2, draw: int = 0, question: Question = QUESTION) -> list[Task]:
    return [Task(question, draw, w) for w in range(count)]


# ---------------------------------------------------------------- through the driver


class Speaker:
    """Searches twice and answers, every turn about somebody else; turns that `cut` names lack their end."""

    def __init__(self, cut: tuple[int, ...] = ()):
        self.cut, self.number, self.framed = cut, itertools.count(), TOKENS.encode("<documents>")[0]

    def __call__(self, prompt: list[int], candidate: int) -> list[int]:
        number = next(self.number)
        person, searched = WORLD.people[number], prompt.count(self.framed)
        text = f"<search>{person}'s friend</search>" if searched < 2 else f"<answer>{person}</answer>"
        return TOKENS.encode(text) + [EOS] * (number not in self.cut)


def grow_spoken(tree: TreeConfig, cut: tuple[int, ...] = (), seed: int = 0) -> tuple[Grown, ScriptedEngine]:
    """One draw of two chains."""
    engine, team = ScriptedEngine(Speaker(cut), TOKENS.eos_ids), TeamConfig()
    search = MiniatureSearch(WORLD.passages)
    renderer = Renderer(TOKENS, PROMPTS, 100)
    driver = Driver(engine, search, renderer, TOKENS, k=3, row_tokens=8192, alive=4, seed=7)

    def run(tasks):
        return driver.run(lambda question: single(question, team, PROMPTS, 1), tasks)

    (grown,) = grow(run, [chains()], tree, seed)
    return grown, engine


def shared_tokens(episode: Episode, chain: Episode) -> int:
    ours, theirs = episode.rows[0].ids, chain.rows[0].ids
    size = min(len(ours), len(theirs))
    return int(np.argmin(ours[:size] == theirs[:size]))


@pytest.mark.parametrize("seed", range(4))
def test_a_branch_takes_over_its_chains_steps_and_pays_for_its_own(seed):
    grown, engine = grow_spoken(TREE, seed=seed)
    assert len(grown.leaves) == 6 and grown.pruned == []
    assert [episode.tree for episode in grown.leaves] == [0, 0, 0, 1, 1, 1]
    assert [episode.workflow for episode in grown.leaves] == [0, 2, 4, 1, 3, 5]
    calls = [episode.calls for episode in grown.leaves]
    assert calls[0] == calls[3] == 3 and sum(calls) == len(engine.log)
    assert len({tuple(spoken.keys[0]) for spoken in engine.log}) == len(engine.log)
    for chain, *branches in (grown.leaves[:3], grown.leaves[3:]):
        for branch in branches:
            (row,), turns = branch.rows, 3 - branch.calls
            bounds = row.turn_bounds()
            assert len(bounds) == row.turns == 3 and row.status is Status.FINISHED
            shared = shared_tokens(branch, chain)
            assert bounds[turns - 1][1] <= shared < bounds[turns][1] if turns else shared < bounds[0][1]
            end = bounds[turns - 1][1] if turns else 0
            np.testing.assert_array_equal(row.logps[:end], chain.rows[0].logps[:end])
            np.testing.assert_array_equal(row.logps[row.mask], logps_of(row.ids[row.mask]))
            assert branch.queries[:turns] == chain.queries[:turns]
            assert branch.documents[:turns] == chain.documents[:turns]
            assert len(branch.queries) == len(branch.documents) == branch.searches == 2
            assert branch.output_tokens == sum(stop - start for start, stop in bounds[turns:])
            assert branch.input_tokens == sum(start for start, _ in bounds[turns:])


def test_branches_start_at_different_steps():
    """Over four seeds each of the three nodes of a chain has been a start."""
    calls = [e.calls for seed in range(4) for e in grow_spoken(TREE, seed=seed)[0].leaves]
    assert set(calls) == {1, 2, 3}


def test_a_turn_that_was_cut_is_replayed_as_it_was():
    """The chains' first turns lack their end: it is part of the next prompt, in branches too."""
    for seed in range(4):
        grown, _ = grow_spoken(TREE, cut=(0, 1), seed=seed)
        for episode in grown.leaves:
            (row,) = episode.rows
            (_, stop), *_ = row.turn_bounds()
            was_cut = episode.calls < 3 or episode.workflow < 2
            assert (row.ids[stop - 1] != EOS) == was_cut
            assert not was_cut or (row.ids[stop] == EOS and not row.mask[stop])


def test_without_rounds_chains_stay_chains():
    grown, engine = grow_spoken(TreeConfig())
    assert [(e.tree, e.workflow, e.calls) for e in grown.leaves] == [(None, 0, 3), (None, 1, 3)]
    assert grown.pruned == [] and len(engine.log) == 6


def test_what_trees_cost():
    grown, engine = grow_spoken(TreeConfig(rounds=1, expansions=3, leaves=2))
    costs = tree_costs([grown])
    assert (costs["tree/leaves"], costs["tree/pruned"]) == (4, 4)
    assert costs["tree/calls"] == len(engine.log) and costs["tree/calls_alone"] == 4 * 3
    assert costs["tree/output_tokens"] == sum(len(spoken.outputs[0]) for spoken in engine.log)
    assert costs["tree/output_tokens_alone"] == sum(int(e.rows[0].mask.sum()) for e in grown.leaves)


def chain_by_hand() -> Episode:
    """A search and an answer that nobody sampled, as an episode; log-probs are −1."""
    person = WORLD.people[0]
    documents = tuple(MiniatureSearch(WORLD.passages).search([person], 1)[0])
    opened = TOKENS.open([Message("system", PROMPTS.agent), Message("user", PROMPTS.to_asked(QUESTION.text))])
    search, answer = (
        [*TOKENS.encode(text), EOS] for text in (f"<search>{person}</search>", f"<answer>{person}</answer>")
    )
    found = TOKENS.reply(PROMPTS.format_documents([(d.title, d.text) for d in documents]), closed=True)
    pieces = ((opened, False), (search, True), (found, False), (answer, True))
    ids = np.array([i for piece, _ in pieces for i in piece], np.int32)
    mask = np.array([sampled for piece, sampled in pieces for _ in piece])
    row = Row(Role.AGENT, 0, 0, Status.FINISHED, 1, person, ids, mask, -1.0 * mask.astype(np.float32), 2)
    return Episode(QUESTION, 0, 0, [row], (person,), 1, queries=(person,), documents=(documents,))


def test_the_real_engine_goes_on_from_a_shared_step():
    """What a branch samples has the log-probs that the learner's pass over its whole row gives it, and the
    step that branches share is prefilled once."""
    team, search = engines.TEAM, MiniatureSearch(WORLD.passages)
    chain = chain_by_hand()
    renderer = Renderer(TOKENS, PROMPTS, team.document_tokens)
    engine = engines.fresh_engine()
    driver = Driver(engine, search, renderer, TOKENS, k=3, row_tokens=team.row_tokens, alive=4, seed=7)
    tasks = [Task(QUESTION, 0, number, Fork(chain, 1)) for number in (1, 2)]
    branches = driver.run(lambda question: single(question, team, PROMPTS, 1), tasks)
    shared = chain.rows[0].turn_bounds()[1][0]
    for branch in branches:
        (row,) = branch.rows
        np.testing.assert_array_equal(row.ids[:shared], chain.rows[0].ids[:shared])
        np.testing.assert_array_equal(row.logps[:shared], chain.rows[0].logps[:shared])
        own = row.mask & (np.arange(len(row.ids)) >= shared)
        assert own.any()
        np.testing.assert_allclose(row.logps[own], engines.score(row.ids)[own], atol=1e-4)
    assert not np.array_equal(branches[0].rows[0].ids, branches[1].rows[0].ids)
    usage = engine.take_usage()
    assert [branch.calls for branch in branches] == [1, 1]
    assert (usage.prefilled, usage.reused) == (shared - 1, shared - 1)


def test_every_leaf_is_trained_as_a_row_of_its_own():
    """Shared steps count in N and carry their leaf's advantage once per leaf."""
    grown, _ = grow_spoken(TREE)
    rows = [e.rows[0] for e in grown.leaves]
    packed = pack_rows(rows, LearnConfig(row_buckets=(512,)), 1, twin_keys(grown.leaves))
    assert packed.twins == tuple((i,) for i in range(6))
    alone = sum(len(logps_of(row.ids[row.mask])) for row in rows)
    assert generated_tokens(rows) == {Role.AGENT: alone}
    assert alone > sum(e.output_tokens for e in grown.leaves)


# ---------------------------------------------------------------- where trees branch


def bare(task: Task, turns: int = 3) -> Episode:
    """An episode of so many turns of one token."""
    row = make_row(Role.AGENT, "Paris", mask=(0, 1) * turns)
    row.turns = turns
    return make_episode(row, question=task.question, draw=task.draw, workflow=task.workflow)


class Recorder:
    """Runs chains of three turns, and remembers what it was asked for."""

    def __init__(self, aborted: tuple[int, ...] = ()):
        self.aborted, self.asked = aborted, []

    def __call__(self, tasks):
        self.asked.append(list(tasks))
        episodes = [bare(task) for task in tasks]
        for episode in episodes:
            if episode.workflow in self.aborted:
                episode.rows, episode.aborted = [], True
        return episodes


def forks(tasks: list[Task]) -> list[tuple[int, int]]:
    """Number and node of each branch."""
    return [(task.workflow, task.fork.turns) for task in tasks]


def test_nodes_are_drawn_uniformly_from_root_and_steps_that_are_not_last():
    recorder = Recorder()
    grow(recorder, [chains(2, draw) for draw in range(500)], TREE, seed=0)
    roots, branches = recorder.asked
    assert len(roots) == 1000 and all(task.fork is None for task in roots)
    counts = collections.Counter(turns for _, turns in forks(branches))
    assert set(counts) == {0, 1, 2} and sum(counts.values()) == 2000
    assert all(abs(count / 2000 - 1 / 3) < 0.03 for count in counts.values())


def test_a_later_round_branches_from_branches_too_and_counts_a_shared_step_once():
    """After one round the nodes of a tree are those of its chain, and of a branch those beyond its fork."""
    recorder = Recorder()
    draws = [chains(1, draw) for draw in range(300)]
    grow(recorder, draws, TreeConfig(rounds=2, expansions=1), seed=0)
    _, first, second = recorder.asked
    grown_at = {task.draw: task.fork.turns for task in first}
    later = [(task.draw, task.fork) for task in second if task.fork.episode.workflow]
    assert later and all(fork.turns > grown_at[draw] for draw, fork in later)
    nodes = {draw: 3 + (2 - turns) for draw, turns in grown_at.items()}
    expected = sum((count - 3) / count for count in nodes.values())
    assert abs(len(later) - expected) < 30
    assert [task.workflow for task in second] == [2] * 300


def test_leaves_are_kept_at_random_in_their_order():
    grown = grow(Recorder(), [chains(1, draw) for draw in range(400)], TreeConfig(1, 4, 2), seed=0)
    assert all(len(trees.leaves) == 2 and len(trees.pruned) == 3 for trees in grown)
    kept = [tuple(e.workflow for e in trees.leaves) for trees in grown]
    assert all(a < b for a, b in kept) and len(set(kept)) == 10
    counts = collections.Counter(itertools.chain(*kept))
    assert all(abs(counts[number] / 400 - 2 / 5) < 0.08 for number in range(5))


def test_a_draw_s_trees_depend_on_nothing_but_itself_and_the_seed():
    def branches(draws, seed=0):
        recorder = Recorder()
        grow(recorder, draws, TREE, seed)
        return {(t.draw, *fork) for t, fork in zip(recorder.asked[1], forks(recorder.asked[1]), strict=True)}

    one, two = chains(2, draw=5), chains(2, draw=6)
    assert branches([one]) | branches([two]) == branches([two, one])
    assert any(branches([one]) != branches([one], seed) for seed in range(1, 5))


def test_a_chain_that_was_aborted_does_not_branch_and_is_still_reported():
    recorder = Recorder(aborted=(1, 2))
    (grown,) = grow(recorder, [chains(2)], TREE, seed=0)
    assert {number % 2 for number, _ in forks(recorder.asked[1])} == {0}
    assert [(e.workflow, e.aborted) for e in grown.leaves] == [(0, False), (2, True), (4, False), (1, True)]
    assert grown.pruned == []


@pytest.mark.parametrize("turns", [0, 1])
def test_a_chain_of_one_turn_or_none_branches_at_its_root(turns):
    asked = []

    def run(tasks):
        asked.append(tasks)
        return [bare(task, turns) for task in tasks]

    grow(run, [chains(1)], TREE, seed=0)
    assert [(task.fork.turns, task.fork.episode.workflow) for task in asked[1]] == [(0, 0)] * 2
