"""Everything that all contestants read: one checkpoint, the token ids, recorded episodes. Made once, kept.

Only NumPy is imported at the top: this module is read in environments that lack the rest.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.bench.cases import LOGPROBS, RAGGED, ROOT, STEP, UPDATE, Job, Scale

POLICY = "policy"
"""The chain of `tools/bench/policy.py`."""


@dataclass(frozen=True)
class Rows:
    """A batch for the learner."""

    ids: list[np.ndarray]
    """int32 [T_i] per row."""
    masks: list[np.ndarray]
    """bool [T_i] per row: the tokens that are learnt; never the first."""
    advantages: np.ndarray
    """float32 [B], one per row."""

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(map(len, self.ids))

    @property
    def learnt(self) -> int:
        """N of the loss."""
        return int(sum(mask.sum() for mask in self.masks))


class Rectangle(NamedTuple):
    """A micro-batch of a learner that pads. Padding stands on the right, with id 0 and mask False."""

    ids: np.ndarray
    """int64 [B, T]"""
    mask: np.ndarray
    """bool [B, T]"""
    advantages: np.ndarray
    """float32 [B, 1]"""


def rectangles(rows: Rows, micro_batch: int, by_length: bool) -> list[Rectangle]:
    """Returns the rows `micro_batch` at a time, padded to the longest of all rows; `by_length`: sorted, and
    padded to the longest of the micro-batch. The last micro-batch is filled with rows of padding unless they
    are sorted: one shape for compilers."""
    lengths = np.array([len(row) for row in rows.ids])
    order = np.argsort(-lengths, kind="stable") if by_length else np.arange(len(lengths))
    found = []
    for start in range(0, len(order), micro_batch):
        chosen = order[start : start + micro_batch]
        count = len(chosen) if by_length else micro_batch
        width = lengths[chosen].max() if by_length else lengths.max()
        ids, mask = np.zeros((count, width), np.int64), np.zeros((count, width), bool)
        advantages = np.zeros((count, 1), np.float32)
        advantages[: len(chosen), 0] = rows.advantages[chosen]
        for b, index in enumerate(chosen):
            ids[b, : lengths[index]], mask[b, : lengths[index]] = rows.ids[index], rows.masks[index]
        found.append(Rectangle(ids, mask, advantages))
    return found


def old_logprob(vocabulary: int) -> float:
    """Returns log π_old of every token: that of a uniform policy, near enough to random weights that some
    ratios are clipped and others not."""
    return -float(np.log(vocabulary))


# ---------------------------------------------------------------- read


def checkpoint(folder: str | Path) -> Path:
    """Returns the Hugging Face folder."""
    return Path(folder) / "checkpoint"


def policy(folder: str | Path) -> Path:
    """Returns the run whose weights play the embedded world."""
    return Path(folder) / POLICY / "warmup"


def prompts(job: Job, multiple: int = 1) -> np.ndarray:
    """Returns int32 [multiple × prompts, tokens], no two alike."""
    s = job.sizes
    shape = (multiple * s.prompts, s.prompt_tokens)
    return np.random.default_rng(1).integers(0, s.model["vocab_size"], shape, np.int32)


def rows(job: Job) -> Rows:
    """Returns the batch of a piece of work: random ids of one length, or the recorded episodes."""
    if job.work == RAGGED:
        ids, masks = _recorded(job)
    else:
        s = job.sizes
        ids = list(
            np.random.default_rng(2).integers(0, s.model["vocab_size"], (s.rows, s.row_tokens), np.int32)
        )
        masks = [np.arange(s.row_tokens) > 0] * s.rows
    advantages = np.random.default_rng(3).normal(size=len(ids)).astype(np.float32)
    return Rows(ids, masks, advantages)


def _recorded(job: Job) -> tuple[list[np.ndarray], list[np.ndarray]]:
    with np.load(_episodes(job.folder)) as file:
        ends = np.cumsum(file["lengths"])[:-1]
        return np.split(file["ids"], ends), np.split(file["masks"], ends)


def _episodes(folder: str | Path) -> Path:
    return Path(folder) / "episodes.npz"


# ---------------------------------------------------------------- made


def make(folder: Path, scale: Scale, works: Sequence[str]) -> None:
    """Makes what these pieces of work read and is not there yet; `folder` is an absolute path."""
    (folder / "results").mkdir(parents=True, exist_ok=True)
    if not checkpoint(folder).exists():
        _make_checkpoint(folder, scale)
    if {RAGGED, STEP} & set(works) and not (policy(folder) / "finished.json").exists():
        _make_policy(folder, scale)
    if RAGGED in works and not _episodes(folder).exists():
        _record(folder, scale)


def _make_checkpoint(folder: Path, scale: Scale) -> None:
    """Has transformers write random weights in float32."""
    import torch
    import transformers

    torch.manual_seed(0)
    # Tunix 0.1.7 takes this base of the rotary frequencies whatever the checkpoint says.
    config = transformers.Qwen3Config(
        **scale.model, tie_word_embeddings=True, max_position_embeddings=4096, rope_theta=1_000_000
    )
    unfinished = checkpoint(folder).with_suffix(".unfinished")
    transformers.Qwen3ForCausalLM(config).save_pretrained(unfinished)
    unfinished.rename(checkpoint(folder))


def _make_policy(folder: Path, scale: Scale) -> None:
    """Trains the embedded world's base policy, as `configs/mini.py` does."""
    steps = [f"--config.{phase}.train.steps={n}" for phase, n in scale.policy_steps.items()]
    where = ["--config=tools/bench/policy.py", f"--config.run.dir={folder / POLICY}"]
    command = [sys.executable, "-m", "mopd_jax.train", *where, *steps]
    subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)


def _record(folder: Path, scale: Scale) -> None:
    """Lets that policy play `recorded` questions as stage 2 does and keeps the rows that hold sampled tokens.

    All five candidates of an answer are kept, equal ones too, as a learner that pads would take them.
    """
    from mopd_jax.config import Precision
    from mopd_jax.run import parts
    from tools.bench.miniature import tasks, training

    config = training(policy(folder), scale.recorded, Precision.FLOAT32)
    opened = parts.open_model(config.model.init, config)
    team = parts.make_team(config, opened, config.team.candidates)
    team.engine.load(parts.load_params(opened, team.mesh, config.model.rollout, config.run.seed))
    episodes = team.driver.run(parts.make_workflow(config.team, config.team.candidates), tasks(config, 0))
    kept = [row for episode in episodes for row in episode.rows if row.mask.any()]
    unfinished = folder / "unfinished.npz"
    np.savez(
        unfinished,
        ids=np.concatenate([row.ids for row in kept]),
        masks=np.concatenate([row.mask for row in kept]),
        lengths=[len(row.ids) for row in kept],
    )
    unfinished.rename(_episodes(folder))


def describe(job: Job) -> str:
    """Returns the title line's addition for a batch: how ragged it is; "" for other work."""
    if job.work not in (LOGPROBS, UPDATE, RAGGED):
        return ""
    batch = rows(job)
    lengths = sorted(map(len, batch.ids))
    if lengths[0] == lengths[-1]:
        return ""
    return (
        f"{len(lengths)} rows of {lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]}), "
        f"{batch.tokens:,} in all, {batch.learnt / batch.tokens:.0%} of them sampled."
    )
