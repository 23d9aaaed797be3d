"""Our own pieces of work, through the engine, the scorer and the learner that training uses."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mopd_jax.config import LearnConfig, OptimConfig, RolloutConfig, TeamConfig
from mopd_jax.learn.learner import Learner
from mopd_jax.learn.loss import Streams
from mopd_jax.learn.packing import Batch, pack
from mopd_jax.learn.score import Scorer
from mopd_jax.model import hf, sharding
from mopd_jax.model.qwen3 import Qwen3
from mopd_jax.rollout.engine import Engine, Ticket
from mopd_jax.rollout.places import Conversation
from tools.bench import inputs
from tools.bench.cases import (
    B1,
    B2,
    CLIP,
    EPS,
    LOAD,
    LOGPROBS,
    LR,
    MAX_GRAD_NORM,
    PRODUCTS,
    RAGGED,
    ROOFLINE,
    SAMPLE,
    UPDATE,
    Job,
)

VERSIONS = {"jax": jax.__version__}
BUCKETS = (128, 256)
"""Row lengths for the recorded episodes, whose rows have up to 208 tokens: several share one."""
LOGIT_CHUNK = 256
OPTIM = OptimConfig(lr=LR, b1=B1, b2=B2, eps=EPS, max_grad_norm=MAX_GRAD_NORM)


def _mesh() -> jax.sharding.Mesh:
    return sharding.make_mesh((1, 1, 1), jax.devices()[:1])


def _model(job: Job) -> Qwen3:
    sizes = hf.read_config(inputs.checkpoint(job.folder))
    return Qwen3(dataclasses.replace(sizes, dtype=jnp.dtype(job.dtype)))


def _params(job: Job, model: Qwen3, stored: str) -> Any:
    layout = sharding.param_shardings(model, _mesh())
    return hf.load_params(inputs.checkpoint(job.folder), model.config, layout, jnp.dtype(stored))


# ---------------------------------------------------------------- sampling


def sample(job: Job) -> Callable[[], dict]:
    """Every prompt is one request for all its samples. New weights are loaded each time, as in training:
    nothing of the last repetition can be reused."""
    s = job.sizes
    model = _model(job)
    params = _params(job, model, "float32")
    team = TeamConfig(
        candidates=s.samples,
        leader_tokens=s.new_tokens,
        searcher_tokens=s.new_tokens,
        answerer_tokens=s.new_tokens,
        row_tokens=s.prompt_tokens + s.new_tokens,
    )
    rollout = RolloutConfig(
        conversations=1,
        parked=0,
        requests=s.prompts,
        prefill_rows=8,
        prefill_tokens=s.prompt_tokens,
        decode_steps=16,
    )
    never = (model.config.vocab_size,)  # an id that no logit stands for
    engine = Engine(model, never, team, s.samples, rollout, _mesh())
    prompts = inputs.prompts(job, job.multiple)
    rng = np.random.default_rng(0)

    def run() -> dict:
        engine.load(params)
        engine.take_usage()
        for prompt in prompts:
            keys = rng.integers(0, 2**32, (s.samples, 2), np.uint32)
            engine.submit(Ticket(Conversation(prompt.tolist()), keys, s.new_tokens))
        sampled = sum(len(sample.ids) for _, samples in _finished(engine) for sample in samples)
        usage = engine.take_usage()
        return {"tokens": sampled, "utilisation": usage.decoded / usage.slot_steps}

    return run


def _finished(engine: Engine) -> Iterator:
    while engine.busy:
        yield from engine.step()


# ---------------------------------------------------------------- learning


def _pack(job: Job, rows: inputs.Rows) -> Batch:
    s = job.sizes
    buckets = BUCKETS if job.work == RAGGED else (s.row_tokens,)
    return pack(rows.ids, rows.masks, buckets, s.micro_batch_tokens, 1)


def logprobs(job: Job) -> Callable[[], dict]:
    """Weights are held in the type of the computation, as a teacher's are."""
    model, rows = _model(job), inputs.rows(job)
    params = _params(job, model, job.dtype)
    batch, scorer = _pack(job, rows), Scorer(model, {}, LOGIT_CHUNK, _mesh())

    def run() -> dict:
        scored = [jax.device_get(scorer(params, micro)[0].logps) for micro in batch.micros]
        np.save(job.file, np.concatenate(batch.gather(scored)))
        return {"tokens": rows.tokens}

    return run


def update(job: Job) -> Callable[[], dict]:
    """Optimizer steps on one batch, packed."""
    model, rows = _model(job), inputs.rows(job)
    batch = _pack(job, rows)
    learn = LearnConfig(clip=CLIP, logit_chunk=LOGIT_CHUNK, sampler_weight_cap=0.0)
    learner = Learner(model, learn, OPTIM, 1, _mesh())
    state = learner.init_state(_params(job, model, "float32"))
    streams = _streams(rows, batch, inputs.old_logprob(model.config.vocab_size))

    def run() -> dict:
        nonlocal state
        state, report = learner.update(state, batch.micros, streams)
        jax.block_until_ready(state)
        return {"tokens": rows.tokens, "loss": report.loss}

    return run


def _streams(rows: inputs.Rows, batch: Batch, old: float) -> list[Streams]:
    counts = [int(mask.sum()) for mask in rows.masks]
    columns = (
        batch.scatter([np.full(n, a) for n, a in zip(counts, rows.advantages, strict=True)]),
        batch.scatter([np.full(n, 1 / rows.learnt) for n in counts]),
        batch.scatter([np.full(n, old) for n in counts]),
    )
    return [Streams(*micro) for micro in zip(*columns, strict=True)]


# ---------------------------------------------------------------- the machine


def roofline(job: Job) -> Callable[[], dict]:
    """Plain matrix products that accumulate in float32."""
    a, b = jax.random.normal(jax.random.key(0), (2, job.sizes.matmul, job.sizes.matmul), jnp.dtype(job.dtype))
    product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))

    def run() -> dict:
        for _ in range(PRODUCTS):
            product(a, b).block_until_ready()
        return {"tokens": PRODUCTS}

    return run


DO = {
    SAMPLE: sample,
    LOAD: sample,
    LOGPROBS: logprobs,
    UPDATE: update,
    RAGGED: update,
    ROOFLINE: roofline,
}
