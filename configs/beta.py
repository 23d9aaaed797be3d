"""Stage 2 with another β, e.g. `configs/beta.py:0.1`; 0.01 is stage2.py.

Command:   python -m mopd_jax.train --config=configs/beta.py:0.1
Needs:     runs/stage1
Hardware:  TPU v5e-64 or larger; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  nothing is quoted: the paper gives 0.01 alone
"""

from configs.full import full_scale
from configs.systems import stage2
from mopd_jax.config import Config


def get_config(beta: str) -> Config:
    config = full_scale(stage2)
    config.learn.beta = float(beta)
    config.run.dir = f"runs/beta_{beta}"
    return config
