"""Saving a run and continuing it: Orbax checkpoints, what may differ at a restart, stopping in time."""

import dataclasses
import enum
import json
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from mopd_jax.config import Config
from mopd_jax.refusal import Refusal

PyTree = Any

UNTOLD = ("run.dir", "run.allow_changes", "run.profile_steps", "checkpoint.every", "checkpoint.keep")
"""Fields that change no step of a run, so a restart need not be told."""
_ABSENT = object()


class CheckpointError(Refusal):
    """No saved step can be used."""


class ResumeError(Refusal):
    """The run differs from the one that was saved."""


class Restored(NamedTuple):
    """A saved step."""

    step: int
    state: PyTree
    meta: dict


class Checkpoints:
    """The saved steps of one run: arrays in any sharding, and JSON beside them."""

    def __init__(self, folder: epath.PathLike, keep: int):
        """Opens the folder (made if absent; may be gs://) and keeps its latest `keep` steps."""
        self._folder = epath.Path(folder).resolve()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep), cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def steps(self) -> list[int]:
        """Returns the saved steps, ascending; a listed one may still be torn."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: PyTree, meta: dict) -> None:
        """Saves in the background; the state may be donated as soon as this returns.

        A step that is there already is left as it is: the same step has the same content.

        Args:
          step: steps done so far.
          state: arrays, typed random keys among them.
          meta: JSON values.
        """
        if step in self._manager.all_steps():
            return
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            layout=ocp.args.JsonSave(_layout(state)),
            meta=ocp.args.JsonSave(meta),
        )
        self._manager.save(step, args=items, force=True)

    def restore_latest(self, like: PyTree) -> Restored | None:
        """Loads the latest step that is whole; None where nothing was ever saved.

        A torn step (truncated or missing file) is skipped with a warning and moved aside to
        `torn_STEP`, so that the run can save it again.

        Args:
          like: arrays or `jax.ShapeDtypeStruct`s with the shapes, types and shardings wanted; the
            shardings may differ from those saved.

        Raises:
          CheckpointError: no step is whole, one of several processes found one torn, or one holds another
        model, optimiser or random generator.
        """
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        torn = {}
        for step in reversed(self.steps()):
            try:
                restored = self._restore(step, wanted)
            except CheckpointError:
                raise  # whole, but of another run
            except (OSError, ValueError, KeyError) as error:
                if jax.process_count() > 1:  # the others may have read their parts, and wait for this one
                    raise CheckpointError(
                        f"Checkpoint {step} in {self._folder} is torn ({error}). Only a run of one process "
                        "skips it: move it away, to continue from the one before."
                    ) from error
                torn[step] = str(error).split("\n")[0][:200]
                logging.warning("Checkpoint %d is torn and skipped: %s", step, torn[step])
                continue
            self._move_aside(torn)
            return restored
        if torn:
            reasons = "".join(f"\n- step {step}: {reason}" for step, reason in torn.items())
            raise CheckpointError(f"No checkpoint in {self._folder} can be read:{reasons}")
        return None

    def wait(self) -> None:
        """Returns when everything saved so far is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finishes saving and lets go of the folder."""
        self._manager.close()

    def _restore(self, step: int, wanted: PyTree) -> Restored:
        as_json = ocp.args.JsonRestore()
        beside = self._manager.restore(step, args=ocp.args.Composite(layout=as_json, meta=as_json))
        _check_layout(step, beside.layout, _layout(wanted))
        arrays = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted)))
        return Restored(step, arrays.state, beside.meta)

    def _move_aside(self, steps: dict[int, str]) -> None:
        if not steps:
            return
        for step in steps:
            aside = self._folder / f"torn_{step}"
            if aside.exists():
                aside.rmtree()
            (self._folder / str(step)).rename(aside)
        self._manager.reload()


def _layout(tree: PyTree) -> dict[str, str]:
    """Path → type and shape; the type of a random key names its generator."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _check_layout(step: int, saved: dict[str, str], wanted: dict[str, str]) -> None:
    lines = list(_differences(saved, wanted))
    if lines:
        shown = "\n".join(f"- {line}" for line in lines[:20])
        raise CheckpointError(
            f"Checkpoint {step} does not fit this run, {len(lines)} arrays differ (saved → wanted):\n{shown}"
        )


