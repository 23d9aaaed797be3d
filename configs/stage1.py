"""Stage 1, the teacher: C-MAS + RL. Searcher and Answerer learn from the outcome (GRPO), KL to the base.

Command:   python -m mopd_jax.train --config=configs/stage1.py --config.run.dir=runs/stage1
Hardware:  TPU v5e-64 or larger; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  macro avg@4 36.07 evaluated as C-MAS (quoted from the paper; 25.09 untrained)
"""

from configs.full import BASE, base
from mopd_jax.config import Config, Objective, Workflow


def get_config() -> Config:
    config = base()
    config.run.dir = "runs/stage1"
    config.team.workflow = Workflow.CASCADE
    config.model.reference = BASE
    config.learn.leader = Objective.NONE
    config.learn.searcher = Objective.GRPO
    return config
