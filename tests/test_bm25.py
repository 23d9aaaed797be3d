"""BM25 search: ranking, fewer passages than asked for, refused corpora, recall on the real passages."""

import itertools
import json
import pathlib
import random
import re

import bm25s
import numpy as np
import pytest
import Stemmer

from mopd_jax.data.questions import load_questions
from mopd_jax.data.recall import gold_recall
from mopd_jax.refusal import Refusal
from mopd_jax.retrieval import bm25
from mopd_jax.retrieval.bm25 import BM25Search
from mopd_jax.retrieval.corpus import scan
from mopd_jax.retrieval.index import seal
from mopd_jax.retrieval.search import Document

SMAPS = pathlib.Path("/proc/self/smaps")
STEMMER = Stemmer.Stemmer("english")
PASSAGES = [
    ("a", '"Oslo"\nOslo is the capital of Norway.'),
    ("b", '"Rome"\nRome is the capital of Italy, on the river Tiber.'),
    ("c", '"Tiber"\nThe Tiber is a river that flows through Rome.'),
    ("d", '"Fjord"\nFjords are long narrow inlets.'),
]


def write_corpus(path, passages) -> str:
    path.write_text("".join(json.dumps({"id": i, "contents": c}) + "\n" for i, c in passages), "utf-8")
    return str(path)


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    return BM25Search(write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", PASSAGES))


def ids(results):
    return [[document.id for document in documents] for documents in results]


def test_two_queries_have_their_own_best_passage_and_a_batch_equals_single_searches(search):
    queries = ["capital of Norway", "flowing rivers", "inlet"]
    batch = search.search(queries, 2)
    assert [documents[0].id for documents in batch] == ["a", "c", "d"]
    assert batch == [search.search([query], 2)[0] for query in queries]
    assert batch[0][0].title == '"Oslo"' and batch[0][0].text == "Oslo is the capital of Norway."


@pytest.mark.parametrize("query", ["Tiber", "capital", "zzzz", "the of", ""])
def test_two_passages_and_k_three_give_two_documents_none_repeated(tmp_path, query):
    two = BM25Search(write_corpus(tmp_path / "two.jsonl", PASSAGES[1:3]))
    (documents,) = two.search([query], 3)
    assert sorted(document.id for document in documents) == ["b", "c"]


def test_equal_scores_keep_the_order_of_the_corpus(tmp_path):
    twins = [(str(i), f"title {i % 2}\nsame text here") for i in range(40)]
    search = BM25Search(write_corpus(tmp_path / "twins.jsonl", twins))
    assert ids(search.search(["same text", "unknownword"], 4)) == [["0", "1", "2", "3"]] * 2


def test_the_best_passages_are_those_that_bm25s_scores_best(tmp_path):
    """Long lists of frequent words are looked up instead of read through: no passage is lost by it."""
    rng = random.Random(0)
    words = ["".join(letters) for letters in itertools.product("bdfgk", "aeiou", "lmnrt")]
    rarity = [1 / (i + 1) for i in range(len(words))]
    texts = [" ".join(rng.choices(words, rarity, k=rng.randint(1, 12))) for _ in range(400)]
    search = BM25Search(write_corpus(tmp_path / "words.jsonl", [(str(i), t) for i, t in enumerate(texts)]))
    library = bm25s.BM25()
    library.index(bm25s.tokenize(texts, stemmer=STEMMER, show_progress=False), show_progress=False)
    for number in range(300):
        query = rng.choices(words, rarity if number % 2 else None, k=rng.randint(1, 6))
        terms = bm25s.tokenize(" ".join(query), stemmer=STEMMER, return_ids=False, show_progress=False)[0]
        scores = library.get_scores_from_ids(library.get_tokens_ids(terms)) if terms else np.zeros(400)
        k = 1 + number % 10
        (found,) = search.search([" ".join(query)], k)
        np.testing.assert_allclose([d.score for d in found], np.sort(scores)[: -k - 1 : -1], rtol=1e-5)
        np.testing.assert_allclose([d.score for d in found], scores[[int(d.id) for d in found]], rtol=1e-5)


@pytest.mark.skipif(not SMAPS.exists(), reason="resident pages are read from /proc")
def test_less_than_a_third_of_an_index_is_resident_however_many_words_are_asked_for(tmp_path, monkeypatch):
    """Of 500 lists of 8,000 passages each, 32 MB, every query reads one."""
    monkeypatch.setattr(bm25, "SMALL", 0)
    index, words = tmp_path / "index", [f"word{i}" for i in range(500)]
    corpus = write_corpus(tmp_path / "corpus.jsonl", [(str(i), "text") for i in range(8000)])
    starts, (hashes, ranks) = [start for start, _ in scan(corpus)], bm25.ranked(words)
    ends, bounds = np.arange(501) * 8000, np.ones(500, np.float32)
    numbers, weights = np.tile(np.arange(8000, dtype=np.int32), 500), np.ones((500, 8000), np.float32)
    weights[ranks, np.arange(500)] = 2  # word i finds passage i
    index.mkdir()
    arrays = (np.array(starts), hashes, ends, bounds * 2, numbers, weights.reshape(-1))
    for name, array in zip(bm25.FILES, arrays, strict=True):
        np.save(index / name, array)
    seal(index, bm25.KIND, corpus)
    search, sizes = BM25Search(corpus, str(index)), []
    for i in random.Random(0).sample(range(500), 500):
        assert search.search([words[i]], 1)[0][0].id == str(i)
        sizes.append(mapped_bytes(index) if i % 5 == 0 else 0)
    assert 32e6 / 8 < max(sizes) < 32e6 / 3


def mapped_bytes(folder: pathlib.Path) -> int:
    """Returns the resident bytes of this process that are pages of files in a folder."""
    total, inside = 0, False
    for line in SMAPS.read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            inside = f" {folder}/" in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_two_words_of_one_hash_are_refused_by_name():
    """No two words of one hash are known: one word stands for both."""
    hashes, ranks = bm25.ranked(["oslo", "rome", "tiber"])
    assert hashes[ranks].tolist() == bm25.hashed(["oslo", "rome", "tiber"]).tolist() and sorted(ranks) == [
        0,
        1,
        2,
    ]
    with pytest.raises(
        Refusal, match="'rome' and 'rome' have the same hash, expected another for every word"
    ):
        bm25.ranked(["rome", "oslo", "rome"])


def test_no_query_gives_no_result(search):
    assert search.search([], 3) == []


def test_identity_follows_the_contents_of_the_corpus(tmp_path, search):
    same = BM25Search(write_corpus(tmp_path / "same.jsonl", PASSAGES))
    other = BM25Search(write_corpus(tmp_path / "other.jsonl", PASSAGES[:3]))
    assert same.identity == search.identity != other.identity
    assert search.identity.startswith("bm25:") and len(search.identity) == len("bm25:") + 16


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"id": "2", "contents": ', "not JSON"),
        (b'{"id": "2", "contents": "\xff"}', "not JSON"),
        (b'["2", "text"]', "found a JSON list"),
        (b'{"id": "2", "text": "t"}', '"contents" is missing'),
        (b'{"id": "2", "contents": " "}', "\"contents\" is ' '"),
        (b'{"contents": "t"}', '"id" is missing'),
        (b'{"id": true, "contents": "t"}', '"id" is True'),
        (b'{"id": "1", "contents": "t"}', "id '1' was already used in"),
        (b'{"id": 1, "contents": "t"}', "id '1' was already used in"),
    ],
)
def test_a_bad_line_is_refused_with_file_line_and_reason(tmp_path, line, reason):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"id": "1", "contents": "t"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 3") as refusal:
        list(scan(str(path)))
    assert reason in str(refusal.value)


