"""FLOPs that the mathematics of a piece of work asks for, whoever does it."""

from mopd_jax.model import hf
from mopd_jax.model.qwen3 import Qwen3Config
from mopd_jax.run.estimate import Lane, Rows, decode_work, prefill_work, score_work, update_work
from tools.bench import inputs
from tools.bench.cases import LOAD, LOGPROBS, PRODUCTS, RAGGED, ROOFLINE, SAMPLE, UPDATE, Job


def model_flops(job: Job) -> float | None:
    """Returns the FLOPs of one repetition, None where nobody has counted them (a whole training step).

    Sampling: every prompt once, then each sample's tokens over the mean length of its turn. Updates on
    ragged rows: no padding, only sampled positions unembedded.
    """
    if job.work == ROOFLINE:
        return PRODUCTS * 2 * job.sizes.matmul**3
    config = hf.read_config(inputs.checkpoint(job.folder))
    if job.work in (SAMPLE, LOAD):
        return job.multiple * _sampling(job, config)
    if job.work == LOGPROBS:
        return score_work([config], _uniform(job)).model
    if job.work == UPDATE:
        return update_work(config, _uniform(job)).model
    if job.work == RAGGED:
        batch = inputs.rows(job)
        rows = (Rows(1, len(ids), int(mask.sum())) for ids, mask in zip(batch.ids, batch.masks, strict=True))
        return sum(update_work(config, row).model for row in rows)
    return None


def _sampling(job: Job, config: Qwen3Config) -> float:
    s = job.sizes
    lane = Lane(s.prompts, s.samples, s.prompt_tokens, s.new_tokens // 2)
    prefill = prefill_work(config, s.prompts, s.prompt_tokens, s.prompt_tokens).model
    return prefill + s.new_tokens * decode_work(config, lane).model


def _uniform(job: Job) -> Rows:
    return Rows(job.sizes.rows, job.sizes.row_tokens, job.sizes.row_tokens - 1)
