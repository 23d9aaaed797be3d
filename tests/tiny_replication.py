"""The smallest replication there is: a base, one system trained two steps, three evaluations.

Evaluations are called as in the paper's table; one has other limits.
"""

from dataclasses import dataclass, field

from mopd_jax.config import Chain, Config, EvalConfig, Kind, ModelConfig, Objective, TrainConfig
from tests import tiny


def stage1() -> Config:
    config = tiny.team()
    config.train.steps = 2
    config.model = ModelConfig(init="base", reference="base")
    config.learn.searcher = Objective.GRPO
    return config


def evaluate(init: str, session_searches: int = 3) -> Config:
    config = tiny.team()
    config.train = TrainConfig(kind=Kind.EVALUATE)
    config.model = ModelConfig(init=init)
    config.team.session_searches = session_searches
    config.eval = EvalConfig(questions=3, attempts=2)
    return config


@dataclass
class TinyReplication(Chain):
    """One seed of it."""

    base: Config = field(default_factory=lambda: tiny.imitate("random"))
    stage1: Config = field(default_factory=stage1)
    c_mas: Config = field(default_factory=lambda: evaluate("base"))
    stage1_c_mas: Config = field(default_factory=lambda: evaluate("stage1"))
    capped: Config = field(default_factory=lambda: evaluate("stage1", session_searches=1))


def get_config() -> TinyReplication:
    return TinyReplication()
