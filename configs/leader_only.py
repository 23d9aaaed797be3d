"""Stage 2 without the Answerer's objective.

Command:   python -m mopd_jax.train --config=configs/leader_only.py
Needs:     runs/stage1
Hardware:  TPU v5e-64 or larger; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  nothing is quoted: the paper leaves it open
"""

from configs.full import full_scale
from configs.systems import leader_only
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(leader_only)
