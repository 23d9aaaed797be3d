"""Stage 2 evaluated with no more searches than the cascade may make.

--config.team.workflow_searches=12 --config.team.workflow_input_tokens=3886 caps what is read instead, at what
stage 1 reads in the paper.

Command:   python -m mopd_jax.train --config=configs/matched_budget.py
Needs:     runs/stage2
Hardware:  a host of four TPU v5e chips or more; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  nothing is quoted: the paper leaves it open
"""

from configs.full import full_scale
from configs.systems import matched_budget
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(matched_budget)
