"""What the full-scale experiments share; no experiment itself. Their differences are in systems.py."""

from collections.abc import Callable

from configs.systems import Models
from mopd_jax.config import (
    Attention,
    Backend,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LearnConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    Precision,
    Remat,
    RetrievalConfig,
    RolloutConfig,
    TeamConfig,
    TrainConfig,
)

BASE = "checkpoints/Qwen3-4B-Instruct-2507"
MODELS = Models(base=BASE, stage1="runs/stage1", stage2="runs/stage2", judge=BASE)
BENCHMARKS = tuple(
    "nq:test triviaqa:test popqa:test hotpotqa:dev 2wikimultihopqa:dev musique:dev bamboogle:test".split()
)
"""The seven sets that the team is evaluated on, of each the split that is usually asked [D]."""


def prepared(*sets: str) -> tuple[str, ...]:
    """Returns where `tools/prepare_data --out data` puts the sets, each given as NAME:SPLIT."""
    return tuple(f"data/questions/{name}" for name in sets)


def base() -> Config:
    """Qwen3-4B-Instruct-2507 on NQ + HotpotQA [P]; 64 devices in 16 hosts of 4 (a v5e-64) [D].

    Validation asks NQ's dev split alone: HotpotQA's is a benchmark [D]. docs/tpu.md has the commands that
    make the data and start the retriever.
    """
    return Config(
        train=TrainConfig(steps=300, questions=64, workflows=5),
        model=ModelConfig(
            init=BASE,
            compute=Precision.BFLOAT16,
            frozen=Precision.BFLOAT16,
            rollout=Precision.BFLOAT16,
            remat=Remat.FULL,
            attention=Attention.SPLASH,
        ),
        mesh=MeshConfig(shape=(1, 64, 1), rollout_tensor=4),
        data=DataConfig(
            train=prepared("nq:train", "hotpotqa:train"),
            validation=prepared("nq:dev"),
            test=prepared(*BENCHMARKS),
            manifest="data/manifest.jsonl",
        ),
        retrieval=RetrievalConfig(backend=Backend.HTTP, url="http://127.0.0.1:8000/retrieve", k=3),
        team=TeamConfig(candidates=5, row_tokens=8192),
        rollout=RolloutConfig(
            conversations=12, parked=12, requests=4, prefill_rows=2, prefill_tokens=512, decode_steps=16
        ),
        learn=LearnConfig(
            row_buckets=(2048, 4096, 8192),
            micro_batch_tokens=64 * 8192,
            logit_chunk=512,
            role_gradients_every=10,
        ),
        optim=OptimConfig(lr=1e-6, warmup_steps=10),
        eval=EvalConfig(every=25, validation_questions=256, attempts=4),
        checkpoint=CheckpointConfig(every=10, keep=2),
    )


def full_scale(system: Callable[[Config, Models], Config]) -> Config:
    """Returns a system of systems.py at full scale; its folder is called as it is."""
    config = system(base(), MODELS)
    config.run.dir = f"runs/{system.__name__}"
    return config