def test_half_a_surrogate_pair_becomes_a_question_mark_and_whole_pairs_stay(tmp_path):
    path = tmp_path / "awkward.jsonl"
    path.write_text(r'{"id": "1", "contents": "a\uD800b \ud83d\ude00 \\ud800"}' + "\n")
    search = BM25Search(str(path))
    assert search.search(["b\ufffd"], 1) == [(Document("1", "a?b \U0001f600 \\ud800"),)]


def test_nesting_without_end_is_refused(tmp_path):
    (tmp_path / "deep.jsonl").write_text("[" * 200_000)
    with pytest.raises(Refusal, match=r"deep\.jsonl, line 1: not JSON \(nested too deeply\)"):
        list(scan(str(tmp_path / "deep.jsonl")))


def test_a_corpus_of_stop_words_is_refused(tmp_path):
    path = write_corpus(tmp_path / "stop.jsonl", [("1", "the of"), ("2", "and a")])
    with pytest.raises(Refusal, match=r"stop\.jsonl: found no word to search for but stop words"):
        BM25Search(path)


def test_an_empty_corpus_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl: found no passage"):
        list(scan(str(tmp_path / "empty.jsonl")))


def test_the_original_search_r1_corpus_is_read(shared_data):
    documents = [d for _, d in scan(str(shared_data / "raw" / "search_r1_example_corpus.jsonl"))]
    assert [d.id for d in documents] == [str(i) for i in range(10)]
    assert documents[0].title == '"Evan Morris"'


@pytest.mark.parametrize(
    "passage, golds, recall",
    [
        ("Paris\nThe U.S. won in 1995.", ("us",), 1.0),
        ("Paris\nThe U.S. won in 1995.", ("99", "5"), 0.0),
        ("Paris\nThe U.S. won in 1995.", ("the Paris", "no"), 1.0),
        ("Paris\nyes, no, a", ("Yes", "no", "---", "The"), None),
    ],
)
def test_recall_looks_for_whole_normalised_words(passage, golds, recall):
    assert gold_recall(golds, [Document("0", "Else\nnothing"), Document("1", passage)]) == recall


def test_recall_on_the_real_passages_is_the_published_one(shared_data):
    search = BM25Search(str(shared_data / "corpus.jsonl"))
    assert search.identity == "bm25:7df127d20ae02a90"
    found = {}
    for name in ("nq", "popqa", "hotpotqa"):
        questions = load_questions(str(shared_data / "questions" / f"{name}.jsonl"))
        results = search.search([q.text for q in questions], 3)
        recalls = [gold_recall(q.answers, docs) for q, docs in zip(questions, results, strict=True)]
        found[name] = len(recalls) - recalls.count(None), recalls.count(1.0)
    assert found == {"nq": (497, 296), "popqa": (498, 260), "hotpotqa": (464, 285)}
