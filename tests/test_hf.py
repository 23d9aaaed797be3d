"""Parity with transformers: live where torch is installed, against stored files everywhere.

`python -m tests.test_hf` writes `tests/golden/qwen3_*` again: checkpoints saved by transformers' own
Qwen3ForCausalLM (one tied, in one file, with the older spelling of rope_theta; one untied, in several
files, with the newer one) and the logits that it computes from them in float32.
"""

import base64
import collections
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from mopd_jax.model import folders, hf, hf_save
from mopd_jax.model.qwen3 import Qwen3, Qwen3Config
from mopd_jax.model.sharding import make_mesh, param_shardings
from mopd_jax.model.tokens import Tokens
from mopd_jax.refusal import Refusal
from tests.fixtures import GOLDEN, random_params, tiny_config, write_tokenizer
from tests.reads import counted
from tools import make_checkpoint

GOLDEN_CONFIGS = {
    "qwen3_tied": tiny_config(rope_theta=1e6),
    "qwen3_untied": tiny_config(rope_theta=5e6, tie_word_embeddings=False),
}
IDS = np.random.RandomState(1).randint(0, 64, (2, 40))


def our_logits(config: Qwen3Config, params: dict, ids: np.ndarray = IDS) -> np.ndarray:
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    model = Qwen3(config)
    return np.asarray(model.apply({"params": params}, ids, positions, np.ones_like(ids), method="logits"))


def their_logits(folder: pathlib.Path, ids: np.ndarray = IDS) -> np.ndarray:
    torch = pytest.importorskip("torch")
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.numpy()


def save_with_transformers(folder: pathlib.Path, config: Qwen3Config, shard_size: str = "1GB"):
    """Saves seeded weights in the way users' checkpoints are saved: by transformers itself."""
    torch = pytest.importorskip("torch")
    import transformers

    theirs = transformers.Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"},
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        max_position_embeddings=config.max_position_embeddings,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(theirs)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    model.save_pretrained(folder, max_shard_size=shard_size)


