"""Stage 2 without the bonus for searches in the Leader's reward.

Command:   python -m mopd_jax.train --config=configs/no_bonus.py
Needs:     runs/stage1
Hardware:  TPU v5e-64 or larger; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  nothing is quoted: the paper leaves it open
"""

from configs.full import full_scale
from configs.systems import no_bonus
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(no_bonus)
