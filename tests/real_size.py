"""Steps of a comparison with transformers, each a process of its own: two models do not fit one machine.

`python -m tests.real_size STEP SIZE FOLDER`, in this order: `make` has transformers write random weights in
bfloat16; `theirs` stores its logits of a short prompt; `ours` loads the folder, stores our logits, and saves
the weights again. Each prints one JSON line: seconds of its parts, and the peaks of all resident and of
anonymous memory in bytes (files that are mapped count as resident only).
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

# On CPU, XLA would cast all layers of the scan to float32 at once, before its loop.
os.environ["XLA_FLAGS"] = "--xla_disable_hlo_passes=while-loop-invariant-code-motion"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

from tests.memory import Peak, resident_peak
from tests.test_sizes import published

SIZES = {
    "tiny": published(64, 96, 3, 4, head_dim=16, num_key_value_heads=2, vocab_size=512),
    "4B": published(2560, 9728, 36, 32, max_position_embeddings=262_144, rope_theta=5_000_000),
}
SHARD = {"tiny": "100KB", "4B": "2GB"}
TOKENS = 16


def prompt(vocabulary: int) -> np.ndarray:
    return np.random.RandomState(0).randint(0, vocabulary, (1, TOKENS))


def make(size: str, folder: Path) -> dict[str, float]:
    """Writes a checkpoint of several files as transformers writes them."""
    import torch
    import transformers

    started = time.monotonic()
    config = transformers.Qwen3Config(**{k: v for k, v in SIZES[size].items() if k != "architectures"})
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones, as transformers makes them, would hide a norm that is left out
                torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    made = time.monotonic()
    model.save_pretrained(folder / "original", max_shard_size=SHARD[size])
    return {"initialise": made - started, "save": time.monotonic() - made}


def theirs(size: str, folder: Path) -> dict[str, float]:
    """Stores transformers' logits."""
    import torch
    import transformers

    started = time.monotonic()
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder / "original", dtype=torch.bfloat16)
    loaded = time.monotonic()
    with torch.no_grad():
        logits = model(torch.tensor(prompt(SIZES[size]["vocab_size"]))).logits
    np.save(folder / "theirs.npy", logits.float().numpy())
    return {"load": loaded - started, "run": time.monotonic() - loaded}


def ours(size: str, folder: Path) -> dict[str, float]:
    """Stores our logits, also as computed in float32 from the same weights, and saves the weights again."""
    import jax
    import jax.numpy as jnp

    from mopd_jax.model import hf, hf_save
    from mopd_jax.model.qwen3 import Qwen3

    started = time.monotonic()
    config = hf.read_config(folder / "original")
    params = hf.load_params(folder / "original", config, dtype=jnp.bfloat16)
    loaded = time.monotonic()
    ids = prompt(SIZES[size]["vocab_size"])
    inputs = ids, np.arange(TOKENS)[None], np.ones_like(ids)
    took = {"load": loaded - started}
    for name, dtype in (("ours", jnp.bfloat16), ("exact", jnp.float32)):
        begun, model = time.monotonic(), Qwen3(dataclasses.replace(config, dtype=dtype))
        logits = jax.jit(
            lambda params, model=model: model.apply({"params": params}, *inputs, method="logits")
        )
        np.save(folder / f"{name}.npy", np.asarray(logits(params), np.float32))
        took[f"compile and run in {dtype.__name__}"] = time.monotonic() - begun
    ran = time.monotonic()
    hf_save.save(folder / "saved", config, params, shard_bytes=2_000_000_000)
    return took | {"save": time.monotonic() - ran}


if __name__ == "__main__":
    peak = Peak()
    peak.start()
    seconds = {"make": make, "theirs": theirs, "ours": ours}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
    seconds["processor time of all"] = time.process_time()  # the others are wall-clock time
    print(json.dumps({"seconds": seconds, "anonymous": peak.stop(), "resident": resident_peak()}))