def spell_theta_as_before(folder: pathlib.Path):
    """Turns config.json into what transformers 4 wrote."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": None}))


def equal(left: dict, right: dict) -> bool:
    """Whether two parameter trees have the same keys, types and bits."""
    left, right = flatten_dict(left), flatten_dict(right)
    assert left.keys() == right.keys()
    return all(
        left[k].dtype == right[k].dtype and np.array_equal(np.asarray(left[k]), np.asarray(right[k]))
        for k in left
    )


def write_golden():
    for name, config in GOLDEN_CONFIGS.items():
        folder = GOLDEN / name
        shutil.rmtree(folder, ignore_errors=True)
        save_with_transformers(folder, config, "1GB" if config.tie_word_embeddings else "20KB")
        if config.tie_word_embeddings:
            spell_theta_as_before(folder)
        np.savez_compressed(folder / "logits.npz", logits=their_logits(folder))


NO_LOGITS = shutil.ignore_patterns("*.npz")


@pytest.fixture
def checkpoint(tmp_path) -> pathlib.Path:
    """A stored checkpoint, copied to be tampered with."""
    return pathlib.Path(shutil.copytree(GOLDEN / "qwen3_tied", tmp_path / "checkpoint", ignore=NO_LOGITS))


@pytest.mark.parametrize("name", GOLDEN_CONFIGS)
def test_logits_equal_stored_ones(name):
    """Kind 21, where torch is not installed."""
    config = hf.read_config(GOLDEN / name)
    assert config == GOLDEN_CONFIGS[name]
    params = hf.load_params(GOLDEN / name, config)
    expected = np.load(GOLDEN / name / "logits.npz")["logits"]
    np.testing.assert_allclose(our_logits(config, params), expected, atol=1e-5, rtol=0)
    assert (
        np.abs(our_logits(tiny_config(**vars(config) | {"rope_theta": 2e6}), params) - expected).max() > 1e-2
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("theta", [1e6, 5e6])
def test_logits_equal_transformers(tmp_path, theta, tied):
    """Kind 21."""
    config = tiny_config(rope_theta=theta, tie_word_embeddings=tied)
    save_with_transformers(tmp_path / "single", config)
    save_with_transformers(tmp_path / "sharded", config, "20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert hf.read_config(tmp_path / "single") == config
    spell_theta_as_before(tmp_path / "sharded")
    assert hf.read_config(tmp_path / "sharded") == config
    params = hf.load_params(tmp_path / "single", config)
    assert equal(params, hf.load_params(tmp_path / "sharded", config))
    expected = their_logits(tmp_path / "sharded")
    np.testing.assert_allclose(our_logits(config, params), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("tied", "shard_bytes"), [(True, 10**9), (False, 20_000)])
def test_transformers_loads_what_is_saved(tmp_path, tied, shard_bytes):
    config = tiny_config(rope_theta=5e6, tie_word_embeddings=tied)
    params = random_params(config)
    hf_save.save(tmp_path / "saved", config, params, shard_bytes=shard_bytes)
    expected = our_logits(config, params)
    np.testing.assert_allclose(their_logits(tmp_path / "saved"), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shard_bytes", [10**9, 5_000, 1])
def test_saved_and_loaded_is_bit_equal(tmp_path, dtype, shard_bytes):
    config = tiny_config(tie_word_embeddings=False)
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), random_params(config))
    hf_save.save(tmp_path / "saved", config, params, shard_bytes=shard_bytes)
    shards = [load_file(file) for file in (tmp_path / "saved").glob("*.safetensors")]
    sizes = [sum(tensor.nbytes for tensor in shard.values()) for shard in shards]
    assert sum(sizes) == sum(x.nbytes for x in jax.tree.leaves(params))
    assert all(size <= shard_bytes or len(shard) == 1 for size, shard in zip(sizes, shards, strict=True))
    assert (len(shards) == 1) == (shard_bytes == 10**9)
    assert hf.read_config(tmp_path / "saved") == config
    assert equal(params, hf.load_params(tmp_path / "saved", config, dtype=dtype))


def test_stored_type_is_cast(tmp_path):
    config = tiny_config()
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), random_params(config))
    hf_save.save(tmp_path / "saved", config, params)
    loaded = hf.load_params(tmp_path / "saved", config, dtype=jnp.float32)
    assert equal(jax.tree.map(lambda x: x.astype(jnp.float32), params), loaded)


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 8, 1), (4, 1, 2)])
def test_sharded_load_equals_plain_load(shape):
    config = GOLDEN_CONFIGS["qwen3_untied"]
    shardings = param_shardings(Qwen3(config), make_mesh(shape))
    params = hf.load_params(GOLDEN / "qwen3_untied", config, shardings)
    assert jax.tree.map(lambda x: x.sharding, params) == shardings
    assert equal(params, hf.load_params(GOLDEN / "qwen3_untied", config))


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 8, 1)])
def test_a_slice_is_read_once_for_all_its_holders(monkeypatch, shape):
    counts = collections.Counter()
    monkeypatch.setattr(hf, "safe_open", counted(counts))
    config = GOLDEN_CONFIGS["qwen3_untied"]
    params = hf.load_params(GOLDEN / "qwen3_untied", config, param_shardings(Qwen3(config), make_mesh(shape)))
    tensors = {
        name: x.size
        for f in (GOLDEN / "qwen3_untied").glob("*.safetensors")
        for name, x in load_file(f).items()
    }
    assert counts == tensors
    # What is taken over from the host without a copy may be given up to a program like any other array.
    doubled = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)(params)
    again = hf.load_params(GOLDEN / "qwen3_untied", config)
    assert equal(jax.tree.map(lambda x: 2 * x, again), doubled)


def test_tied_checkpoint_may_hold_a_head(checkpoint):
    config = hf.read_config(checkpoint)
    params = hf.load_params(checkpoint, config)
    tensors = load_file(checkpoint / "model.safetensors")
    save_file(tensors | {"lm_head.weight": np.zeros((64, 16), np.float32)}, checkpoint / "model.safetensors")
    assert equal(params, hf.load_params(checkpoint, config))


def test_tokenizer_files_are_carried_along(tmp_path):
    source = write_tokenizer(tmp_path / "source")
    config = tiny_config(vocab_size=320)
    (source / "config.json").write_text('{"model_type": "another"}')
    (source / "model.safetensors").write_text("weights of the source")
    hf_save.save(tmp_path / "saved", config, random_params(config), source=source)
    assert Tokens.from_folder(tmp_path / "saved").fingerprint == Tokens.from_folder(source).fingerprint
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in (tmp_path / "saved").iterdir()} == names | {"generation_config.json"}
    assert hf.read_config(tmp_path / "saved") == config


def test_saving_again_replaces_the_checkpoint(tmp_path):
    config = tiny_config()
    hf_save.save(tmp_path / "saved", config, random_params(config), shard_bytes=20_000)
    params = random_params(config, seed=1)
    hf_save.save(tmp_path / "saved", config, params)
    assert {file.name for file in (tmp_path / "saved").iterdir()} == {"config.json", "model.safetensors"}
    assert equal(params, hf.load_params(tmp_path / "saved", config))


def test_remote_folder_is_copied_both_ways(tmp_path, monkeypatch):
    """A gs:// folder goes through temporary files; here a local folder is taken for one."""
    monkeypatch.setattr(folders, "is_remote", lambda folder: True)
    config = tiny_config()
    for shard_bytes in (20_000, 10**9):
        hf_save.save(tmp_path / "saved", config, random_params(config), shard_bytes=shard_bytes)
        assert equal(random_params(config), hf.load_params(tmp_path / "saved", config))
    assert {file.name for file in (tmp_path / "saved").iterdir()} == {"config.json", "model.safetensors"}


