"""Stage 2 evaluated with a retriever that finds nothing: what the team knows by heart.

Command:   python -m mopd_jax.train --config=configs/no_retriever.py
Needs:     runs/stage2
Hardware:  a host of four TPU v5e chips or more
Time:      not measured by us: no such machine has run it yet
Expected:  nothing is quoted: the paper leaves it open
"""

from configs.full import full_scale
from configs.systems import no_retriever
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(no_retriever)
