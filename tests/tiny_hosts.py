"""One phase for several processes: a tiny team with a teacher from a folder, or without one an imitation."""

from dataclasses import replace

from mopd_jax.config import ArchitectureConfig, CheckpointConfig, Config, EvalConfig, MeshConfig
from tests import tiny


def get_config(teacher: str = "") -> Config:
    config = tiny.team() if teacher else tiny.imitate("random")
    config.train.steps = 6 if teacher else 30
    config.model.init, config.model.teacher, config.model.reference = "random", teacher, teacher
    config.model.architecture = ArchitectureConfig(**tiny.SIZES)
    config.mesh = MeshConfig(shape=(1, 4, 1))
    config.learn = replace(config.learn, row_buckets=(208,), micro_batch_tokens=832)
    config.checkpoint = CheckpointConfig(every=10)
    if teacher:
        config.eval = EvalConfig(every=2, validation_questions=3)
    return config
