"""The same work by transformers on PyTorch, as fast as its public interface allows."""

from collections.abc import Callable

import numpy as np
import torch
import transformers
from torch.nn.functional import softmax

from tools.bench import inputs
from tools.bench.cases import (
    B1,
    B2,
    CLIP,
    EPS,
    LOGPROBS,
    LR,
    MAX_GRAD_NORM,
    PRODUCTS,
    PURE,
    RAGGED,
    ROOFLINE,
    SAMPLE,
    SHARED,
    SORTED,
    UPDATE,
    Job,
)

VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}


def _model(job: Job, stored: str) -> transformers.Qwen3ForCausalLM:
    torch.set_num_threads(job.threads)
    folder = inputs.checkpoint(job.folder)
    return transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=getattr(torch, stored))


# ---------------------------------------------------------------- sampling


def sample(job: Job) -> Callable[[], dict]:
    """Samples of a fixed length from the whole distribution; no end of turn exists."""
    model = _model(job, job.dtype)
    prompts = torch.tensor(inputs.prompts(job)).long()
    draw = _repeat_cache if job.recipe == SHARED else _generate
    torch.manual_seed(0)

    def run() -> dict:
        with torch.inference_mode():
            ids = draw(model, prompts, job.sizes.samples, job.sizes.new_tokens)
        return {"tokens": ids.numel()}

    return run


def _generate(model, prompts: torch.Tensor, samples: int, tokens: int) -> torch.Tensor:
    """The library's own loop; it prefills every sample."""
    found = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=samples,
        max_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found[:, prompts.shape[1] :]


def _repeat_cache(model, prompts: torch.Tensor, samples: int, tokens: int) -> torch.Tensor:
    """One prefill per prompt, its cache repeated for the samples."""
    out = model(prompts, use_cache=True, logits_to_keep=1)
    cache = out.past_key_values
    cache.batch_repeat_interleave(samples)
    logits, drawn = out.logits[:, -1].repeat_interleave(samples, 0), []
    for left in range(tokens, 0, -1):
        drawn.append(torch.multinomial(softmax(logits.float(), -1), 1))
        if left > 1:
            logits = model(drawn[-1], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    return torch.cat(drawn, 1)


# ---------------------------------------------------------------- learning


def _rectangles(job: Job) -> list[tuple[torch.Tensor, ...]]:
    found = inputs.rectangles(inputs.rows(job), job.micro_batch, by_length=job.recipe == SORTED)
    return [tuple(map(torch.from_numpy, micro)) for micro in found]


def _logprobs(model, ids: torch.Tensor) -> torch.Tensor:
    """Returns float32 log π of ids[:, 1:]. Padding stands on the right, where causal attention never looks:
    without a mask the attention is faster."""
    logits = model(ids, use_cache=False).logits[:, :-1].float()
    return logits.gather(-1, ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)


def logprobs(job: Job) -> Callable[[], dict]:
    """Micro-batches of whole rows."""
    model, micros, count = _model(job, job.dtype), _rectangles(job), inputs.rows(job).tokens

    def run() -> dict:
        with torch.inference_mode():
            found = [_logprobs(model, ids)[mask[:, 1:]] for ids, mask, _ in micros]
        np.save(job.file, torch.cat(found).numpy())
        return {"tokens": count}

    return run


def update(job: Job) -> Callable[[], dict]:
    """Optimizer steps on one batch, gradients accumulated over micro-batches."""
    stored = job.dtype if job.recipe == PURE else "float32"
    model, rows, micros = _model(job, stored), inputs.rows(job), _rectangles(job)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(B1, B2), eps=EPS, weight_decay=0.0, fused=True
    )
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=stored != job.dtype)
    old = inputs.old_logprob(model.config.vocab_size)

    def run() -> dict:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for ids, mask, advantages in micros:
            with autocast:
                logps = _logprobs(model, ids)
            loss = _policy_loss(logps, old, advantages, mask[:, 1:]) / rows.learnt
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        return {"tokens": rows.tokens, "loss": total}

    return run


def _policy_loss(logps, old: float, advantages, mask) -> torch.Tensor:
    ratio = (logps - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gain * mask).sum()


# ---------------------------------------------------------------- the machine


def roofline(job: Job) -> Callable[[], dict]:
    """Plain matrix products."""
    torch.set_num_threads(job.threads)
    a, b = torch.randn(2, job.sizes.matmul, job.sizes.matmul, dtype=getattr(torch, job.dtype))

    def run() -> dict:
        for _ in range(PRODUCTS):
            torch.mm(a, b)
        return {"tokens": PRODUCTS}

    return run


DO = {SAMPLE: sample, LOGPROBS: logprobs, UPDATE: update, RAGGED: update, ROOFLINE: roofline}
