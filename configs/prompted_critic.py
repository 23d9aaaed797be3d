"""The prompted critic: the Searcher learns from a judge's score of each of its sessions.

The judge is the untrained base model; any checkpoint will do, e.g. --config.model.judge=runs/judge.

Command:   python -m mopd_jax.train --config=configs/prompted_critic.py
Needs:     runs/stage1, the reference of Leader and Answerer
Hardware:  TPU v5e-64 or larger; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  macro avg@4 34.62, pass@4 45.96, 4.45 searches per workflow (quoted from the paper)
"""

from configs.full import full_scale
from configs.systems import prompted_critic
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(prompted_critic)
