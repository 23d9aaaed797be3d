"""Dense search: what is embedded is found, with the index' own encoder and prefixes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.dense import DenseSearch
from mopd_jax.retrieval.encoder import Encoder
from mopd_jax.retrieval.exact import make_mesh
from mopd_jax.retrieval.local import open_index
from tests.berts import write_bert
from tests.test_bm25 import PASSAGES, write_corpus
from tools import build_index

QUERIES = ["capital of Norway", "the river Tiber", "old bridge", ""]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    write_bert(folder / "encoder")
    write_corpus(folder / "corpus.jsonl", PASSAGES)
    make(folder, "index")
    return folder


def make(root, name: str, *flags: str, corpus: str = "corpus.jsonl", encoder: str = "encoder") -> None:
    paths = ["--corpus", root / corpus, "--out", root / name, "--encoder", root / encoder]
    build_index.main([*map(str, paths), "--tokens", "32", *flags])


def search(root, index: str = "index", corpus: str = "corpus.jsonl") -> DenseSearch:
    return DenseSearch(str(root / corpus), str(root / index))


def embed(root, texts) -> np.ndarray:
    return Encoder(root / "encoder", make_mesh(jax.devices()[:1]), 32).embed(texts)


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(jnp.bfloat16).astype(np.float64)


def ids(found):
    return [[document.id for document in documents] for documents in found]


@pytest.mark.parametrize("prefixes", [("", ""), ("rome ", "oslo ")], ids=["bare", "prefixed"])
def test_passages_are_ranked_by_the_products_of_their_vectors(root, prefixes):
    query, passage = prefixes
    make(root, "ranked", f"--query_prefix={query}", f"--passage_prefix={passage}")
    found = search(root, "ranked").search(QUERIES, 3)
    queries_BD = rounded(embed(root, [query + q for q in QUERIES]))
    scores = queries_BD @ rounded(embed(root, [passage + contents for _, contents in PASSAGES])).T
    order = np.argsort(-scores, axis=1)[:, :3]
    assert ids(found) == [[PASSAGES[i][0] for i in row] for row in order]
    np.testing.assert_allclose(
        [[d.score for d in documents] for documents in found], np.take_along_axis(scores, order, 1), atol=5e-3
    )
    assert found[0][0].contents == PASSAGES[order[0, 0]][1]


def test_a_batch_equals_single_searches_and_no_query_gives_no_result(root):
    dense = search(root)
    assert dense.search(QUERIES, 2) == [dense.search([query], 2)[0] for query in QUERIES]
    assert dense.search([], 2) == []


def test_two_passages_and_k_three_give_two_documents_none_repeated(root):
    write_corpus(root / "two.jsonl", PASSAGES[1:3])
    make(root, "two", corpus="two.jsonl")
    assert [sorted(i) for i in ids(search(root, "two", "two.jsonl").search(QUERIES, 3))] == [["b", "c"]] * 4


def test_a_passage_finds_itself(root):
    found = search(root).search([contents for _, contents in PASSAGES], 1)
    assert ids(found) == [[id_] for id_, _ in PASSAGES]


def test_identity_follows_corpus_encoder_and_prefixes(root):
    first = search(root).identity
    make(root, "again")
    make(root, "prefixed", "--query_prefix=query: ")
    write_bert(root / "other_encoder", seed=1)
    make(root, "other", encoder="other_encoder")
    identities = [search(root, name).identity for name in ("again", "prefixed", "other")]
    assert identities[0] == first and len({first, *identities}) == 3
    assert first.startswith("dense:") and isinstance(open_index(*index_of(root)), DenseSearch)


def index_of(root) -> tuple[str, str]:
    return str(root / "corpus.jsonl"), str(root / "index")


def test_another_corpus_and_a_torn_index_are_refused(root, tmp_path):
    write_corpus(tmp_path / "other.jsonl", PASSAGES[:3])
    with pytest.raises(Refusal, match="made from another corpus"):
        DenseSearch(str(tmp_path / "other.jsonl"), str(root / "index"))
    make(root, "torn")
    (root / "torn" / "embeddings.bf16").write_bytes(b"")
    with pytest.raises(Refusal, match=r"torn: found 0 of the 96 bytes of embeddings\.bf16"):
        search(root, "torn")


def test_prefixes_without_an_encoder_are_refused(capsys):
    with pytest.raises(SystemExit):
        build_index.main(["--corpus", "c", "--out", "o", "--query_prefix", "query: "])
    assert "belong to an --encoder" in capsys.readouterr().err
