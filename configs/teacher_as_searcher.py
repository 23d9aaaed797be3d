"""Stage 2 evaluated with the teacher's weights as its Searcher: Leader and Answerer keep their own.

Command:   python -m mopd_jax.train --config=configs/teacher_as_searcher.py
Needs:     runs/stage1, runs/stage2
Hardware:  a host of four TPU v5e chips or more, which hold two engines; a Search-R1 retrieval server at
           retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  nothing is quoted: the paper leaves it open
"""

from configs.full import full_scale
from configs.systems import teacher_as_searcher
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(teacher_as_searcher)
