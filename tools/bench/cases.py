"""What is measured: sizes, pieces of work, and which contestant does them in which ways."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Of the checkout, in which every process runs."""

OURS, TRANSFORMERS, TUNIX = "ours", "transformers", "tunix"
CONTESTANTS = (OURS, TRANSFORMERS, TUNIX)
DTYPES = ("float32", "bfloat16")

SAMPLE, LOGPROBS, UPDATE, RAGGED, STEP, LOAD = WORKS = (
    "sample",
    "logprobs",
    "update",
    "ragged",
    "step",
    "load",
)
ROOFLINE = "roofline"
"""Plain matrix products, run beside every other piece of work."""
PRODUCTS = 4
"""Matrix products per repetition."""

LR, B1, B2, EPS, MAX_GRAD_NORM, CLIP = 1e-5, 0.9, 0.95, 1e-8, 1.0, 0.2
"""Of the update: AdamW without decay, gradients clipped by their norm, ratios clipped."""

TITLES = {
    SAMPLE: "Sampling: {prompts} prompts × {prompt_tokens} tokens, {samples} samples × {new_tokens} new",
    LOGPROBS: "Log-probabilities: {rows} rows × {row_tokens} tokens",
    UPDATE: "Update (clipped policy gradient, AdamW): {rows} rows × {row_tokens} tokens",
    RAGGED: "Update on recorded H-MAS episodes",
    STEP: "One training step of the embedded world (stage 2), by phase",
    LOAD: "Sampling under load: the same slots, more requests",
}


@dataclass(frozen=True)
class Scale:
    """Sizes of everything, in Hugging Face's names for the model."""

    model: dict[str, int]
    prompts: int
    prompt_tokens: int
    samples: int
    new_tokens: int
    rows: int
    row_tokens: int
    micro_batches: tuple[int, ...]
    """Rows per micro-batch that are tried for the peers; the fastest takes part."""
    policy_steps: dict[str, int]
    """Steps of the phases that make the policy whose episodes are recorded; empty: as `configs/mini.py`."""
    questions: int
    """Of one training step."""
    recorded: int
    """Questions whose episodes are recorded."""
    micro_batch_tokens: int
    """Of our learner and scorer."""
    loads: tuple[int, ...]
    """Multiples of the requests."""
    batches: tuple[int, ...]
    """Multiples of the questions of one training step: in a larger one less of the time is its emptying."""
    matmul: int
    """Rows and columns of the roofline's matrices."""


SCALES = {
    "full": Scale(
        model={
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "vocab_size": 32_000,
        },
        prompts=16,
        prompt_tokens=256,
        samples=5,
        new_tokens=64,
        rows=16,
        row_tokens=512,
        micro_batches=(1, 2, 4, 8),
        policy_steps={},
        questions=13,
        recorded=2,
        micro_batch_tokens=1280,
        loads=(1, 2, 4, 8),
        batches=(1, 4),
        matmul=2048,
    ),
    "tiny": Scale(
        model={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": 640,
        },
        prompts=3,
        prompt_tokens=16,
        samples=5,
        new_tokens=6,
        rows=4,
        row_tokens=32,
        micro_batches=(2,),
        policy_steps={"facts": 2, "warmup": 2},
        questions=1,
        recorded=1,
        micro_batch_tokens=64,
        loads=(1, 2),
        batches=(1, 2),
        matmul=64,
    ),
}

GENERATE, SHARED = "generate", "one prefill, cache repeated"
MASTER, PURE = "float32 master weights", "all bfloat16"
PADDED, SORTED = "padded to the longest row", "sorted by length, micro-batches padded"


@dataclass(frozen=True)
class Job:
    """What one process measures."""

    contestant: str
    work: str
    dtype: str
    threads: int
    scale: str
    folder: str
    """Of the inputs."""
    recipe: str = ""
    """Which way of doing the work."""
    micro_batch: int = 0
    """Rows per micro-batch; 0: our own packing, or everything at once."""
    multiple: int = 1
    """Of the requests, under load; of the questions of a step."""

    @property
    def sizes(self) -> Scale:
        """The sizes behind the scale's name."""
        return SCALES[self.scale]

    @property
    def title(self) -> str:
        """How it is called in a table."""
        load = f"× {self.multiple}" if self.work in (LOAD, STEP) else ""
        return ", ".join(filter(None, (self.contestant, self.recipe, load)))

    @property
    def file(self) -> Path:
        """Where it leaves the log-probabilities that it computes, and, with another ending, its log."""
        words = (self.work, self.contestant, self.recipe, self.dtype, f"t{self.threads}")
        numbers = (f"mb{self.micro_batch}", f"x{self.multiple}")
        name = "-".join("_".join(word.replace(",", "").split()) for word in (*words, *numbers) if word)
        return Path(self.folder) / "results" / f"{name}.npy"

    def as_json(self) -> str:
        """Returns what `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """Returns the job that `as_json` wrote."""
        return cls(**json.loads(text))


def recipes(contestant: str, work: str, dtype: str) -> tuple[str, ...]:
    """Returns the ways in which a contestant does a piece of work; none if it does not do it at all."""
    if contestant == OURS:
        return ("",)
    if work in (STEP, LOAD):
        return ()
    if contestant == TUNIX:
        return (PADDED,) if work == RAGGED else ("",)
    if work == SAMPLE:
        return (GENERATE, SHARED)
    if work == RAGGED:
        return (PADDED, SORTED)
    return (MASTER, PURE) if work == UPDATE and dtype == "bfloat16" else ("",)


def variants(base: Job) -> list[list[Job]]:
    """Returns one list per line of the table: the jobs of which the fastest takes part."""
    scale, micro_batches = base.sizes, (0,)
    multiples = {LOAD: scale.loads, STEP: scale.batches}.get(base.work, (1,))
    if base.contestant != OURS and base.work in (LOGPROBS, UPDATE, RAGGED):
        # Short rows fill a processor in larger micro-batches only.
        micro_batches = [4 * n if base.work == RAGGED else n for n in scale.micro_batches]
    return [
        [replace(base, recipe=recipe, multiple=multiple, micro_batch=n) for n in micro_batches]
        for recipe in recipes(base.contestant, base.work, base.dtype)
        for multiple in multiples
    ]
