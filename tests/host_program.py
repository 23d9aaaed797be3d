"""What `test_hosts` runs in one process and in two: everything that processes do together.

`python -m tests.host_program OUT COORDINATOR PROCESSES PROCESS`; the findings go to OUT as JSON.
"""

import json
import pathlib
import sys

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mopd_jax.config import Config, LearnConfig, Objective, OptimConfig, TrainConfig
from mopd_jax.data.questions import QuestionSource
from mopd_jax.learn.learner import Learner
from mopd_jax.learn.score import Frozen, Scorer
from mopd_jax.model import sharding
from mopd_jax.rollout.driver import Task
from mopd_jax.rollout.engine import Usage
from mopd_jax.run import hosts
from mopd_jax.run.metrics import Stopwatch
from mopd_jax.run.parts import Team
from mopd_jax.run.sources import Reinforcement
from mopd_jax.team.episode import Episode, Role, Row
from tests.fakes import make_answers, make_episode, make_question, make_row
from tests.tiny_qwen3 import make_model, make_params, random_ids

MODEL = make_model(num_layers=2, vocab_size=40)
LEARN = LearnConfig(kl=0.0, leader=Objective.NONE, row_buckets=(40,), micro_batch_tokens=320, beta=0.5)
QUESTIONS = [make_question(str(i), answers=("yes",)) for i in range(5)]
LENGTHS = ((2, 33), (5, 31), (2, 38), (3, 36), (7, 4))
"""Prompt and reply of the rows of each question: however unequal."""
DEVICES = 4


def recorded(task: Task) -> Episode:
    """Returns the episode of a task, as if it had been sampled before."""
    number = int(task.question.id)
    rng = np.random.default_rng((number, task.draw, task.workflow))
    prompt, reply = LENGTHS[number]
    mask = (0,) * prompt + (1,) * (reply - task.workflow)
    answers = ["yes" if rng.random() < 0.5 else "no" for _ in range(2)]
    rows = [make_row(Role.SEARCHER, "found", mask=mask), *make_answers(*answers)]
    return make_episode(*map(_drawn(rng), rows), question=task.question, workflow=task.workflow)


def _drawn(rng: np.random.Generator):
    def draw(row: Row) -> Row:
        row.ids = random_ids(rng, len(row.ids))
        row.logps = np.where(row.mask, rng.uniform(-5, -1, len(row.ids)), 0).astype(np.float32)
        return row

    return draw


class Replay:
    """Engine, driver and retriever that give recorded episodes instead of sampling them."""

    def __init__(self):
        self.played = []

    def load(self, params) -> None:
        pass

    def unload(self) -> None:
        pass

    def run(self, _, tasks: list[Task]) -> list[Episode]:
        self.played.append(len(tasks))
        return [recorded(task) for task in tasks]

    def take_usage(self) -> Usage:
        return Usage(decoded=self.played[-1])

    def take_counts(self) -> tuple[int, int]:
        return 4 * self.played[-1], self.played[-1]


def train(questions: int, learner: Learner, scorer: Scorer, layout) -> dict:
    """Takes three steps on the recorded episodes, as the training program does."""
    config = Config(learn=LEARN, train=TrainConfig(questions=questions, workflows=2))
    config.model.teacher = "teacher"
    replay = Replay()
    source = Reinforcement(
        config,
        QuestionSource([QUESTIONS], seed=1),
        Team(replay, replay, replay, None),
        scorer,
        judge=None,
        shards=DEVICES,
    )
    state = learner.init_state(laid_out(make_params(MODEL), layout))
    lines = []
    for step in range(3):
        batch = source.batch(step, state.params, Stopwatch())
        state, report = learner.update(state, batch.packed.batch.micros, batch.streams)
        lines.append(batch.metrics | vars(report))
    return {"lines": lines, "played": replay.played}


def laid_out(params, layout):
    """Returns parameters that every process has whole, split over all devices."""
    return jax.tree.map(sharding.place, jax.tree.map(np.asarray, params), layout)


def hand_over() -> list[bool]:
    """Hands weights from a mesh with its own order of devices to the engine's; says whether they are whole
    and lie on the devices of this process."""
    order = np.array(jax.devices()[:DEVICES])[[2, 0, 3, 1]].reshape(1, 2, 2)
    mesh = Mesh(order, sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    expected = jax.tree.map(np.asarray, make_params(MODEL))
    layout = sharding.param_shardings(MODEL, sharding.local_mesh(2))
    found = sharding.hand_over(laid_out(expected, sharding.param_shardings(MODEL, mesh)), layout)
    return [
        np.array_equal(x, y) and x.sharding == wanted and x.devices() == set(jax.local_devices()[:2])
        for x, y, wanted in zip(*map(jax.tree.leaves, (found, expected, layout)), strict=True)
    ]


def words(work) -> str:
    """Returns how `work` is refused."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def squares(numbers: list[int]) -> list[str]:
    """Returns each square with the process that computed it."""
    return [f"{number**2} by {jax.process_index()}" for number in numbers]


def fail_on_the_last(numbers: list[int]) -> list[int]:
    if jax.process_index() == jax.process_count() - 1:
        raise KeyError("no corpus")
    return numbers


def findings(folder: pathlib.Path) -> dict:
    me = jax.process_index()
    mesh = sharding.make_mesh((1, DEVICES, 1), jax.devices()[:DEVICES])
    layout = sharding.param_shardings(MODEL, mesh)
    teacher = Frozen(MODEL, laid_out(make_params(MODEL, seed=1), layout))
    programs = (
        Learner(MODEL, LEARN, OptimConfig(lr=1e-2), 3, mesh),
        Scorer(MODEL, {"teacher": teacher}, LEARN.logit_chunk, mesh),
        layout,
    )
    return {
        "gathered": hosts.gather({"process": me, "long": "x" * 1000 * me}),
        "first": hosts.of_first(lambda: f"of {me}"),
        "any": [hosts.any_of(False), hosts.any_of(me == 0), hosts.any_of(me == jax.process_count() - 1)],
        "spread": hosts.spread(squares, range(7), together=2),
        "no_items": hosts.spread(squares, [], together=2),
        "failed": words(lambda: hosts.spread(fail_on_the_last, range(4), together=1)),
        "disagreed": words(lambda: hosts.agreed(lambda: {"config": {"lr": me, "seed": 0}})),
        "shared": words(lambda: hosts.check_shared(folder)),
        "not_shared": words(lambda: hosts.check_shared(folder / str(me))),
        "hand_over": hand_over(),
        "equal": train(4, *programs),
        "one_idle": train(1, *programs),
    }


def main(out: pathlib.Path, coordinator: str, processes: str, process: str) -> None:
    hosts.initialize(coordinator, int(processes), int(process))
    found = findings(out.parent)
    print(f"process {process} speaks", flush=True)
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
