"""Weights alone, out of and into Orbax checkpoints: a run's steps without their moments, and models.

A model may lie in a folder that looks like a Hugging Face one, its weights an Orbax checkpoint instead of
safetensors: then every process reads its own slices only, straight from a bucket too.
"""

from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh

from mopd_jax.learn.learner import TrainState
from mopd_jax.model import sharding
from mopd_jax.model.folders import ORBAX
from mopd_jax.model.qwen3 import Qwen3
from mopd_jax.run.checkpoint import CheckpointError, Checkpoints, config_diff

PyTree = Any


def has_orbax(folder: epath.PathLike) -> bool:
    """Returns whether a run's or a model's folder holds Orbax checkpoints."""
    return (epath.Path(folder) / ORBAX).exists()


def save(folder: epath.PathLike, params: PyTree) -> None:
    """Writes parameters into a model's folder; returns when they are on disk."""
    checkpoints = Checkpoints(epath.Path(folder) / ORBAX, keep=1)
    checkpoints.save(0, TrainState(jnp.zeros((), jnp.int32), params, ()), meta={})
    checkpoints.close()


def find_step(folder: epath.PathLike, step: int | None = None) -> int:
    """Returns the step that is asked for, by default the latest that a run's or a model's folder holds.

    Raises:
      CheckpointError: names the steps that there are.
    """
    steps = sorted(ocp.utils.checkpoint_steps(epath.Path(folder) / ORBAX)) if has_orbax(folder) else []
    if not steps or step not in (None, *steps):
        raise CheckpointError(f"{folder}: found steps {steps}, expected {'any' if step is None else step}.")
    return steps[-1] if step is None else step


def read_meta(folder: epath.PathLike, step: int) -> dict:
    """Returns what was saved beside a step: a run's config and inputs. CheckpointError: it is torn."""
    return _read(folder, step, meta=ocp.args.JsonRestore()).meta


def stored_dtype(folder: epath.PathLike, step: int) -> jnp.dtype:
    """Returns the type of a step's parameters. CheckpointError: it is torn."""
    return jnp.dtype(_stored_layout(folder, step)["['embed']['embedding']"].partition("[")[0])


def load(folder: epath.PathLike, step: int, model: Qwen3, mesh: Mesh, dtype: jnp.dtype) -> PyTree:
    """Returns the parameters of a step, laid out on the mesh and cast to `dtype`; moments are not read.

    Args:
      folder: of a run or of a model.
      step: as `find_step` found it.
      model: whose parameters they are.

    Raises:
      CheckpointError: the step is torn, or holds parameters of other sizes (named, saved → wanted).
    """
    like = jax.tree.map(
        lambda x, layout: jax.ShapeDtypeStruct(x.shape, dtype, sharding=layout),
        sharding.abstract_params(model),
        sharding.param_shardings(model, mesh),
    )
    leaves, _ = jax.tree_util.tree_flatten_with_path(like)
    wanted = {jax.tree_util.keystr(path): str(list(leaf.shape)) for path, leaf in leaves}
    saved = {path: f"[{kind.partition('[')[2]}" for path, kind in _stored_layout(folder, step).items()}
    if differences := config_diff(saved, wanted):
        raise CheckpointError(
            f"{folder}: step {step} does not fit, {len(differences)} parameters differ (saved → wanted):\n- "
            + "\n- ".join(differences[:20])
        )
    tree = {"params": like}
    restore = ocp.args.PyTreeRestore(
        tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True
    )
    return _read(folder, step, state=restore).state["params"]


def _stored_layout(folder: epath.PathLike, step: int) -> dict[str, str]:
    layout = _read(folder, step, layout=ocp.args.JsonRestore()).layout
    prefix = ".params"
    return {path.removeprefix(prefix): kind for path, kind in layout.items() if path.startswith(prefix)}


def _read(folder: epath.PathLike, step: int, **items: ocp.args.CheckpointArgs) -> ocp.args.Composite:
    path = epath.Path(folder).resolve() / ORBAX / str(step)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        try:
            return checkpointer.restore(path, args=ocp.args.Composite(**items))
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).split("\n")[0][:200]
            raise CheckpointError(f"{path} is torn ({reason}); take another step.") from error
