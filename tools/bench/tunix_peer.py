"""The same work by Tunix 0.1.7: its sampler, its log-probabilities, its trainer's compiled step.

Rows are padded: its packing by segment ids works with the TPU's attention kernel only.
"""

import importlib.metadata
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.models.qwen3.params import create_model_from_safe_tensors
from tunix.rl import common
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

from tools.bench import inputs
from tools.bench.cases import B1, B2, CLIP, EPS, LOGPROBS, LR, MAX_GRAD_NORM, RAGGED, SAMPLE, UPDATE, Job

VERSIONS = {name: importlib.metadata.version(name) for name in ("google-tunix", "jax")}
logging.getLogger().setLevel(logging.WARNING)


class Ids:
    """A tokenizer for prompts that are ids already, written as numbers."""

    def __init__(self, vocabulary: int):
        self._outside = vocabulary

    def encode(self, text: str) -> list[int]:
        """Returns the numbers."""
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        """Returns nothing: nobody reads it."""
        return ""

    def bos_id(self) -> int:
        """Returns 0, which the sampler takes for none."""
        return 0

    def eos_id(self) -> int:
        """Returns an id that is never sampled."""
        return self._outside

    def pad_id(self) -> int:
        """Returns an id that is never sampled."""
        return self._outside


def _model(job: Job, stored: str) -> Qwen3:
    sizes = job.sizes.model
    config = ModelConfig(
        num_layers=sizes["num_hidden_layers"],
        vocab_size=sizes["vocab_size"],
        embed_dim=sizes["hidden_size"],
        hidden_dim=sizes["intermediate_size"],
        num_heads=sizes["num_attention_heads"],
        head_dim=sizes["head_dim"],
        num_kv_heads=sizes["num_key_value_heads"],
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        dtype=jnp.dtype(job.dtype),
        param_dtype=jnp.dtype(stored),
    )
    folder = str(inputs.checkpoint(job.folder))
    return create_model_from_safe_tensors(folder, config, dtype=jnp.dtype(stored))


def sample(job: Job) -> Callable[[], dict]:
    """Every prompt is given once for each of its samples: the sampler has no way to share them."""
    s = job.sizes
    cache = CacheConfig(
        cache_size=s.prompt_tokens + s.new_tokens,
        num_layers=s.model["num_hidden_layers"],
        num_kv_heads=s.model["num_key_value_heads"],
        head_dim=s.model["head_dim"],
    )
    sampler = Sampler(_model(job, job.dtype), Ids(s.model["vocab_size"]), cache)
    texts = [" ".join(map(str, prompt)) for prompt in inputs.prompts(job) for _ in range(s.samples)]
    seeds = iter(range(1_000_000))

    def run() -> dict:
        out = sampler(
            texts,
            max_generation_steps=s.new_tokens,
            max_prompt_length=s.prompt_tokens,
            temperature=1.0,
            top_p=1.0,
            seed=next(seeds),
        )
        return {"tokens": sum(map(len, out.tokens))}

    return run


def _batches(job: Job) -> list[dict[str, jax.Array]]:
    found = inputs.rectangles(inputs.rows(job), job.micro_batch, by_length=False)
    return [
        {"ids": jnp.asarray(ids, jnp.int32), "mask": jnp.asarray(mask[:, 1:]), "advantages": jnp.asarray(a)}
        for ids, mask, a in found
    ]


def _logprobs(model: Qwen3, ids: jax.Array) -> jax.Array:
    """Returns log π of ids[:, 1:]; padding stands on the right, where causal attention never looks."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    mask = common.make_causal_attn_mask(jnp.ones(ids.shape, bool))
    return common.get_per_token_logps(model, ids, positions, mask, ids.shape[1] - 1)


def logprobs(job: Job) -> Callable[[], dict]:
    """Micro-batches of whole rows."""
    model, batches, count = _model(job, job.dtype), _batches(job), inputs.rows(job).tokens

    def run() -> dict:
        found = [np.asarray(_logprobs(model, b["ids"]))[np.asarray(b["mask"])] for b in batches]
        np.save(job.file, np.concatenate(found))
        return {"tokens": count}

    return run


def update(job: Job) -> Callable[[], dict]:
    """The trainer's step on every micro-batch; its optimizer averages their gradients."""
    model, rows, batches = _model(job, "float32"), inputs.rows(job), _batches(job)
    old, scale = inputs.old_logprob(job.sizes.model["vocab_size"]), len(batches) / rows.learnt

    def loss_fn(model, ids, mask, advantages):
        ratio = jnp.exp(_logprobs(model, ids) - old)
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
        return -(gain * mask).sum() * scale

    optimizer = optax.chain(
        optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adamw(LR, B1, B2, EPS, weight_decay=0.0)
    )
    settings = TrainingConfig(eval_every_n_steps=1_000_000, gradient_accumulation_steps=len(batches))
    trainer = PeftTrainer(model, optimizer, settings).with_loss_fn(loss_fn)
    train_step, _ = trainer.jit_train_and_eval_step()

    def run() -> dict:
        losses = [train_step(batch)[0] for batch in batches]
        return {"tokens": rows.tokens, "loss": float(np.mean(jax.device_get(losses)))}

    return run


DO = {SAMPLE: sample, LOGPROBS: logprobs, UPDATE: update, RAGGED: update}
