"""Stage 1, the teacher: C-MAS + RL. Searcher and Answerer learn from the outcome (GRPO), KL to the base.

Command:   python -m mopd_jax.train --config=configs/stage1.py
Hardware:  TPU v5e-64 or larger; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  macro avg@4 36.07 evaluated as C-MAS (quoted from the paper; 25.09 untrained)
"""

from configs.full import full_scale
from configs.systems import stage1
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(stage1)
