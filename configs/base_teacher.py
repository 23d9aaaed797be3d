"""Stage 2 with the base model as its teacher.

Command:   python -m mopd_jax.train --config=configs/base_teacher.py
Hardware:  TPU v5e-64 or larger; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  macro avg@4 29.50 (quoted from the paper)
"""

from configs.full import full_scale
from configs.systems import base_teacher
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(base_teacher)
