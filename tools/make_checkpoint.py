"""Makes a randomly initialised Qwen3 checkpoint with the full Qwen vocabulary, as a Hugging Face folder.

    python -m tools.make_checkpoint --out checkpoints/small --hidden_size 128 --num_layers 2

The vocabulary is read from a `qwen.tiktoken` file; by default the one inside the PyPI package
`dashscope`, which has to be installed but is not imported. Nothing is downloaded.
"""

import argparse
import base64
import importlib.util
import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from mopd_jax.model import hf_save
from mopd_jax.model.qwen3 import Qwen3, Qwen3Config
from mopd_jax.model.sharding import init_params, make_mesh
from mopd_jax.refusal import Refusal, in_words

PADDED_VOCABULARY = 151_936
"""Width of Qwen3's logits; ids from 151,669 on stand for nothing."""

# The names and ids of Qwen3's added tokens, from 151,643 on; those of the second group are not "special".
SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
ADDED = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> "
    "<|file_sep|> <tool_response> </tool_response> <think> </think>"
).split()

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen cuts text before byte-pair merging."""

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Renders system, user and assistant messages as Qwen3-Instruct-2507 does (its tool calls left out)."""


def default_vocabulary() -> Path:
    """Returns the path of the Qwen vocabulary that the installed package `dashscope` carries.

    Raises:
      Refusal: the package is not installed or holds no such file.
    """
    package = importlib.util.find_spec("dashscope")
    folders = package.submodule_search_locations if package else []
    for folder in folders:
        if (Path(folder) / "resources/qwen.tiktoken").exists():
            return Path(folder) / "resources/qwen.tiktoken"
    raise Refusal(
        "Found no package `dashscope` with resources/qwen.tiktoken. `pip install dashscope`, or pass "
        "--vocabulary."
    )


def read_vocabulary(path: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns (token → id, merges by rank) of a tiktoken file, tokens in GPT-2's spelling of bytes.

    Raises:
      Refusal: there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise Refusal(f"Found no file {path}, expected a qwen.tiktoken file: pass another --vocabulary.")
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    try:
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    except ValueError as error:
        raise Refusal(f"{path}: found a line that is no token in base64 and its rank ({error}).") from error
    spell = _byte_spelling()
    merges = [
        tuple(map(spell, _last_merge(token, ranks)))
        for token in sorted(ranks, key=ranks.get)
        if len(token) > 1
    ]
    return {spell(token): rank for token, rank in ranks.items()}, merges


def _byte_spelling() -> Callable[[bytes], str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return lambda token: "".join(table[byte] for byte in token)


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Returns the two parts from which byte-pair encoding makes a token: merge by rank until two are left."""
    parts = [token[i : i + 1] for i in range(len(token))]
    never = len(ranks)
    while len(parts) > 2:
        pairs = [ranks.get(left + right, never) for left, right in itertools.pairwise(parts)]
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def write_tokenizer(folder: Path, vocabulary: Path):
    """Writes tokenizer, chat template and generation config of Qwen3-Instruct-2507 into `folder`."""
    vocab, merges = read_vocabulary(vocabulary)
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in ADDED])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    end_of_text, end_of_turn = map(tokenizer.token_to_id, ("<|endoftext|>", "<|im_end|>"))
    generation = {"eos_token_id": [end_of_turn, end_of_text], "pad_token_id": end_of_text}
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": 262_144,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))


def main(argv: Sequence[str] | None = None):
    args = _parse(argv)
    config = Qwen3Config(
        vocab_size=PADDED_VOCABULARY,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_layers=args.num_layers,
        num_heads=args.num_heads,
        num_kv_heads=args.num_kv_heads,
        head_dim=args.head_dim,
        rope_theta=args.rope_theta,
        tie_word_embeddings=not args.untied,
        max_position_embeddings=262_144,
    )
    mesh = make_mesh((1, 1, 1), jax.local_devices()[:1])
    params = init_params(Qwen3(config), jax.random.key(args.seed), mesh, jnp.dtype(args.dtype))
    with tempfile.TemporaryDirectory() as tokenizer:
        write_tokenizer(Path(tokenizer), args.vocabulary or default_vocabulary())
        hf_save.save(args.out, config, params, source=tokenizer)
    count = sum(x.size for x in jax.tree.leaves(params))
    print(f"{args.out}: {count:,} parameters in {args.dtype}, {PADDED_VOCABULARY:,} ids")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--vocabulary", type=Path, help="qwen.tiktoken; default: the one in `dashscope`")
    parser.add_argument("--hidden_size", type=int, default=128, help="width of the residual stream")
    parser.add_argument("--intermediate_size", type=int, default=384, help="width of the SwiGLU layer")
    parser.add_argument("--num_layers", type=int, default=2, help="decoder layers")
    parser.add_argument("--num_heads", type=int, default=4, help="query heads")
    parser.add_argument("--num_kv_heads", type=int, default=2, help="key/value heads")
    parser.add_argument("--head_dim", type=int, default=32, help="width of one head")
    parser.add_argument("--rope_theta", type=float, default=5e6, help="base of the rotary frequencies")
    parser.add_argument("--untied", action="store_true", help="give the output head weights of its own")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    return parser.parse_args(argv)


if __name__ == "__main__":
    with in_words():
        main()
