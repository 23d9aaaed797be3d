"""A BERT text encoder in Flax (E5, MiniLM and the like): texts → unit vectors.

Reads Hugging Face folders: config.json, model.safetensors, tokenizer.json. Shape letters as in
CONTRIBUTING.md: B texts, T positions, D width, F width of the MLP, N heads, H width of a head, L layers.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.corpus import batched

FILES = ("config.json", "model.safetensors", "tokenizer.json")
"""What an encoder is read from."""
POOLING = "1_Pooling/config.json"
"""Where sentence-transformers says how a text's vector is made of its positions'."""
TILE = 32
"""Texts are padded to a multiple of so many tokens: few shapes, little padding."""


@dataclass(frozen=True)
class BertConfig:
    """Sizes of an encoder; the names are ours, config.json's are in `SIZES`."""

    vocab_size: int
    width: int
    mlp_width: int
    layers: int
    heads: int
    positions: int
    token_types: int
    layer_norm_eps: float


SIZES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "positions": "max_position_embeddings",
    "token_types": "type_vocab_size",
    "layer_norm_eps": "layer_norm_eps",
}
"""Our field → the one of config.json."""
_SUPPORTED = {
    "model_type": ("bert",),
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
}
"""Field of config.json → the values that the model implements."""


# ---------------------------------------------------------------- the network


class Linear(nn.Module):
    """x · kernel + bias; operands in `dtype`, the sum in float32."""

    features: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.zeros, (x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return _product("...d,df->...f", x, kernel, self.dtype) + bias


class Attention(nn.Module):
    """Every position of a text looks at all of that text."""

    config: BertConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BTD: jax.Array, mask_BT: jax.Array) -> jax.Array:
        N, H = self.config.heads, self.config.width // self.config.heads
        linear = functools.partial(Linear, self.config.width, self.dtype)
        q, k, v = (linear(name=n)(x_BTD).reshape(*x_BTD.shape[:2], N, H) for n in ("query", "key", "value"))
        scores = _product("btnh,bsnh->bnts", q, k, self.dtype) * H**-0.5
        weights = jax.nn.softmax(jnp.where(mask_BT[:, None, None], scores, -jnp.inf))
        # Asked for "btnh", einsum would swap the operands, and a CPU is slower at that product.
        out = _product("bnts,bsnh->bnth", weights, v, self.dtype).swapaxes(1, 2)
        return linear(name="output")(out.reshape(x_BTD.shape))


class Bert(nn.Module):
    """The encoder without its pooler; `dtype` is that of the products' operands."""

    config: BertConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, ids_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
        """Returns the hidden states [B, T, D], float32, of ids of which `mask_BT` says what is text."""
        c = self.config
        norm = functools.partial(nn.LayerNorm, epsilon=c.layer_norm_eps, use_fast_variance=False)
        embed = functools.partial(nn.Embed, features=c.width)
        x = embed(c.vocab_size, name="words")(ids_BT) + embed(c.token_types, name="types")(0 * ids_BT)
        x += embed(c.positions, name="positions")(jnp.arange(ids_BT.shape[1]))
        x = norm(name="norm")(x)
        for i in range(c.layers):
            attended = Attention(c, self.dtype, name=f"attention_{i}")(x, mask_BT)
            x = norm(name=f"attention_norm_{i}")(x + attended)
            hidden = jax.nn.gelu(Linear(c.mlp_width, self.dtype, name=f"up_{i}")(x), approximate=False)
            x = norm(name=f"mlp_norm_{i}")(x + Linear(c.width, self.dtype, name=f"down_{i}")(hidden))
        return x


