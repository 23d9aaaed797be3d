"""The fused pass: log-probabilities of one batch under the student and every frozen model.

Shape letters: B packed rows, M gathered (generated) positions.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from mopd_jax.learn.packing import Packed
from mopd_jax.model import sharding
from mopd_jax.model.logprobs import token_logprobs
from mopd_jax.model.qwen3 import Qwen3


@dataclass(frozen=True)
class Frozen:
    """A model that is scored and never trained. It may be of another size than the student."""

    model: Qwen3
    params: Any


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
        models = {"student": student} | {name: f.model for name, f in frozen.items()}

        def score(params: dict[str, Any], packed: Packed):
            scored = {
                name: token_logprobs(model, params[name], *packed, logit_chunk) for name, model in models.items()
            }
            logps = {name: logps_BM for name, (logps_BM, _) in scored.items()}
            return logps, scored["student"][1]

        self._score = jax.jit(score)

    def __call__(self, params, packed: Packed) -> tuple[dict[str, jax.Array], jax.Array]:
        """Returns float32 [B, M] log-probabilities by model, "student" among them, and the student's
        entropy in nats [B, M]. Values in the padding of `packed` are finite and meaningless."""
        with sharding.on_mesh(self._mesh):
            return self._score({"student": params} | self._params, jax.device_put(packed, self._rows))
