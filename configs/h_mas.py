"""The untrained hierarchy, evaluated: Leader ⇄ Searcher → Answerer.

Command:   python -m mopd_jax.train --config=configs/h_mas.py
Hardware:  a host of four TPU v5e chips or more; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  macro avg@4 28.60 (quoted from the paper)
"""

from configs.full import full_scale
from configs.systems import h_mas
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(h_mas)
