"""Which tensors of a Hugging Face checkpoint hold each parameter, and how their axes relate: one table.

Reading and writing both follow it. Shape letters: L layers, D width, F mlp, N query heads, K key/value heads,
H head dim, V vocab.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mopd_jax.model.qwen3 import Qwen3Config

_BLOCK = 2 * 2**20
"""Bytes that are copied at a time: few enough for the processor's cache, where transposing is fast."""


@dataclass(frozen=True)
class Leaf:
    """How one parameter is stored."""

    name: str
    """Name of the tensor; with `{}` there is one per layer."""
    axes: tuple[tuple[int, ...], ...]
    """The tensor's axes, each as the sizes that are merged in it: ((N, H), (D,))."""
    order: tuple[int, ...]
    """Our axes as positions in the flattened `axes`."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(math.prod(axis) for axis in self.axes)

    def shape(self, layers: int) -> tuple[int, ...]:
        """Our shape, with the leading axis of the layers where there is one tensor per layer."""
        sizes = [size for axis in self.axes for size in axis]
        return (layers,) * self.stacked + tuple(sizes[i] for i in self.order)

    @property
    def stacked(self) -> bool:
        """Whether there is one tensor per layer."""
        return "{}" in self.name

    def names(self, layers: Sequence[int]) -> list[str]:
        """Names of the tensors of these layers, or of the only one."""
        return [self.name.format(layer) for layer in layers] if self.stacked else [self.name]

    def read(self, tensor, ranges: Sequence[range], out: np.ndarray) -> bool:
        """Fills `out` with the part of a tensor that `ranges` select; returns whether all of it is finite.

        Little is read at a time, so that a large tensor is never in memory beside its parameter.

        Args:
          tensor: sliceable, of `stored_shape`.
          ranges: one for each of our axes, that of the layers left out.
          out: cast to its type.
        """
        wanted = dict(zip(self.order, ranges, strict=True))
        rows, axis = wanted[0], self.order.index(0)
        step = max(1, _BLOCK * len(rows) // out.nbytes)
        finite = True
        for start in range(0, len(rows), step):
            block = rows[start : start + step]
            place = (slice(None),) * axis + (slice(start, start + len(block)),)
            out[place] = self._part(tensor, wanted | {0: block})
            finite = finite and bool(np.isfinite(out[place]).all())
        return finite

    def _part(self, tensor, wanted: dict[int, range]) -> np.ndarray:
        rows, sizes, position = [], [], 0
        for axis in self.axes:
            # Of a merged axis (heads, head_dim) only the first is ever split, so a part is one stretch of it.
            first, inner = wanted[position], math.prod(axis[1:])
            rows.append(slice(first.start * inner, first.stop * inner))
            sizes += [len(first), *axis[1:]]
            position += len(axis)
        return tensor[tuple(rows)].reshape(sizes).transpose(self.order)

    def write(self, param: np.ndarray) -> np.ndarray:
        """Returns one layer's parameter as the stored tensor."""
        flat = param.transpose(np.argsort(self.order)).reshape(self.stored_shape)
        if flat.flags.c_contiguous:
            return flat
        out = np.empty(self.stored_shape, param.dtype)
        step = max(1, _BLOCK * len(out) // out.nbytes)
        for start in range(0, len(out), step):
            out[start : start + step] = flat[start : start + step]
        return out


def layout(config: Qwen3Config) -> dict[str, Leaf]:
    """Returns how each parameter of a model is stored, by its path in the tree ("layers/mlp/up/kernel")."""
    D, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    attention, mlp = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
    table = {
        "embed/embedding": Leaf("model.embed_tokens.weight", ((V,), (D,)), (0, 1)),
        "layers/attn_norm/scale": Leaf("model.layers.{}.input_layernorm.weight", ((D,),), (0,)),
        "layers/attention/q/kernel": Leaf(attention + "q_proj.weight", ((N, H), (D,)), (0, 2, 1)),
        "layers/attention/k/kernel": Leaf(attention + "k_proj.weight", ((K, H), (D,)), (0, 2, 1)),
        "layers/attention/v/kernel": Leaf(attention + "v_proj.weight", ((K, H), (D,)), (0, 2, 1)),
        "layers/attention/o/kernel": Leaf(attention + "o_proj.weight", ((D,), (N, H)), (1, 2, 0)),
        "layers/attention/q_norm/scale": Leaf(attention + "q_norm.weight", ((H,),), (0,)),
        "layers/attention/k_norm/scale": Leaf(attention + "k_norm.weight", ((H,),), (0,)),
        "layers/mlp_norm/scale": Leaf("model.layers.{}.post_attention_layernorm.weight", ((D,),), (0,)),
        "layers/mlp/gate/kernel": Leaf(mlp + "gate_proj.weight", ((F,), (D,)), (1, 0)),
        "layers/mlp/up/kernel": Leaf(mlp + "up_proj.weight", ((F,), (D,)), (1, 0)),
        "layers/mlp/down/kernel": Leaf(mlp + "down_proj.weight", ((D,), (F,)), (1, 0)),
        "final_norm/scale": Leaf("model.norm.weight", ((D,),), (0,)),
    }
    if not config.tie_word_embeddings:
        table["head/kernel"] = Leaf("lm_head.weight", ((V,), (D,)), (1, 0))
    return table
