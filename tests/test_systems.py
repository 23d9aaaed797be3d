"""Every system of the comparison: what its episodes teach, by hand, and that it trains and evaluates."""

import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from configs import mini_systems, systems
from mopd_jax import flags
from mopd_jax.checks import ConfigError
from mopd_jax.config import Chain, Config, Kind, LearnConfig, phases
from mopd_jax.learn.advantages import RowScores, flatten, token_advantages
from mopd_jax.run.dry_run import dry_run
from mopd_jax.team.episode import Episode, Role, Status
from tests.fakes import make_answers, make_episode, make_row
from tests.fixtures import read_metrics

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODELS = systems.Models("base", "stage1", "stage2", "judge")
SHARED = {"full", "systems", "mini", "mini_systems", "warmup"}
FULL_SCALE = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem not in SHARED)


def load(name: str) -> Config | Chain:
    return flags.load([f"--config={ROOT}/configs/{name}.py" + (":0.1" if name == "beta" else "")])


# ---------------------------------------------------------------- what its episodes teach

OLD, TEACHER, REFERENCE = (np.full(1, logp, np.float32) for logp in (-1.0, -0.5, -3.0))
KL = 1e-3 * 2
"""Of one token: 1e-3 · (log π_old − log π_ref)."""
PAIR = 0.5 / (0.5**0.5 + 1e-9)
"""Two different rewards of a group, normalised: ±0.7071."""
THREE = 1 / 3**0.5
"""Of rewards a, b, b: 2/√3, −1/√3, −1/√3."""


def learn_of(system) -> LearnConfig:
    return system(Config(), MODELS).learn


def token(role: Role, body: str = "", **about):
    """A row of one generated token."""
    return make_row(role, body, mask=(0, 1), **about)


def answers(*bodies: str, session: int) -> list:
    rows = make_answers(*bodies, session=session)
    for row in rows:
        row.ids, row.mask, row.logps = (stream[1:] for stream in (row.ids, row.mask, row.logps))
        row.mask[0] = False
    return rows


def hierarchies() -> list[Episode]:
    """One draw of two workflows: the first is right although its second Searcher is malformed, the second
    is wrong and does not search."""
    right = [
        token(Role.LEADER),
        token(Role.SEARCHER, "found", session=1, searches=2),
        token(Role.SEARCHER, status=Status.MALFORMED, session=2, searches=1),
        *answers("Paris", "Rome", session=3),
    ]
    wrong = [
        token(Role.LEADER),
        token(Role.SEARCHER, "guessed", session=1),
        *answers("Rome", "Bonn", session=2),
    ]
    return [make_episode(*right), make_episode(*wrong, workflow=1)]


def cascades() -> list[Episode]:
    """One draw of two workflows: right after two searches, wrong after one."""
    return [
        make_episode(token(Role.SEARCHER, "found", searches=2), *answers("Paris", "Rome", session=1)),
        make_episode(
            token(Role.SEARCHER, "guessed", searches=1), *answers("Rome", "Bonn", session=1), workflow=1
        ),
    ]


def advantages(episodes: list[Episode], learn: LearnConfig) -> list[float | None]:
    """The advantage of each row's one token, None where the loss leaves it out."""
    scores = [RowScores(OLD, TEACHER, REFERENCE) for _ in flatten(episodes)]
    found = token_advantages(episodes, learn, scores)
    return [float(v[0]) if m[0] else None for v, m in zip(found.values, found.masks, strict=True)]


LEADERS = [PAIR - KL, -PAIR - KL]
"""Rewards 0.9 + 0.1 · 3/6 and 0."""
ANSWERERS = [[PAIR - KL, -PAIR - KL], [-KL, -KL]]
"""Candidates 1 and 0; a tied request keeps its KL alone."""
DISTILLED = [0.01 * 0.5] * 3


def in_order(leaders, searchers, answerers) -> list[float | None]:
    """Rows as `hierarchies` lists them."""
    return [leaders[0], *searchers[:2], *answerers[0], leaders[1], searchers[2], *answerers[1]]


@pytest.mark.parametrize(
    ("system", "leaders", "searchers", "answerers"),
    [
        (systems.stage2, LEADERS, DISTILLED, ANSWERERS),
        (systems.base_teacher, LEADERS, DISTILLED, ANSWERERS),
        (systems.no_bonus, LEADERS, DISTILLED, ANSWERERS),
        (systems.no_searcher_loss, LEADERS, [None] * 3, ANSWERERS),
        (systems.leader_only, LEADERS, DISTILLED, [[None] * 2] * 2),
        (systems.answerer_only, [None] * 2, DISTILLED, ANSWERERS),
        # E = 1, −1 for the malformed row, E = 0: their mean is 0, their std 1, and no KL.
        (systems.searcher_grpo, LEADERS, [1.0, -1.0, 0.0], ANSWERERS),
        # −1, −1 and 0.
        (systems.searcher_grpo_workflow, LEADERS, [-THREE, -THREE, 2 * THREE], ANSWERERS),
    ],
)
def test_advantages_in_the_hierarchy(system, leaders, searchers, answerers):
    found = advantages(hierarchies(), learn_of(system))
    wanted = in_order(leaders, searchers, answerers)
    assert [a is None for a in found] == [a is None for a in wanted]
    np.testing.assert_allclose(
        [a for a in found if a is not None], [a for a in wanted if a is not None], rtol=1e-5
    )


