"""The learner: score a batch, accumulate its gradient over micro-batches, step the optimizer.

Shape letters: B packed rows of one micro-batch, M gathered (generated) positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.stages import Lowered

from mopd_jax.config import LearnConfig, OptimConfig, Schedule
from mopd_jax.learn.loss import Streams, Sums, policy_loss
from mopd_jax.learn.packing import Packed
from mopd_jax.model import sharding
from mopd_jax.model.logprobs import token_logprobs
from mopd_jax.model.qwen3 import Qwen3


@flax.struct.dataclass
class TrainState:
    """What a checkpoint holds of the model."""

    step: jax.Array
    """int32 []: optimizer steps taken."""
    params: Any
    """float32 master weights."""
    opt_state: Any


@dataclass(frozen=True)
class UpdateReport:
    """What one optimizer step did."""

    loss: float
    nll: float
    """Mean −log π of the tokens that are learnt from, weighted as in the loss."""
    grad_norm: float
    """Before clipping."""
    clip_fraction: float
    """Share of the batch's weight on which the ratio clip binds."""
    lr: float
    """Learning rate of the step."""


class NonFiniteLoss(ArithmeticError):
    """Loss or gradient is NaN or infinite: the run stops, the last checkpoint is from before it."""


def learning_rate(optim: OptimConfig, steps: int) -> optax.Schedule:
    """Returns the schedule: linear warm-up to `optim.lr`, then constant, or down to 0 at `steps`."""
    rest = max(1, steps - optim.warmup_steps)
    after = {
        Schedule.CONSTANT: lambda: optax.constant_schedule(optim.lr),
        Schedule.COSINE: lambda: optax.cosine_decay_schedule(optim.lr, rest),
        Schedule.LINEAR: lambda: optax.linear_schedule(optim.lr, 0.0, rest),
    }[optim.schedule]()
    if not optim.warmup_steps:
        return after
    # The first update already moves: step s has (s + 1) / warmup_steps of the peak.
    first = optim.lr / optim.warmup_steps
    warmup = optax.linear_schedule(first, optim.lr, max(1, optim.warmup_steps - 1))
    return optax.join_schedules([warmup, after], [optim.warmup_steps])


