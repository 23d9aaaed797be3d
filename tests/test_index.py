"""Corpora and index folders on disk: read by number, refused when torn or made from another corpus."""

import json

import pytest

from mopd_jax.refusal import Refusal
from mopd_jax.retrieval import bm25
from mopd_jax.retrieval.bm25 import BM25Search
from mopd_jax.retrieval.corpus import PIECE, PIECES, Corpus, fingerprint, scan
from mopd_jax.retrieval.index import META, available_bytes, building, require_memory
from mopd_jax.retrieval.local import open_index
from tests.test_bm25 import PASSAGES, write_corpus
from tools import build_index


@pytest.fixture
def corpus(tmp_path) -> str:
    return write_corpus(tmp_path / "corpus.jsonl", PASSAGES)


@pytest.fixture
def index(tmp_path, corpus) -> str:
    build_index.main(["--corpus", corpus, "--out", str(tmp_path / "index")])
    return str(tmp_path / "index")


# ---------------------------------------------------------------- corpora


def test_passages_are_read_by_number_whatever_stands_between_them(tmp_path):
    path = tmp_path / "awkward.jsonl"
    path.write_bytes(
        '\ufeff{"id": 7, "contents": "T\u2028x\\ny"}\r\n\n \n{"id": "8", "contents": "z"}\r\n\n'.encode()
        + b'{"contents": "last", "id": "9"}'
    )
    scanned = list(scan(str(path)))
    corpus = Corpus(str(path), [start for start, _ in scanned])
    assert [(d.id, d.contents) for _, d in scanned] == [("7", "T\u2028x\ny"), ("8", "z"), ("9", "last")]
    assert [corpus.document(i) for i in range(len(corpus))] == [d for _, d in scanned]
    assert corpus.document(1, 0.5).score == 0.5


def test_one_changed_byte_changes_the_fingerprint_of_a_small_file_and_any_shift_that_of_a_large_one(tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"abcdef")
    before = fingerprint(small)
    small.write_bytes(b"abcxef")
    assert fingerprint(small) != before
    with large.open("wb") as file:
        file.truncate(PIECES * PIECE + 5_000_000)
        file.seek(40_000_000)
        file.write(b"x" * 200_000)
    before = fingerprint(large)
    with large.open("r+b") as file:
        file.seek(40_000_000)
        file.write(b"\0" * 200_000)
    changed = fingerprint(large)
    with large.open("r+b") as file:
        file.truncate(PIECES * PIECE + 5_000_001)
    assert len({before, changed, fingerprint(large)}) == 3


# ---------------------------------------------------------------- index folders


def test_an_opened_index_finds_what_a_fresh_one_finds(corpus, index):
    opened, fresh = open_index(corpus, index), BM25Search(corpus)
    assert isinstance(opened, BM25Search) and opened.identity == fresh.identity
    queries = ["capital of Norway", "flowing rivers", "inlet", "nothing known"]
    found = opened.search(queries, 2)
    assert found == fresh.search(queries, 2)
    assert [hits[0].id for hits in found] == ["a", "c", "d", "a"]
    assert found[0][0].score > found[0][1].score > 0 == found[3][0].score


def test_an_index_of_another_corpus_is_refused(tmp_path, corpus, index):
    other = write_corpus(tmp_path / "other.jsonl", PASSAGES[:3])
    with pytest.raises(Refusal, match=r"made from another corpus: its fingerprint is .*other\.jsonl is"):
        BM25Search(other, index)
    text = (tmp_path / "corpus.jsonl").read_text()
    (tmp_path / "corpus.jsonl").write_text(text.replace("Tiber", "Fiber"))  # as many bytes
    with pytest.raises(Refusal, match="made from another corpus"):
        BM25Search(corpus, index)


