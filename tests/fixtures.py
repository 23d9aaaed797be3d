"""Tiny checkpoints and tokenizers, written as Hugging Face folders."""

import json
import pathlib
from collections.abc import Sequence

import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mopd_jax.model.qwen3 import Qwen3, Qwen3Config
from mopd_jax.model.sharding import abstract_params
from mopd_jax.refusal import Refusal
from tools import make_checkpoint

GOLDEN = pathlib.Path(__file__).parent / "golden"


def tiny_config(**changes) -> Qwen3Config:
    """Returns a Qwen3 of about 7,000 parameters whose sizes all differ."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_layers": 3, "num_heads": 4}
    sizes |= {"num_kv_heads": 2, "head_dim": 6, "rope_theta": 1e6, "tie_word_embeddings": True}
    return Qwen3Config(**sizes | {"max_position_embeddings": 128} | changes)


def random_params(config: Qwen3Config, seed: int = 0) -> dict:
    """Returns float32 parameters large enough that every one of them shows in the logits."""
    rng = np.random.RandomState(seed)  # the generator whose stream is fixed for good
    shapes = flatten_dict(abstract_params(Qwen3(config)))
    flat = {path: rng.normal(path[-1] == "scale", 0.2, shapes[path].shape) for path in sorted(shapes)}
    return unflatten_dict({path: x.astype(np.float32) for path, x in flat.items()})


def read_metrics(folder: pathlib.Path) -> list[dict[str, float | None]]:
    """Returns the lines of a run's `metrics.jsonl`, each with its `step`."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write_qwen_tokenizer(folder: pathlib.Path) -> pathlib.Path:
    """Writes a tokenizer folder with the real Qwen vocabulary; skips the test where that is missing."""
    try:
        vocabulary = make_checkpoint.default_vocabulary()
    except Refusal as error:
        pytest.skip(str(error))
    make_checkpoint.write_tokenizer(folder, vocabulary)
    return folder


def byte_backend(merges: tuple[tuple[str, str], ...] = (("a", "b"),)) -> Tokenizer:
    """Returns a tokenizer of the 256 bytes and one token per merge: ids 0–255, 256, …"""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def write_tokenizer(
    folder: pathlib.Path,
    backend: Tokenizer | None = None,
    template: str = make_checkpoint.CHAT_TEMPLATE,
    eos: Sequence[str] = ("<|im_end|>",),
    pad: str | None = "<|endoftext|>",
    special: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    added: Sequence[str] = ("<think>", "</think>"),
) -> pathlib.Path:
    """Writes a tokenizer folder: `special` and other `added` tokens take the ids after the backend's own."""
    backend = backend or byte_backend()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in added])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    eos_ids = [backend.token_to_id(token) for token in eos]
    generation = {"eos_token_id": eos_ids} | ({"pad_token_id": backend.token_to_id(pad)} if pad else {})
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
