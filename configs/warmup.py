"""Supervised warm-up on your own conversations, for a model that does not yet speak the team's language.

Command:   python -m mopd_jax.train --config=configs/warmup.py
Needs:     data/demonstrations.jsonl, of `python -m tools.make_demonstrations` or your own in the same form
           (mopd_jax/data/demonstrations.py)
Hardware:  TPU v5e-64 or larger
Time:      not measured by us: no such machine has run it yet
Expected:  nothing is quoted: the paper trains without a warm-up, Qwen3-4B-Instruct follows the prompts
"""

from dataclasses import replace

from configs.full import base
from mopd_jax.config import Config, Kind, OptimConfig, Schedule, TrainConfig


def get_config() -> Config:
    config = base()
    config.run.dir = "runs/warmup"
    config.train = TrainConfig(kind=Kind.SUPERVISED, steps=500, questions=256)
    config.data = replace(config.data, train=(), demonstrations=("data/demonstrations.jsonl",))
    config.optim = OptimConfig(lr=1e-5, schedule=Schedule.COSINE, warmup_steps=20)
    config.eval.every = 0
    return config
