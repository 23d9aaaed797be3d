"""Every system of `configs/mini_systems.py`, as small as it can be."""

import dataclasses

from configs import mini_systems
from mopd_jax.config import ArchitectureConfig, Chain, Config, Kind
from tests.tiny import SIZES


def get_config(name: str = "") -> Chain:
    chain = mini_systems.get_config(name)
    for phase in vars(chain).values():
        if isinstance(phase, Config):
            shrink(phase)
    return chain


def shrink(config: Config) -> None:
    """Two steps of one question; an evaluation asks one question twice."""
    config.model.architecture = ArchitectureConfig(**SIZES)
    config.train = dataclasses.replace(config.train, steps=2, questions=2)
    if config.train.kind is Kind.REINFORCE:
        config.train.questions = 1
        config.train.workflows = min(config.train.workflows, 2)
    config.team = dataclasses.replace(config.team, leader_tokens=8, searcher_tokens=8, answerer_tokens=6)
    config.rollout = dataclasses.replace(config.rollout, conversations=8, requests=2, prefill_rows=4)
    config.learn = dataclasses.replace(
        config.learn, row_buckets=(208,), micro_batch_tokens=832, role_gradients_every=0
    )
    config.eval = dataclasses.replace(config.eval, questions=1, attempts=2)
