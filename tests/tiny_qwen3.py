"""A Qwen3 small enough to compile in a second, with weights large enough that every part matters."""

import jax
import jax.numpy as jnp
import numpy as np

from mopd_jax.model import sharding
from mopd_jax.model.qwen3 import Qwen3, Qwen3Config

VOCAB = 37


def make_model(**changes) -> Qwen3:
    """Returns a model with grouped queries (4 heads on 2), 3 layers and an untied head."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rope_theta": 100.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
    }
    return Qwen3(Qwen3Config(**(sizes | changes)))


def make_params(model: Qwen3, seed: int = 0) -> dict:
    """Returns normal weights of width 0.3: at the initial 0.02 attention would be nearly uniform."""
    rng = np.random.default_rng(seed)
    shapes = sharding.abstract_params(model)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape) + 0.1, jnp.float32), shapes)


def packed(*texts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns ids, positions and segments [1, length] of texts packed into one row."""
    ids, positions, segments = np.zeros((3, 1, length), np.int32)
    start = 0
    for number, text in enumerate(texts, start=1):
        span = slice(start, start + len(text))
        ids[0, span], positions[0, span], segments[0, span] = text, np.arange(len(text)), number
        start += len(text)
    return ids, positions, segments


def random_ids(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns ids of the tiny vocabulary."""
    return rng.integers(0, VOCAB, shape).astype(np.int32)


def assert_trees_close(found: dict, expected: dict, rtol: float) -> None:
    """Compares trees leaf by leaf, each relative to its largest entry."""
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        b = np.asarray(b)
        np.testing.assert_allclose(a, b, 0, rtol * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))
