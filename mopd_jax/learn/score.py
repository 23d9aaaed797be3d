"""The fused pass: log-probabilities of one batch under the student and every frozen model.

Shape letters: B packed rows, M gathered (generated) positions.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.stages import Lowered

from mopd_jax.learn.packing import Packed
from mopd_jax.model import sharding
from mopd_jax.model.logprobs import token_logprobs
from mopd_jax.model.qwen3 import Qwen3


@dataclass(frozen=True)
class Frozen:
    """A model that is scored and never trained. It may be of another size than the student."""

    model: Qwen3
    params: Any


class Scored(NamedTuple):
    """What one model says of a packed batch; values in its padding are finite and meaningless."""

    logps: jax.Array
    """float32 [B, M]"""
    entropy: jax.Array
    """float32 [B, M], nats."""


class Scorer:
    """One jitted program over the trees of the student, the teacher and the reference.

    Same kernels, same temperature, same batch: a teacher with the student's weights gives the
    student's log-probabilities exactly.

    Args:
      student: the student's network.
      frozen: by name; models that share weights are to be given once.
      logit_chunk: see `token_logprobs`.
      mesh: of the learner, over which rows are split.
    """

    def __init__(self, student: Qwen3, frozen: dict[str, Frozen], logit_chunk: int, mesh: Mesh):
        self._mesh, self._rows = mesh, sharding.batch_sharding(mesh)
        self._params = {name: f.params for name, f in frozen.items()}
        models = {name: f.model for name, f in frozen.items()}

        def score(params, frozen_params: dict[str, Any], packed: Packed):
            # The entropies of all models leave the program: with some of them optimised away, equal
            # weights might be computed in different ways.
            return Scored(*token_logprobs(student, params, *packed, logit_chunk)), {
                name: Scored(*token_logprobs(model, frozen_params[name], *packed, logit_chunk))
                for name, model in models.items()
            }

        # Whole on every device, so that every process can read them.
        self._score = jax.jit(score, out_shardings=sharding.replicated(mesh))

    def __call__(self, params, packed: Packed) -> tuple[Scored, dict[str, Scored]]:
        """Returns the student's scores under `params`, and those of the frozen models by name."""
        with sharding.on_mesh(self._mesh):
            return self._score(params, self._params, sharding.place(packed, self._rows))

    def lower(self, params, packed: Packed) -> Lowered:
        """Returns the program for a micro-batch of these shapes, ready to be compiled; `params` and those of
        the frozen models may be shapes with their shardings."""
        with sharding.on_mesh(self._mesh):
            return self._score.lower(params, self._params, sharding.laid_out(packed, self._rows))
