"""The weights of stage 1 in the full team, evaluated: they were not trained there.

Command:   python -m mopd_jax.train --config=configs/stage1_in_hierarchy.py
Needs:     runs/stage1
Hardware:  a host of four TPU v5e chips or more; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  nothing is quoted: the paper leaves it open
"""

from configs.full import full_scale
from configs.systems import stage1_in_hierarchy
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(stage1_in_hierarchy)
