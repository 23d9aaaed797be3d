"""Stage 2 of the embedded world, from a policy that stands in for student, teacher and reference.

A contestant of its own: it needs the tokenizer's library, which the rest of our work does without.
"""

from collections.abc import Callable
from pathlib import Path

import jax

from configs.mini import stage2
from mopd_jax.config import Config, ModelConfig, Precision
from mopd_jax.learn.learner import Learner
from mopd_jax.model import sharding
from mopd_jax.rollout.driver import Task
from mopd_jax.run import parts, sources
from mopd_jax.run.metrics import Stopwatch
from tools.bench import inputs
from tools.bench.cases import STEP, Job

VERSIONS = {"jax": jax.__version__}


def training(policy: Path, questions: int, precision: Precision) -> Config:
    """Returns the phase as `configs/mini.py` has it, in this precision, with so many questions in a step."""
    config = stage2()
    spec = str(policy)
    config.model = ModelConfig(
        init=spec, teacher=spec, reference=spec, compute=precision, frozen=precision, rollout=precision
    )
    config.train.questions = questions
    return config


def tasks(config: Config, step: int) -> list[Task]:
    """Returns the workflows of a step."""
    draws = parts.question_source(config).batch(step, config.train.questions)
    return [Task(question, draw, w) for question, draw in draws for w in range(config.train.workflows)]


def step(job: Job) -> Callable[[], dict]:
    """Steps of stage 2 of the embedded world: roll out → score → update, other questions in each."""
    config = training(inputs.policy(job.folder), job.multiple * job.sizes.questions, Precision(job.dtype))
    mesh = sharding.make_mesh((1, 1, 1), jax.devices()[:1])
    student = parts.open_model(config.model.init, config)
    learner = Learner(student.model, config.learn, config.optim, config.train.steps, mesh)
    team = parts.make_team(config, student, config.team.candidates)
    source = sources.make_source(config, student, team, mesh)
    state = learner.init_state(parts.load_params(student, mesh, Precision.FLOAT32, config.run.seed))
    watch, done = Stopwatch(), 0

    def run() -> dict:
        nonlocal state, done
        batch = source.batch(done, state.params, watch)
        with watch("update"):
            state, _ = learner.update(state, batch.packed.batch.micros, batch.streams)
            jax.block_until_ready(state)
        done += 1
        speed = sources.speed(batch, watch.take())
        return speed | {
            "tokens": sum(len(row.ids) for row in batch.rows),
            "utilisation": batch.metrics["engine/utilisation"],
        }

    return run


DO = {STEP: step}
