"""No distillation: the Searcher of the hierarchy learns from the final answer alone, a malformed
Searcher turn costing every Searcher row of its workflow.

Command:   python -m mopd_jax.train --config=configs/searcher_grpo_workflow.py
Needs:     runs/stage1, the reference of Leader and Answerer
Hardware:  TPU v5e-64 or larger; a Search-R1 retrieval server at retrieval.url
Time:      not measured by us: no such machine has run it yet
Expected:  nothing is quoted: the paper does not say which rows a malformed turn costs
"""

from configs.full import full_scale
from configs.systems import searcher_grpo_workflow
from mopd_jax.config import Config


def get_config() -> Config:
    return full_scale(searcher_grpo_workflow)
