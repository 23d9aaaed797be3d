"""No distillation: the Searcher of the hierarchy learns from the final answer alone.

Command:   python -m mopd_jax.train --config=configs/searcher_grpo.py
Needs:     runs/stage1, the reference of Leader and Answerer
Hardware:  TPU v5e-64 or larger; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  macro avg@4 17.78, no search in 20,000 workflows (quoted from the paper)
"""

from configs.full import full_scale
from configs.systems import searcher_grpo
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(searcher_grpo)