def test_without_the_bonus_searches_do_not_pay():
    """Two wrong workflows, 3 searches and none: the bonus alone tells their Leaders apart."""
    episodes = hierarchies()
    for row in episodes[0].rows:
        row.body = "Rome"
    leaders = [advantages(episodes, learn_of(system))[::5] for system in (systems.stage2, systems.no_bonus)]
    np.testing.assert_allclose(leaders, [[PAIR - KL, -PAIR - KL], [-KL, -KL]], rtol=1e-4)


def test_advantages_in_the_cascade():
    """Searcher rewards 0.9 + 0.1 and 0.05, with KL."""
    wanted = [PAIR - KL, *ANSWERERS[0], -PAIR - KL, *ANSWERERS[1]]
    np.testing.assert_allclose(advantages(cascades(), learn_of(systems.stage1)), wanted, rtol=1e-5)


def test_advantages_of_a_judged_searcher():
    """Scores 0.8 and 0.2 and −1 for the malformed row; then one that could not be read is left out, of the
    loss and of mean and std."""
    learn, episodes = learn_of(systems.prompted_critic), hierarchies()
    episodes[0].rows[1].score, episodes[1].rows[1].score = 0.8, 0.2
    std = (0.8**2 + 0.2**2 + 1) / 2  # the mean is 0
    judged = [reward / std**0.5 for reward in (0.8, -1.0, 0.2)]
    np.testing.assert_allclose(advantages(episodes, learn), in_order(LEADERS, judged, ANSWERERS), rtol=1e-5)
    episodes[1].rows[1].score = None
    found = advantages(episodes, learn)
    wanted = in_order(LEADERS, [PAIR, -PAIR, None], ANSWERERS)
    assert found[6] is None and wanted[6] is None
    np.testing.assert_allclose(found[:6] + found[7:], wanted[:6] + wanted[7:], rtol=1e-5)


def agents(*bodies: str) -> list[Episode]:
    """One draw of single agents; an empty body is a malformed one."""
    statuses = [Status.FINISHED if body else Status.MALFORMED for body in bodies]
    rows = [token(Role.AGENT, body, status=s) for body, s in zip(bodies, statuses, strict=True)]
    return [make_episode(row, workflow=number) for number, row in enumerate(rows)]


def test_advantages_of_the_single_agent():
    """Rewards 1, 0 and −1: mean 0, std 1; the −1 replaces the KL too."""
    found = advantages(agents("Paris", "Rome", ""), learn_of(systems.search_r1))
    np.testing.assert_allclose(found, [1 - KL, -KL, -1], rtol=1e-5)


def test_advantages_of_a_tree():
    """Rewards 1, 0.2, 0.2 in one tree, three times 0.2 in the other: as of [1, 0, 0] and [0, 0, 0]."""
    learn, episodes = learn_of(systems.tree_grpo), agents("Paris", *["Rome"] * 5)
    for number, episode in enumerate(episodes):
        episode.tree = number // 3
    wanted = np.array([3.1959, *[-0.9856] * 2, *[-0.4082] * 3]) - KL
    np.testing.assert_allclose(advantages(episodes, learn), wanted, atol=1e-4)


# ---------------------------------------------------------------- full scale


def test_the_systems_of_the_comparison_are_there():
    named = """c_mas h_mas stage1 stage2 searcher_grpo searcher_grpo_workflow base_teacher no_searcher_loss
        prompted_critic search_r1 tree_grpo leader_only answerer_only no_bonus beta
        stage1_in_hierarchy teacher_as_searcher matched_budget no_retriever"""
    assert sorted(named.split()) == FULL_SCALE
    small = set(dict(mini_systems.phases()))
    assert {name for name in FULL_SCALE if name != "beta"} | set(mini_systems.BETAS) <= small


@pytest.mark.parametrize("name", FULL_SCALE)
def test_a_full_scale_config_passes_its_checks(name):
    assert load(name).run.dir == ("runs/beta_0.1" if name == "beta" else f"runs/{name}")