def test_failed_save_leaves_the_earlier_checkpoint(checkpoint, tmp_path):
    config = hf.read_config(checkpoint)
    before = hf.load_params(checkpoint, config)
    broken = {key: value for key, value in random_params(config).items() if key != "final_norm"}
    with pytest.raises(ValueError, match=r"parameter final_norm/scale of shape nothing, expected \(16,\)"):
        hf_save.save(checkpoint, config, broken)
    (tmp_path / "source" / "tokenizer.json").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match=r"tokenizer\.json"):  # after the weights were written
        hf_save.save(checkpoint, config, random_params(config), source=tmp_path / "source")
    assert equal(before, hf.load_params(checkpoint, config))
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "source"}, (
        "nothing half-written is left"
    )


def test_saving_over_something_else_is_refused(tmp_path):
    config = tiny_config()
    hf_save.save(tmp_path / "saved", config, random_params(config))
    (tmp_path / "saved" / "notes.txt").write_text("mine")
    with pytest.raises(Refusal, match=r"holds notes\.txt, expected no folder or one with"):
        hf_save.save(tmp_path / "saved", config, random_params(config))
    assert (tmp_path / "saved" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "qwen2"}, "model_type = 'qwen2', expected 'qwen3'"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"]},
            "architectures = .'Qwen3Moe.*expected .'Qwen3ForCausalLM'",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type = 'yarn', expected 'default"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type = 'linear', expected 'default"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type = 'default', expected 'default, without a factor'"),
        (
            {"rope_parameters": {"rope_type": "linear"}, "rope_scaling": {"type": "default"}},
            "rope_type = 'linear', expected 'default",
        ),
        (
            {"rope_parameters": {"rope_theta": 10.0}},
            r"rope_theta = \[10.0, 1000000.0\], expected 'one value'",
        ),
        ({"rope_theta": None}, "rope_theta = 'nothing', expected 'one value'"),
        ({"attention_bias": True}, "attention_bias = True, expected False"),
        ({"use_sliding_window": True}, "use_sliding_window = True, expected False"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types = .*expected 'full_attention",
        ),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu', expected 'silu'"),
        ({"head_dim": None}, "head_dim = 'nothing', expected 'a value'"),
    ],
)
def test_unsupported_config_is_refused(checkpoint, changes, complaint):
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=complaint):
        hf.read_config(checkpoint)


NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({NORM: None}, rf"no tensor {NORM}, expected shape \(16,\) \(1 missing\)"),
        (
            {"model.layers.3.mlp.up_proj.weight": np.zeros(1)},
            r"Found tensor model.layers.3.mlp.*for 3 layers",
        ),
        ({"lm_head.bias": np.zeros(1)}, "Found tensor lm_head.bias .*tie_word_embeddings = True"),
        ({QUERY: np.zeros((24, 8), "f")}, rf"{QUERY} of shape \(24, 8\) .*expected \(24, 16\)"),
        ({NORM: np.zeros(16, "i4")}, rf"{NORM} of shape \(16,\) and type I32, expected .*F32"),
    ],
)
def test_wrong_tensor_is_named(checkpoint, changes, complaint):
    config = hf.read_config(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors") | changes
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(ValueError, match=complaint):
        hf.load_params(checkpoint, config)


def test_untied_checkpoint_needs_a_head(checkpoint):
    with pytest.raises(ValueError, match=r"Found no tensor lm_head.weight, expected shape \(64, 16\)"):
        hf.load_params(checkpoint, GOLDEN_CONFIGS["qwen3_untied"])


def test_missing_files_are_named(tmp_path):
    folder = pathlib.Path(shutil.copytree(GOLDEN / "qwen3_untied", tmp_path / "checkpoint"))
    config = hf.read_config(folder)
    first = min(folder.glob("*.safetensors"))
    first.unlink()
    with pytest.raises(Refusal, match=f"{first.name} is missing"):
        hf.load_params(folder, config)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text()[:-9])
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is torn"):
        hf.load_params(folder, config)
    index.unlink()
    with pytest.raises(Refusal, match=r"model\.safetensors is missing"):
        hf.load_params(folder, config)
    (folder / "config.json").unlink()
    with pytest.raises(Refusal, match=r"config\.json is missing"):
        hf.read_config(folder)


def test_make_checkpoint_from_a_vocabulary(tmp_path):
    """The command on a vocabulary of the bytes and "ab", "abc", in tiktoken's format."""
    words = [*(bytes([byte]) for byte in range(256)), b"ab", b"abc"]
    lines = [f"{base64.b64encode(word).decode()} {rank}" for rank, word in enumerate(words)]
    (tmp_path / "tiny.tiktoken").write_text("\n".join(lines) + "\n")
    arguments = {
        "out": tmp_path / "made",
        "vocabulary": tmp_path / "tiny.tiktoken",
        "hidden_size": 8,
        "dtype": "bfloat16",
    }
    make_checkpoint.main([f"--{name}={value}" for name, value in arguments.items()])
    config = hf.read_config(tmp_path / "made")
    assert (config.vocab_size, config.hidden_size, config.rope_theta) == (151_936, 8, 5e6)
    params = hf.load_params(tmp_path / "made", config, dtype=jnp.bfloat16)
    assert params["embed"]["embedding"].shape == (151_936, 8)
    scale = np.asarray(params["embed"]["embedding"], np.float32).std()
    assert scale == pytest.approx(8**-0.5, rel=0.05), "scaled by the width"
    tokens = Tokens.from_folder(tmp_path / "made")
    assert tokens.encode("abcab<|im_end|>a")[:2] == [257, 256]
    assert (tokens.eos_ids, tokens.vocab_size) == ((258, 260), 284)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "Found no file .*, expected a qwen"),
        ("YQ== 0\nYg==", "no token in base64 and its rank"),
    ],
)
def test_make_checkpoint_refuses_another_vocabulary(tmp_path, content, complaint):
    path = tmp_path / "vocabulary"
    path.write_text(content) if content else path.mkdir()
    with pytest.raises(Refusal, match=complaint):
        make_checkpoint.read_vocabulary(path)


@pytest.mark.parametrize("size", ["hidden_size", "num_layers", "num_kv_heads"])
def test_make_checkpoint_refuses_sizes_that_are_none(tmp_path, size):
    with pytest.raises(Refusal, match=f"{size} = 0: expected a whole number of at least 1"):
        make_checkpoint.main(["--out", str(tmp_path / "made"), f"--{size}=0"])


if __name__ == "__main__":
    write_golden()