def check_writable(folder: epath.PathLike) -> None:
    """Makes a folder if it is not there, and tries to write in it.

    Raises:
      Refusal: it is a file, or cannot be written.
    """
    probe = epath.Path(folder) / "writable.tmp"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise Refusal(
            f"Nothing can be written to run.dir = {folder} ({error}): name another folder."
        ) from error


def write_json(path: epath.PathLike, value: Any) -> None:
    """Writes a file that is whole at any moment: beside it first, then renamed."""
    path = epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f"{path.name}.tmp"
    unfinished.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    unfinished.replace(path)


def read_json(path: epath.PathLike) -> Any | None:
    """Returns the file's value, None where there is no file."""
    path = epath.Path(path)
    return json.loads(path.read_text()) if path.exists() else None


# ---------------------------------------------------------------- what may differ at a restart


def config_to_dict(config: object) -> dict:
    """Returns a config as JSON values: enums by their value, tuples as lists."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def config_from_dict(kind: type, values: dict) -> Any:
    """Returns the config of class `kind` that `config_to_dict` turned into `values`.

    A field that `values` lacks (it is newer) has its default; one that `kind` lacks is left out.
    """
    known = {f.name: f.type for f in dataclasses.fields(kind) if f.name in values}
    return kind(**{name: _typed(known[name], values[name]) for name in known})


def config_diff(saved: dict, now: dict) -> list[str]:
    """Returns one line `group.field: saved → now` per field in which two such dicts differ."""
    return list(_differences(dict(_flatten(saved)), dict(_flatten(now))))


def resume_meta(config: Config, inputs: dict[str, str]) -> dict:
    """Returns what `check_resume` compares, to be saved with every step.

    Args:
      config: of the phase.
      inputs: fingerprints by name of what it reads: questions, retriever, models.
    """
    return {"config": config_to_dict(config), "inputs": inputs}


def check_resume(saved: dict, now: dict, config: Config) -> bool:
    """Refuses to continue a run with another config or other inputs, unless `run.allow_changes`.

    Args:
      saved: `resume_meta` of the restored step.
      now: `resume_meta` of the restarted phase.
      config: says where the run is and whether changes are allowed.

    Returns:
      Whether anything differs that is allowed to.

    Raises:
      ResumeError: names every field that differs.
    """
    changes = config_diff(saved["config"], now["config"])
    changes = [line for line in changes if line.partition(":")[0] not in UNTOLD]
    changes += config_diff(saved["inputs"], now["inputs"])
    if not changes:
        return False
    listed = "".join(f"\n- {line}" for line in changes)
    if not config.run.allow_changes:
        raise ResumeError(
            f"The run in {config.run.dir} was started with other settings (saved → now):{listed}\n"
            "Take another run.dir for a new run, or continue this one with --config.run.allow_changes."
        )
    logging.warning("Continuing %s with changes (saved → now):%s", config.run.dir, listed)
    return True


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value):
        return config_to_dict(value)
    if isinstance(value, enum.Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def _typed(kind: type, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        return config_from_dict(kind, value)
    if isinstance(kind, enum.EnumType):
        return kind(value)
    return tuple(value) if isinstance(value, list) else value


def _flatten(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _differences(saved: dict, now: dict) -> Iterator[str]:
    for name in saved | now:
        old, new = saved.get(name, _ABSENT), now.get(name, _ABSENT)
        if old != new:
            yield f"{name}: {_shown(old)} → {_shown(new)}"


def _shown(value: object) -> str:
    return "absent" if value is _ABSENT else str(value)


# ---------------------------------------------------------------- stopping in time


class StopRequest:
    """Turns SIGTERM and SIGINT into a wish that the loop reads between two steps.

    A second signal acts as it did before, so that a hanging run can still be killed. To be entered
    in the main thread; what was installed before is back after the block.
    """

    def __init__(self):
        self.signal = ""
        """Name of the signal that came, "" while none has."""
        self._before = {}

    def __bool__(self) -> bool:
        return bool(self.signal)

    def __enter__(self) -> "StopRequest":
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _) -> None:
        self.signal = signal.Signals(number).name
        logging.warning("%s received: the run saves after this step and stops.", self.signal)
        self.__exit__()
