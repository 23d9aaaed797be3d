"""Stage 2, MultiAgent-OPD: Leader and Answerer by GRPO, the Searcher distilled from the stage-1 teacher.

Command:   python -m mopd_jax.train --config=configs/stage2.py
Needs:     runs/stage1; data/ as docs/tpu.md makes it
Hardware:  TPU v5e-64 or larger, or a v5e-16 as in docs/tpu.md; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  macro avg@4 38.68, pass@4 48.73, 5.39 searches per workflow (quoted from the paper)

The student starts from the base weights; --config.model.init=runs/stage1 starts it from the teacher.
"""

from configs.full import full_scale
from configs.systems import stage2
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(stage2)
