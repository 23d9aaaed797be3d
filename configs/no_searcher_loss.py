"""Stage 2 without any loss on what the Searcher says.

Command:   python -m mopd_jax.train --config=configs/no_searcher_loss.py
Needs:     runs/stage1, the reference
Hardware:  TPU v5e-64 or larger; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  macro avg@4 29.82 (quoted from the paper)
"""

from configs.full import full_scale
from configs.systems import no_searcher_loss
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(no_searcher_loss)
