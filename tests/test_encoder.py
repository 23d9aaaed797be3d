"""The BERT encoder: equal to transformers' own, whatever the batch; others are refused."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.encoder import POOLING, Encoder, load_params, read_config
from mopd_jax.retrieval.exact import make_mesh
from tests.berts import TINY, WORDS, minilm, word_tokenizer, write_bert
from tests.fixtures import GOLDEN

TEXTS = [
    "Oslo is the capital of Norway",
    "",
    "Rome",
    "the old bridge at Alder falls into the Tiber in spring, and the river rises",
    " ".join(WORDS * 3),
]
STORED = GOLDEN / "bert_embeddings.json"
"""What transformers' BertModel, mean-pooled and normalised, made of TEXTS with the tiny random weights."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("bert"))


def encoder(folder, devices: int = 1, tokens: int = 64, dtype=jnp.float32) -> Encoder:
    return Encoder(folder, make_mesh(jax.devices()[:devices]), tokens, dtype)


def of_transformers(folder, texts, tokens: int) -> np.ndarray:
    """Mean pooling and normalisation as on the model card of all-MiniLM-L6-v2, one text at a time."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer
    from transformers import BertModel

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(tokens)
    tokenizer.no_padding()
    model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    with torch.no_grad():
        means = [model(torch.tensor([tokenizer.encode(t).ids])).last_hidden_state.mean(1)[0] for t in texts]
    return torch.nn.functional.normalize(torch.stack(means)).numpy()


def test_embeddings_are_those_that_transformers_made(folder):
    stored = np.array(json.loads(STORED.read_text()))
    np.testing.assert_allclose(encoder(folder).embed(TEXTS), stored, atol=2e-6)


def test_embeddings_equal_transformers_here_and_now(folder):
    np.testing.assert_allclose(encoder(folder).embed(TEXTS), of_transformers(folder, TEXTS, 64), atol=2e-6)


def test_the_real_minilm_equals_transformers():
    folder = minilm()
    texts = [f"A passage about {' and '.join(WORDS[i : i + n])}." for i, n in enumerate((1, 4, 9))]
    expected = of_transformers(folder, texts, 16)
    np.testing.assert_allclose(encoder(folder, tokens=16).embed(texts), expected, atol=2e-6)
    similarity = (encoder(folder, tokens=16, dtype=jnp.bfloat16).embed(texts) * expected).sum(1)
    assert similarity.min() > 0.999


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_text_has_one_vector_in_any_batch_and_on_any_number_of_devices(folder, devices):
    embed = encoder(folder, devices).embed
    vectors = embed(TEXTS)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([embed([text]) for text in TEXTS]), vectors, atol=1e-6)
    np.testing.assert_allclose(embed(TEXTS * 30)[-5:], vectors, atol=1e-6)
    assert embed([]).shape == (0, TINY.width)


def test_a_long_text_loses_its_end(folder):
    longest = TEXTS[-1]
    assert len(longest.split()) == 54
    cut, same, other = encoder(folder, tokens=10), "Oslo Rome", " ".join(longest.split()[:8])
    np.testing.assert_allclose(cut.embed([longest, same]), cut.embed([other, same]), atol=1e-6)
    assert np.abs(encoder(folder).embed([longest]) - cut.embed([longest])).max() > 0.01


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model_type", "xlm-roberta", r"found model_type = 'xlm-roberta', expected 'bert'\. Only plain BERT"),
        ("hidden_act", "relu", "found hidden_act = 'relu', expected 'gelu'"),
        ("position_embedding_type", "relative_key", "found position_embedding_type = 'relative_key'"),
        ("is_decoder", True, "found is_decoder = True, expected False"),
        ("hidden_size", None, "found no hidden_size"),
    ],
)
def test_another_architecture_is_refused(tmp_path, field, value, words):
    path = write_bert(tmp_path) / "config.json"
    config = json.loads(path.read_text()) | {field: value}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    with pytest.raises(Refusal, match=rf"config\.json: {words}"):
        read_config(tmp_path)


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    write_bert(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 24}))
    with pytest.raises(Refusal, match=r"encoder\.layer\.0\.\S+ as \(\d+, \d+\), expected \(\d+, \d+\)"):
        load_params(tmp_path, read_config(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(Refusal, match=r"found no tensor encoder\.layer\.2\.\S+, expected that of a BERT"):
        load_params(tmp_path, read_config(tmp_path))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(Refusal, match=r"model\.safetensors is torn or no safetensors file"):
        load_params(tmp_path, read_config(tmp_path))
    weights.unlink()
    with pytest.raises(Refusal, match=r"model\.safetensors is missing: an encoder is config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "said",
    [
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        {"pooling_mode": "cls"},
        {"pooling_mode": ["cls", "mean"]},
    ],
)
def test_another_pooling_than_the_mean_is_refused(tmp_path, said):
    pooling = write_bert(tmp_path) / POOLING
    pooling.parent.mkdir()
    pooling.write_text(json.dumps(said))
    with pytest.raises(Refusal, match=r"1_Pooling/config\.json: found another pooling than the mean"):
        read_config(tmp_path)


@pytest.mark.parametrize("said", [{"pooling_mode_mean_tokens": True}, {"pooling_mode": "mean"}, {}])
def test_the_mean_and_what_names_no_pooling_are_read(tmp_path, said):
    pooling = write_bert(tmp_path) / POOLING
    pooling.parent.mkdir()
    pooling.write_text(json.dumps({"word_embedding_dimension": TINY.width} | said))
    assert read_config(tmp_path) == TINY


@pytest.mark.parametrize("tokens", [-1, 0, 2, 65])
def test_tokens_that_leave_no_text_or_exceed_the_positions_are_refused(folder, tokens):
    words = rf"tokens = {tokens}, the encoder .* knows 64 positions: expected at least 3, since \[CLS\]"
    with pytest.raises(Refusal, match=words):
        encoder(folder, tokens=tokens)


def test_three_tokens_leave_the_first_word(folder):
    both, first, second = encoder(folder, tokens=3).embed(["Oslo Rome", "Oslo", "Rome"])
    np.testing.assert_allclose(both, first, atol=1e-6)
    assert np.abs(both - second).max() > 0.01


def test_the_tokenizer_of_another_model_is_refused(tmp_path):
    write_bert(tmp_path)
    word_tokenizer(replace(TINY, vocab_size=41)).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(Refusal, match=r"ids up to 40, expected them below the vocab_size = 40 .* two models"):
        encoder(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_torn_file_is_refused_by_name(tmp_path, name):
    path = write_bert(tmp_path) / name
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(Refusal, match=rf"{name} is torn \(.*\): copy it again"):
        encoder(tmp_path)