def differently_planned() -> list[str]:
    """One config of each kind, workflow and set of models: objectives alone change no shape."""
    names = {}
    for name in FULL_SCALE:
        config = load(name)
        names.setdefault(repr((config.train.kind, config.team, config.tree, config.model)), name)
    return list(names.values())


@pytest.mark.parametrize("name", differently_planned())
def test_shapes_memory_and_time_of_a_full_scale_config_are_known_beforehand(name):
    config = load(name)
    text = "\n".join(dry_run(config, "qwen3-4b", "v5e"))
    assert "checkpoints/Qwen3-4B-Instruct-2507: 4,022,468,096 parameters" in text or "runs/stage" in text
    assert ("update" in text) == (config.train.kind is not Kind.EVALUATE)


def test_models_of_the_full_scale_systems():
    base, stage1 = "checkpoints/Qwen3-4B-Instruct-2507", "runs/stage1"
    models = {name: load(name).model for name in FULL_SCALE}
    found = {name: (m.init, m.teacher, m.reference) for name, m in models.items()}
    assert found["stage1"] == (base, "", base)
    assert found["stage2"] == found["no_bonus"] == found["leader_only"] == (base, stage1, stage1)
    assert found["searcher_grpo"] == found["no_searcher_loss"] == (base, "", stage1)
    assert found["search_r1"] == found["tree_grpo"] == (base, "", base)
    assert found["prompted_critic"] == (base, "", stage1) and models["prompted_critic"].judge == base
    assert found["base_teacher"] == (base, base, base)
    assert found["stage1_in_hierarchy"] == (stage1, "", "")
    assert found["matched_budget"] == found["no_retriever"] == ("runs/stage2", "", "")
    assert found["teacher_as_searcher"] == ("runs/stage2", "", "")
    assert {name: m.searcher for name, m in models.items() if m.searcher} == {"teacher_as_searcher": stage1}


def test_a_matched_budget_is_the_cascades():
    assert load("matched_budget").team.workflow_searches == load("c_mas").team.session_searches == 4


# ---------------------------------------------------------------- the embedded world


def test_a_named_system_brings_what_it_needs():
    assert list(phases(mini_systems.get_config("searcher_grpo"))) == [
        *("facts", "warmup", "stage1", "searcher_grpo", "searcher_grpo_h_mas")
    ]
    assert list(phases(mini_systems.get_config("c_mas"))) == ["facts", "warmup", "c_mas"]
    matched = phases(mini_systems.get_config("matched_budget"))
    assert list(matched) == ["facts", "warmup", "stage1", "stage2", "matched_budget"]
    mixed = phases(mini_systems.get_config("teacher_as_searcher"))
    assert list(mixed) == ["facts", "warmup", "stage1", "stage2", "teacher_as_searcher"]
    model = mixed["teacher_as_searcher"].model
    assert (model.init, model.searcher) == ("runs/systems/stage2", "runs/systems/stage1")
    with pytest.raises(ConfigError, match=r"no system 'critic', expected one of facts, warmup, stage1, "):
        mini_systems.get_config("critic")


SHOWN = {
    "stage2": {"kl/leader", "log_ratio/leader", "reward/leader"},
    "no_searcher_loss": {"kl/leader", "reward/leader"},
    "prompted_critic": {"kl/leader", "seconds/judge"},
    "search_r1": {"reward/agent", "em/agent", "kl/agent"},
    "tree_grpo": {"reward/agent", "tree/calls", "tree/calls_alone"},
}
"""What some systems measure and others do not; the untrained Leader sends no Searcher out."""


def check_systems(folder: pathlib.Path, name: str) -> None:
    """Trains and evaluates the systems of this name, all of them for "", and looks at what they leave."""
    device = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    config = "tests/tiny_systems.py" + (f":{name}" if name else "")
    done = subprocess.run(
        [sys.executable, "-m", "mopd_jax.train", f"--config={config}", f"--config.run.dir={folder}"],
        cwd=ROOT,
        # Phases share most programs: small ones are kept too.
        env=os.environ | {"XLA_FLAGS": device, "JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for phase, config in phases(mini_systems.get_config(name)).items():
        if config.train.kind is Kind.EVALUATE:
            records = (folder / phase / "results.jsonl").read_text().splitlines()[1:]
            assert [json.loads(record)["attempt"] for record in records] == [0, 1]
        else:
            lines = read_metrics(folder / phase)
            assert [line["step"] for line in lines] == [1, 2]
            assert SHOWN.get(phase, set()) <= lines[0].keys(), phase


@pytest.mark.parametrize("name", ["tree_grpo", "prompted_critic"])
def test_a_system_trains_two_steps_and_is_evaluated(name, tmp_path):
    check_systems(tmp_path, name)


@pytest.mark.slow
def test_every_system_trains_two_steps_and_is_evaluated(tmp_path):
    check_systems(tmp_path, "")
