"""Every system of the comparison on the embedded world, from one base and one teacher.

Command:   python -m mopd_jax.train --config=configs/mini_systems.py:searcher_grpo
Phases:    those that the named system needs, it and its evaluation; without a name, all there are.
           All share one folder, runs/systems: phases that are finished there are not run again.
Hardware:  one CPU core is enough, two are faster
Time:      1 h 45 min for all of them on one core (docs/replication/report.md, before teacher_as_searcher)
Judge:     a script, since the small model cannot judge; it sees no gold answer (data/miniature_judge.py)
Expected:  docs/replication/report.md for one seed; no order is claimed: that needs many
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator

from configs import mini, systems
from configs.mini import MODELS
from mopd_jax.checks import ConfigError
from mopd_jax.config import Chain, Config, Objective, RunConfig, Workflow

TRAINED = {
    "stage2": systems.stage2,
    "search_r1": systems.search_r1,
    "tree_grpo": systems.tree_grpo,
    "prompted_critic": systems.prompted_critic,
    "searcher_grpo": systems.searcher_grpo,
    "searcher_grpo_workflow": systems.searcher_grpo_workflow,
    "base_teacher": systems.base_teacher,
    "no_searcher_loss": systems.no_searcher_loss,
    "leader_only": systems.leader_only,
    "answerer_only": systems.answerer_only,
    "no_bonus": systems.no_bonus,
}
"""What is trained from the base, with the steps and workflows of stage 2."""
EVALUATED = {
    "c_mas": systems.c_mas,
    "h_mas": systems.h_mas,
    "stage1_in_hierarchy": systems.stage1_in_hierarchy,
    "teacher_as_searcher": systems.teacher_as_searcher,
    "matched_budget": systems.matched_budget,
    "no_retriever": systems.no_retriever,
}
BETAS = {"beta_0_01": 0.01, "beta_0_1": 0.1}
"""Stage 2 has β = 1 here."""
SUFFIXES = {Workflow.CASCADE: "c_mas", Workflow.HIERARCHY: "h_mas", Workflow.SINGLE: "single"}
"""How the evaluation of a trained system is called: by the workflow that it was trained in."""


def get_config(name: str = "") -> Chain:
    found = dict(phases())
    wanted = _with_needed(_belonging_to(name, found), found) if name else found
    fields = [
        (phase, Config, dataclasses.field(default_factory=functools.partial(copy.deepcopy, config)))
        for phase, config in found.items()
        if phase in wanted
    ]
    return dataclasses.make_dataclass("Systems", fields, bases=(Chain,))(RunConfig(dir="runs/systems"))


def phases() -> Iterator[tuple[str, Config]]:
    """Every phase by its name, after those that it needs; an evaluation follows what it evaluates."""
    facts = mini.facts()
    facts.data.demonstrations = ("miniature:facts+agent",)
    yield "facts", facts
    yield "warmup", mini.imitation("noisy+agent", "facts", 110)
    learners = {"stage1": mini.stage1()} | {name: trained(system) for name, system in TRAINED.items()}
    learners |= {name: trained(systems.stage2, beta) for name, beta in BETAS.items()}
    for name, config in learners.items():
        workflow = config.team.workflow
        yield name, config
        yield f"{name}_{SUFFIXES[workflow]}", mini.evaluation(name, workflow)
    for name, system in EVALUATED.items():
        yield name, system(mini.examination(), MODELS)


def trained(system: Callable[[Config, systems.Models], Config], beta: float = 1.0) -> Config:
    """A system with the steps and workflows of stage 2."""
    config = mini.base()
    config.train = mini.stage2().train
    config = system(config, MODELS)
    if config.learn.searcher is Objective.OPD:
        config.learn.beta = beta
    return config


def _belonging_to(name: str, found: dict[str, Config]) -> list[str]:
    """A system's phase and, if it is trained, its evaluation."""
    own = [phase for phase in found if phase in (name, *(f"{name}_{s}" for s in SUFFIXES.values()))]
    if name not in own:
        raise ConfigError(f"There is no system {name!r}, expected one of {', '.join(found)}.")
    return own


def _with_needed(names: Iterable[str], found: dict[str, Config]) -> set[str]:
    """Phases, and those whose weights they take."""
    wanted = set()
    for name in names:
        models = vars(found[name].model).values()
        wanted |= {name} | _with_needed([spec for spec in models if spec in tuple(found)], found)
    return wanted
