"""Published figures, to plan with and to compare with: plain numbers, nothing imported."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One device."""

    flops: float
    """bfloat16 FLOP/s at peak."""
    bandwidth: float
    """Bytes/s of its memory."""
    memory: int
    """Bytes that programs may use: what the compiler grants, a little less than is built in."""


# Peak and bandwidth: the tables under "System architecture" of the public TPU documentation
# (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e). Memory: the limit that the compiler names when it refuses.
CHIPS = {
    "v4": Chip(275e12, 1200e9, int(30.75 * GIB)),
    "v5e": Chip(197e12, 819e9, int(15.75 * GIB)),
    "v5p": Chip(459e12, 2765e9, int(95.74 * GIB)),
    "v6e": Chip(918e12, 1638e9, int(31.25 * GIB)),
}
"""Generation, as topologies spell it → chip."""


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, **changes) -> dict[str, int | float | bool]:
    common = {
        "vocab_size": 151_936,
        "num_kv_heads": 8,
        "head_dim": 128,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40_960,
    }
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_layers": layers,
        "num_heads": heads,
    }
    return common | sizes | changes


QWEN3 = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16),
    # The paper's Instruct-2507; the first Qwen3-4B has the rotary base and the length of the others.
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, rope_theta=5e6, max_position_embeddings=262_144),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tie_word_embeddings=False),
}
"""Name → fields of `Qwen3Config`, as in each checkpoint's config.json."""

PAPER = {
    "c_mas": 25.09,
    "h_mas": 28.60,
    "prompted_critic_h_mas": 34.62,
    "stage1_c_mas": 36.07,
    "tree_grpo_single": 37.37,
    "stage2_h_mas": 38.68,
    "searcher_grpo_h_mas": 17.78,
    "base_teacher_h_mas": 29.50,
    "no_searcher_loss_h_mas": 29.82,
}
"""Name of an evaluation in configs/mini_systems.py → the paper's macro avg@4, %."""
