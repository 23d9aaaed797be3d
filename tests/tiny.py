"""The smallest training run there is: one stage-2 phase of the embedded world, random weights everywhere."""

from dataclasses import replace

from configs.mini import base
from mopd_jax.config import ArchitectureConfig, CheckpointConfig, Config, ModelConfig, TrainConfig


def get_config() -> Config:
    config = base()
    config.train = TrainConfig(steps=4, questions=2, workflows=2)
    config.model = ModelConfig(
        init="random",
        teacher="random",
        reference="random",
        architecture=ArchitectureConfig(hidden_size=32, intermediate_size=64, num_layers=2, head_dim=8),
    )
    config.team = replace(config.team, leader_tokens=8, searcher_tokens=8, answerer_tokens=6)
    config.rollout = replace(config.rollout, conversations=8, requests=2, prefill_rows=4)
    config.learn = replace(config.learn, row_buckets=(208,), micro_batch_tokens=832, role_gradients_every=2)
    config.checkpoint = CheckpointConfig(every=1)
    return config
