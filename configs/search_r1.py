"""Search-R1, the single agent: it searches and answers in one conversation, GRPO on its own exact match.

Command:   python -m mopd_jax.train --config=configs/search_r1.py
Hardware:  TPU v5e-64 or larger; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  nothing is quoted: we know of no figure of the paper for it
"""

from configs.full import full_scale
from configs.systems import search_r1
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(search_r1)
