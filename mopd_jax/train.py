"""Trains a phase or a chain of phases: `python -m mopd_jax.train --config=configs/stage2.py`.

Read top to bottom: config → data → mesh → models → engine → (roll out → score → update) →
evaluation → export. Heavy imports wait until the config has been accepted.
"""

import contextlib
import sys

from absl import app
from absl import flags as absl_flags

from mopd_jax import flags
from mopd_jax.config import Chain, Config, Kind, Precision, phases
from mopd_jax.published import CHIPS
from mopd_jax.refusal import in_words

STOPPED = 143
"""Exit code after SIGTERM or SIGINT, as of a killed process: what follows the run must not start."""


def main(config: Config | Chain, hosts: flags.Hosts = flags.ALONE) -> None:
    """Runs the phases in order, then prints one table of all evaluations among them.

    Raises:
      Refusal: what does not fit; before any phase's work if it is a file, a model or the devices.
    """
    from mopd_jax.evaluate import evaluate, prepare, write_report
    from mopd_jax.run import preflight

    prepare(config, hosts)
    preflight.check(phases(config))
    results = []
    for name, phase in phases(config).items():
        if phase.train.kind is Kind.EVALUATE:
            results.append(evaluate(name, phase))
        elif not train(name, phase):
            sys.exit(STOPPED)
    if results:
        write_report(results, config)


def show_plan(config: Config | Chain, sizes: str, chip: str) -> None:
    """Prints shapes, memory per device and an estimate of a step's time, without data, weights or devices."""
    from mopd_jax.run.dry_run import dry_run

    for line in dry_run(config, sizes, chip):
        print(line)


def train(name: str, config: Config) -> bool:
    """Runs one training phase to its end, from wherever an earlier start of it stopped.

    Returns:
      Whether the next one may start; False after SIGTERM or SIGINT, when the state has been saved.

    Raises:
      NonFiniteLoss, TooManyAborted, SearchCollapse: the run cannot go on; its last checkpoint stands.
      Refusal: what does not fit, in words.
    """
    from etils import epath

    from mopd_jax.learn.learner import Learner
    from mopd_jax.model import sharding
    from mopd_jax.model.folders import refuse_foreign_files
    from mopd_jax.run import checkpoint, console, hosts, parts, sources
    from mopd_jax.run.metrics import Compilations, MetricsWriter, Pace, Profile, Stopwatch
    from mopd_jax.run.validation import Validation

    folder, steps = epath.Path(config.run.dir), config.train.steps
    meta = hosts.agreed(lambda: checkpoint.resume_meta(config, parts.trained_on(config)))
    finished = hosts.of_first(lambda: checkpoint.read_json(folder / "finished.json"))
    if finished and not checkpoint.check_resume(finished, meta, config):
        print(f"{folder} is finished already.")
        return True
    refuse_foreign_files(folder / "export", parts.notes(config.team))

    # ---------------------------------------------------------------- models, mesh, learner
    mesh = sharding.make_mesh(config.mesh.shape)
    student = parts.open_model(config.model.init, config)
    learner = Learner(student.model, config.learn, config.optim, steps * config.learn.updates_per_batch, mesh)

    # ---------------------------------------------------------------- where batches come from
    samples = config.train.kind is Kind.REINFORCE or config.eval.every
    team = parts.make_team(config, student, config.team.candidates) if samples else None
    source = sources.make_source(config, student, team, mesh)
    validation = Validation(config, student, team) if config.eval.every else None

    # ---------------------------------------------------------------- state, the first of these there is:
    # 1. the latest whole checkpoint of this run, whatever mesh it was saved on;
    # 2. the weights of model.init, at step 0.
    saved = checkpoint.Checkpoints(folder / "checkpoints", config.checkpoint.keep)
    if restored := saved.restore_latest(learner.abstract_state()):
        checkpoint.check_resume(restored.meta, meta, config)
        done, state = restored.step, restored.state
        print(f"Continuing {folder} after step {done}.")
    else:
        params = parts.load_params(student, mesh, Precision.FLOAT32, config.run.seed)
        done, state = 0, learner.init_state(params)

    # ---------------------------------------------------------------- the loop
    if hosts.is_first():  # a start that was refused above has changed nothing
        (folder / "finished.json").unlink(missing_ok=True)
        checkpoint.write_json(folder / "settings.json", meta["config"])
    writer = MetricsWriter(folder, done + 1) if hosts.is_first() else None
    watch, pace = Stopwatch(), Pace()
    profile = Profile(folder / "profile", config.run.profile_steps)
    with (
        contextlib.closing(saved),
        contextlib.closing(profile),
        Compilations() as compiled,
        checkpoint.StopRequest() as stop,
    ):
        while done < steps and not hosts.any_of(bool(stop)):
            with profile.step(done + 1):
                batch = source.batch(done, state.params, watch)
                if done == 0:
                    console.show_row(*sources.decoded(batch.rows[batch.packed.twins[0][0]], student.tokens))
                with watch("update"):
                    state, metrics = _update(learner, state, batch, config, done)
            done += 1
            if validation and (done % config.eval.every == 0 or done == steps):
                with watch("eval"):
                    metrics |= validation.run(done, state.params)
            metrics |= sources.speed(batch, watch.take()) | compiled.take()
            metrics |= {"seconds/step": pace.tick(), "seconds/remaining": pace.remaining(steps - done)}
            if writer:
                writer.write(done, batch.metrics | metrics)
            print(console.step_line(name, done, steps, batch.metrics | metrics), flush=True)
            if done % config.checkpoint.every == 0:
                saved.save(done, state, meta)
        saved.save(done, state, meta)
        stopped = hosts.any_of(bool(stop))
    if done < steps:
        print(f"Stopped after step {done} of {steps}: the same command goes on from there.")
        return False

    # ---------------------------------------------------------------- what is left behind
    if validation is None:
        parts.export(folder / "export", student, state.params, config.team)
    if hosts.is_first():
        checkpoint.write_json(folder / "finished.json", meta)
    hosts.wait()  # the next phase reads what this one leaves
    return not stopped


def _update(learner, state, batch, config: Config, step: int):
    """Takes the optimizer steps of one batch; returns the new state and what they measured."""
    from mopd_jax.learn.streams import only

    micros, rows, every = batch.packed.batch.micros, batch.rows, config.learn.role_gradients_every
    metrics = {}
    if every and step % every == 0:
        for role in dict.fromkeys(row.role for row in rows):
            streams = only(role, rows, batch.packed, batch.streams)
            metrics[f"grad_norm/{role.value}"] = learner.gradient_norm(state.params, micros, streams)
    for _ in range(config.learn.updates_per_batch):
        state, report = learner.update(state, micros, batch.streams)
    return state, metrics | vars(report)


def _run(_) -> None:
    with in_words():
        if _DRY_RUN.value:
            show_plan(_CONFIG.value, _SIZES.value, _CHIP.value)
        else:
            main(_CONFIG.value, _HOSTS())


if __name__ == "__main__":
    _CONFIG, _HOSTS = flags.define_config(), flags.define_hosts()
    _DRY_RUN = absl_flags.DEFINE_bool(
        "dry_run", False, "Only say what the run would hold and how long it takes."
    )
    _SIZES = flags.define_sizes()
    _CHIP = absl_flags.DEFINE_enum("chip", "v5e", list(CHIPS), "Kind of device that --dry_run reckons with.")
    app.run(_run, flags_parser=flags.parse)
