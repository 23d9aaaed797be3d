"""Stage 1, the teacher: C-MAS + RL. Searcher and Answerer learn from the outcome (GRPO), KL to the base.

Command:   python -m mopd_jax.train --config=configs/stage1.py
Needs:     data/ as docs/tpu.md makes it
Hardware:  TPU v5e-64 or larger, or a v5e-16 as in docs/tpu.md; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  macro avg@4 36.07 evaluated as C-MAS (quoted from the paper; 25.09 untrained)
"""

from configs.full import full_scale
from configs.systems import stage1
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(stage1)
