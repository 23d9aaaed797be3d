"""One phase of a tiny team, for several processes: random weights, a teacher from a folder, validation."""

from mopd_jax.config import Config, EvalConfig, MeshConfig
from tests import tiny


def get_config(teacher: str) -> Config:
    config = tiny.team()
    config.model.init, config.model.teacher, config.model.reference = "random", teacher, teacher
    config.model.architecture = tiny.ArchitectureConfig(**tiny.SIZES)
    config.mesh = MeshConfig(shape=(1, 4, 1), rollout_tensor=1)
    config.eval = EvalConfig(every=2, validation_questions=3)
    config.train.steps = 6
    return config
