"""Tree-GRPO: the single agent's chains branch, and each leaf is compared in its tree and in its question.

Command:   python -m mopd_jax.train --config=configs/tree_grpo.py
Hardware:  TPU v5e-64 or larger; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  macro avg@4 37.37 (quoted from the paper)
"""

from configs.full import full_scale
from configs.systems import tree_grpo
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(tree_grpo)