def make_optimizer(optim: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Returns AdamW with global-norm clipping; norm scales are not decayed."""

    def decayed(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params)

    return optax.chain(
        optax.clip_by_global_norm(optim.max_grad_norm),
        optax.adamw(
            learning_rate(optim, steps),
            optim.b1,
            optim.b2,
            optim.eps,
            weight_decay=optim.weight_decay,
            mask=decayed,
        ),
    )


class Learner:
    """Updates a `TrainState` on packed batches with per-token streams; knows no roles and no phases.

    Args:
      model: the student's network.
      learn: loss constants and chunk size.
      optim: see `make_optimizer`.
      steps: optimizer steps of the whole phase (for the schedule).
      mesh: on which state and batches lie.
    """

    def __init__(self, model: Qwen3, learn: LearnConfig, optim: OptimConfig, steps: int, mesh: Mesh):
        self._model, self._learn, self._mesh = model, learn, mesh
        self._optimizer, self._schedule = make_optimizer(optim, steps), learning_rate(optim, steps)
        self._rows, whole = sharding.batch_sharding(mesh), sharding.replicated(mesh)
        self._param_shardings = sharding.param_shardings(model, mesh)
        total = self._param_shardings, whole
        self._zeros = jax.jit(self._zeros_fn, out_shardings=total)
        # Out as it came in: every micro-batch of a shape runs the same program.
        self._accumulate = jax.jit(self._accumulate_fn, donate_argnums=1, out_shardings=total)
        self._norm = jax.jit(optax.tree.norm, out_shardings=whole)
        self._apply = jax.jit(self._apply_fn, donate_argnums=0, out_shardings=(self.state_shardings(), whole))

    def state_shardings(self) -> TrainState:
        """Returns the layout of a `TrainState`: moments lie as their parameters."""
        whole = sharding.replicated(self._mesh)
        abstract = jax.eval_shape(self._optimizer.init, sharding.abstract_params(self._model))
        opt_state = optax.tree_map_params(
            self._optimizer,
            lambda _, layout: layout,
            abstract,
            self._param_shardings,
            transform_non_params=lambda _: whole,
        )
        return TrainState(whole, self._param_shardings, opt_state)

    def abstract_state(self) -> TrainState:
        """Returns the state's shapes and layout without allocating it (to restore a checkpoint into)."""
        shapes = jax.eval_shape(self._new_state, sharding.abstract_params(self._model))
        return sharding.laid_out(shapes, self.state_shardings())

    def lower(self, packed: Packed, streams: Streams) -> dict[str, Lowered]:
        """Returns the programs of an update, for micro-batches of these shapes, ready to be compiled.

        Nothing is allocated; the mesh may be one over devices that are not there.
        """
        state, whole = self.abstract_state(), sharding.replicated(self._mesh)
        grads, sums = jax.eval_shape(self._zeros_fn)
        grads = sharding.laid_out(grads, self._param_shardings)
        total = grads, sharding.laid_out(sums, whole)
        packed, streams = sharding.laid_out((packed, streams), self._rows)
        with sharding.on_mesh(self._mesh):
            accumulate = self._accumulate.lower(state.params, total, packed, streams)
        return {"accumulate": accumulate, "apply": self._apply.lower(state, grads)}

    def _new_state(self, params) -> TrainState:
        params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return TrainState(jnp.zeros((), jnp.int32), params, self._optimizer.init(params))

    def init_state(self, params) -> TrainState:
        """Returns a fresh state around `params`, which are given up to it."""
        return jax.jit(self._new_state, donate_argnums=0, out_shardings=self.state_shardings())(params)

    def put(self, tree: Any) -> Any:
        """Lays host arrays with B as their first axis out over the mesh."""
        return sharding.place(tree, self._rows)

    def gradient(self, params, micros: Sequence[Packed], streams: Sequence[Streams]):
        """Returns the summed gradient of all micro-batches, and their `Sums`."""
        total = self._zeros()
        with sharding.on_mesh(self._mesh):
            for packed, stream in zip(micros, streams, strict=True):
                total = self._accumulate(params, total, self.put(packed), self.put(stream))
        return total

    def update(
        self, state: TrainState, micros: Sequence[Packed], streams: Sequence[Streams]
    ) -> tuple[TrainState, UpdateReport]:
        """Takes one optimizer step on the whole batch. `state` is donated.

        Raises:
          NonFiniteLoss: names the step.
        """
        grads, sums = self.gradient(state.params, micros, streams)
        step = int(state.step)
        state, norm = self._apply(state, grads)
        loss, norm = float(sums.loss), float(norm)
        if not (np.isfinite(loss) and np.isfinite(norm)):
            raise NonFiniteLoss(
                f"Loss {loss}, gradient norm {norm} at optimizer step {step}: lower optim.lr, or look at the "
                "episodes of this step; the last checkpoint is from before it."
            )
        weight = sum(float(stream.weight.sum()) for stream in streams) or 1.0
        return state, UpdateReport(
            loss=loss,
            nll=float(sums.nll) / weight,
            grad_norm=norm,
            clip_fraction=float(sums.clipped) / weight,
            lr=float(self._schedule(step)),
        )

    def gradient_norm(self, params, micros: Sequence[Packed], streams: Sequence[Streams]) -> float:
        """Returns the global norm of the gradient of these streams, without a step."""
        grads, _ = self.gradient(params, micros, streams)
        return float(self._norm(grads))

    def _zeros_fn(self):
        return jax.tree.map(jnp.zeros_like, sharding.abstract_params(self._model)), Sums(*jnp.zeros(3))

    def _accumulate_fn(self, params, total, packed: Packed, streams: Streams):
        def loss_fn(params):
            logps, _ = token_logprobs(self._model, params, *packed, self._learn.logit_chunk)
            sums = policy_loss(logps, streams, self._learn.clip, self._learn.sampler_weight_cap)
            return sums.loss, sums

        (_, sums), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(jnp.add, total, (grads, sums))

    def _apply_fn(self, state: TrainState, grads):
        updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), optax.tree.norm(grads)
