"""The smallest training there is: a few steps of imitation from random weights, then a distilled cascade.

The Searcher speaks first there, so that even a policy that knows no grammar has tokens to be distilled.
"""

from dataclasses import dataclass, field, replace

from configs.mini import base, imitation
from mopd_jax.config import (
    ArchitectureConfig,
    Chain,
    CheckpointConfig,
    Config,
    ModelConfig,
    Objective,
    TrainConfig,
    Workflow,
)

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "head_dim": 8}


def imitate(init: str) -> Config:
    config = imitation("facts", init, 2)
    config.train.questions = 2
    config.model.architecture = ArchitectureConfig(**SIZES)
    return config


def team() -> Config:
    config = base()
    config.train = TrainConfig(steps=4, questions=2, workflows=2)
    config.model = ModelConfig(init="start", teacher="teacher", reference="teacher")
    config.team.workflow = Workflow.CASCADE
    config.learn.leader = Objective.NONE
    config.team = replace(config.team, leader_tokens=8, searcher_tokens=8, answerer_tokens=6)
    config.rollout = replace(config.rollout, conversations=8, parked=4, requests=2, prefill_rows=4)
    config.learn = replace(config.learn, row_buckets=(208,), micro_batch_tokens=832, role_gradients_every=2)
    config.checkpoint = CheckpointConfig(every=1)
    return config


@dataclass
class Tiny(Chain):
    """Imitation, more of it, then a team whose Searcher learns from the latter."""

    start: Config = field(default_factory=lambda: imitate("random"))
    teacher: Config = field(default_factory=lambda: imitate("start"))
    team: Config = field(default_factory=team)


def get_config() -> Tiny:
    return Tiny()