def _product(subscripts: str, x: jax.Array, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.einsum(subscripts, x.astype(dtype), y.astype(dtype), preferred_element_type=jnp.float32)


def pooled(hidden_BTD: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Returns the mean over each text's positions, scaled to length 1: [B, D]."""
    total_BD = jnp.where(mask_BT[..., None], hidden_BTD, 0).sum(1)
    return total_BD / jnp.maximum(jnp.linalg.norm(total_BD, axis=-1, keepdims=True), 1e-12)


# ---------------------------------------------------------------- Hugging Face folders


def read_config(folder: Path) -> BertConfig:
    """Returns the sizes in a folder's config.json.

    Raises:
      Refusal: a file or a field is missing, config.json is torn, or a field asks for what the model does not
        implement; or sentence-transformers would pool otherwise than `pooled`.
    """
    for name in FILES:
        if not (folder / name).exists():
            raise Refusal(f"{folder / name} is missing: an encoder is {', '.join(FILES)}.")
    found = _read_json(folder / "config.json")
    for field, values in _SUPPORTED.items():
        if found.get(field) not in values:
            raise Refusal(
                f"{folder / 'config.json'}: found {field} = {found.get(field)!r}, expected {values[0]!r}. "
                "Only plain BERT encoders (E5, MiniLM, …) are supported."
            )
    if missing := [field for field in SIZES.values() if field not in found]:
        raise Refusal(f"{folder / 'config.json'}: found no {missing[0]}, expected that of a BERT encoder.")
    _require_mean(folder / POOLING)
    return BertConfig(**{ours: found[theirs] for ours, theirs in SIZES.items()})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise Refusal(f"{path} is torn ({error}): copy it again.") from error


def _require_mean(pooling: Path) -> None:
    """Refuses a file that names another pooling than the mean; one that names none, or no file, is fine."""
    found = _read_json(pooling) if pooling.exists() else {}
    # Older sentence-transformers write a flag for each pooling, newer ones the name of the one in use.
    if not found.get("pooling_mode_mean_tokens", True) or found.get("pooling_mode", "mean") != "mean":
        raise Refusal(f"{pooling}: found another pooling than the mean, which is all there is (E5, MiniLM).")


def load_tokenizer(folder: Path, config: BertConfig, tokens: int) -> Tokenizer:
    """Returns the tokenizer in a folder's tokenizer.json, which cuts a text after so many tokens.

    Raises:
      Refusal: it is torn, or has ids that the model does not know; or `tokens` leave no place for a text or
        are more than the model has positions.
    """
    if not 3 <= tokens <= config.positions:
        raise Refusal(
            f"tokens = {tokens}, the encoder {folder} knows {config.positions} positions: expected at least "
            "3, since [CLS] and [SEP] take two, and no more than there are positions."
        )
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise Refusal(f"{path} is torn ({error}): copy it again.") from error
    highest = max(tokenizer.get_vocab().values())
    if highest >= config.vocab_size:
        raise Refusal(
            f"{path}: found ids up to {highest}, expected them below the vocab_size = {config.vocab_size} of "
            "config.json: they are of two models. Copy both from one."
        )
    tokenizer.enable_truncation(tokens)
    tokenizer.no_padding()
    return tokenizer


def load_params(folder: Path, config: BertConfig) -> dict[str, Any]:
    """Returns the parameters in a folder's model.safetensors, float32. A pooler is not read.

    Raises:
      Refusal: a tensor is missing or of another shape (named), or the file is torn.
    """
    path = folder / "model.safetensors"
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise Refusal(f"{path} is torn or no safetensors file ({error}): copy it again.") from error
    tensors = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
    return unflatten_dict(
        {place: _tensor(tensors, layout(config)[place], shape, path) for place, shape in _shapes(config)}, "/"
    )


def layout(config: BertConfig) -> dict[str, str]:
    """Returns parameter ("attention_0/query/kernel") → tensor; a kernel is its tensor's transpose."""
    linear, norms = {}, {"norm": "embeddings.LayerNorm"}
    for i in range(config.layers):
        layer = f"encoder.layer.{i}"
        linear |= {
            f"attention_{i}/query": f"{layer}.attention.self.query",
            f"attention_{i}/key": f"{layer}.attention.self.key",
            f"attention_{i}/value": f"{layer}.attention.self.value",
            f"attention_{i}/output": f"{layer}.attention.output.dense",
            f"up_{i}": f"{layer}.intermediate.dense",
            f"down_{i}": f"{layer}.output.dense",
        }
        norms |= {
            f"attention_norm_{i}": f"{layer}.attention.output.LayerNorm",
            f"mlp_norm_{i}": f"{layer}.output.LayerNorm",
        }
    return (
        {f"{name}s/embedding": f"embeddings.{kind}_embeddings.weight" for name, kind in _TABLES.items()}
        | {f"{ours}/kernel": f"{theirs}.weight" for ours, theirs in linear.items()}
        | {f"{ours}/scale": f"{theirs}.weight" for ours, theirs in norms.items()}
        | {f"{ours}/bias": f"{theirs}.bias" for ours, theirs in (linear | norms).items()}
    )


_TABLES = {"word": "word", "type": "token_type", "position": "position"}


def _shapes(config: BertConfig) -> list[tuple[str, tuple[int, ...]]]:
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    tree = jax.eval_shape(lambda i: Bert(config).init(jax.random.key(0), i, i > 0), ids)["params"]
    return [(place, leaf.shape) for place, leaf in flatten_dict(tree, sep="/").items()]


def _tensor(tensors: dict[str, np.ndarray], name: str, shape: tuple[int, ...], path: Path) -> np.ndarray:
    """Returns a tensor as the parameter of this shape; a matrix of a linear layer is stored transposed."""
    if name not in tensors:
        raise Refusal(f"{path}: found no tensor {name}, expected that of a BERT encoder.")
    transposed = len(shape) == 2 and "embeddings" not in name
    tensor = tensors[name].T if transposed else tensors[name]
    if tensor.shape != shape:
        raise Refusal(f"{path}: found {name} as {tensor.shape}, expected {shape} by config.json.")
    return tensor.astype(np.float32)


# ---------------------------------------------------------------- texts to vectors


class Encoder:
    """Turns texts into unit vectors, on all devices of a mesh at once.

    Args:
      folder: of the encoder.
      mesh: one axis of devices, over which texts are split; each holds the weights.
      tokens: a longer text loses its end; [CLS] and [SEP] count.
      dtype: of the products' operands; sums, norms and softmax are float32. By default float32 on a CPU,
        which is often slower at bfloat16, and bfloat16 elsewhere.

    Raises:
      Refusal: as `read_config`, `load_tokenizer` and `load_params`.
    """

    def __init__(self, folder: Path, mesh: Mesh, tokens: int, dtype: jnp.dtype | None = None):
        config = read_config(folder)
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        # Per device and call. The caches of a CPU hold what a layer makes of a few texts only.
        self._rows = 8 if on_cpu else 64
        self.width, self._devices = config.width, mesh.size
        self._tokenizer = load_tokenizer(folder, config, tokens)
        whole, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), mesh.axis_names))
        self._params = jax.device_put(load_params(folder, config), whole)
        bert = Bert(config, dtype or (jnp.float32 if on_cpu else jnp.bfloat16))
        self._encode = jax.jit(
            lambda params, ids_BT, mask_BT: pooled(bert.apply({"params": params}, ids_BT, mask_BT), mask_BT),
            in_shardings=(whole, rows, rows),
            out_shardings=rows,
        )

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Returns float32 [B, D], one unit vector per text."""
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        vectors_BD = np.empty((len(ids), self.width), np.float32)
        by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        for some in batched(by_length, self._rows * self._devices):
            vectors_BD[some] = self._run([ids[i] for i in some])
        return vectors_BD

    def _run(self, ids: list[list[int]]) -> np.ndarray:
        rows = self._devices * power_of_two(-(-len(ids) // self._devices))
        length = -(-max(map(len, ids)) // TILE) * TILE
        ids_BT, lengths_B = np.zeros((rows, length), np.int32), np.ones((rows, 1), np.int32)
        for row, text in enumerate(ids):
            ids_BT[row, : len(text)], lengths_B[row] = text, len(text)
        mask_BT = np.arange(length) < lengths_B
        return np.asarray(self._encode(self._params, ids_BT, mask_BT))[: len(ids)]


def power_of_two(count: int) -> int:
    """Returns the smallest power of two that is not below `count`: few shapes to compile for."""
    return 1 << (count - 1).bit_length()
