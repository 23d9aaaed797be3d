"""The untrained cascade, evaluated: Searcher → Answerer.

Command:   python -m mopd_jax.train --config=configs/c_mas.py
Hardware:  a host of four TPU v5e chips or more; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  macro avg@4 25.09 (quoted from the paper)
"""

from configs.full import full_scale
from configs.systems import c_mas
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(c_mas)