def test_a_torn_index_is_refused_with_the_file_that_is_short(tmp_path, corpus, index):
    data = tmp_path / "index" / "weights.npy"
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    with pytest.raises(Refusal, match=rf"torn: found {len(whole) - 1} of the {len(whole)} bytes of weights"):
        BM25Search(corpus, index)
    data.unlink()
    with pytest.raises(Refusal, match=rf"torn: found nothing of the {len(whole)} bytes"):
        BM25Search(corpus, index)
    (tmp_path / "index" / META).write_text('{"kind"')
    with pytest.raises(Refusal, match=r"index\.json is torn"):
        BM25Search(corpus, index)


def test_a_folder_without_an_index_and_one_of_another_kind_are_refused(tmp_path, corpus, index):
    with pytest.raises(Refusal, match=r"no index\.json: it is no index\. Make one with tools/build"):
        BM25Search(corpus, str(tmp_path))
    meta = json.loads((tmp_path / "index" / META).read_text())
    (tmp_path / "index" / META).write_text(json.dumps(meta | {"kind": "dense"}))
    with pytest.raises(Refusal, match=r"is a dense index, expected bm25\. Set retrieval\.backend = dense"):
        BM25Search(corpus, index)


def test_an_index_in_an_earlier_format_is_refused(tmp_path, corpus, index):
    meta = json.loads((tmp_path / "index" / META).read_text())
    assert meta.pop("format") == 2
    (tmp_path / "index" / META).write_text(json.dumps(meta))
    with pytest.raises(
        Refusal, match=r"is a bm25 index of format 1, expected 2\. Build it again with tools/b"
    ):
        open_index(corpus, index)


def test_a_bm25_index_is_arrays_that_can_be_mapped_and_nothing_else(tmp_path, index):
    assert {file.name for file in (tmp_path / "index").iterdir()} == {META, *bm25.FILES}


def test_a_failed_build_leaves_the_earlier_index_and_nothing_else_is_ever_replaced(tmp_path, corpus, index):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "1", "contents": "of the"}\n')
    with pytest.raises(Refusal, match="but stop words"):
        bm25.build(str(bad), index)
    with pytest.raises(ZeroDivisionError), building(index) as partial:
        (partial / "file").write_text("half")
        1 / 0  # noqa: B018
    assert BM25Search(corpus, index).search(["Oslo"], 1)[0][0].id == "a"
    bm25.build(corpus, index)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "bad.jsonl",
        "corpus.jsonl",
        "index",
    ]
    (tmp_path / "index" / META).unlink()
    with pytest.raises(Refusal, match=r"holds files and no index\.json"):
        bm25.build(corpus, index)


def test_a_folder_that_holds_something_else_is_refused_before_the_corpus_is_read(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("no JSON")
    with pytest.raises(Refusal, match=r"holds files and no index\.json: choose a folder"):
        bm25.build(str(bad), str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["bad.jsonl"]


def test_a_file_in_the_place_of_the_index_is_refused_and_stays(tmp_path, corpus):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(Refusal, match=r"file is a file, expected a folder that can be replaced"):
        build_index.main(["--corpus", corpus, "--out", str(tmp_path / "file")])
    assert (tmp_path / "file").read_text() == "mine"


def test_what_needs_more_memory_than_is_free_is_refused_with_need_and_have():
    have = available_bytes()
    assert 10**8 < have < 10**14
    require_memory("Reading", have, have, "wait")
    with pytest.raises(
        ValueError, match=r"^Reading needs 2\.50 GB, 1\.00 GB are free: use another machine\.$"
    ):
        require_memory("Reading", 2.5e9, 1e9, "use another machine")


def test_a_corpus_that_cannot_be_indexed_in_memory_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "large.jsonl"
    with path.open("wb") as file:
        file.truncate(available_bytes())  # a hole: no block of the disk is taken
    with pytest.raises(Refusal, match=r"Indexing .*large\.jsonl needs [\d.]+ GB, [\d.]+ GB are free"):
        bm25.build(str(path), str(tmp_path / "index"))
    assert not (tmp_path / "index").exists()
