"""The bench of the retrievers, on an index of fifty synthetic passages."""

import json
import re

import pytest

from tools import bench_retrieval, build_index


@pytest.fixture(scope="module")
def indexed(tmp_path_factory) -> list[str]:
    """The flags that name a synthetic corpus and its index."""
    folder = tmp_path_factory.mktemp("bench")
    corpus, index = str(folder / "corpus.jsonl"), str(folder / "index")
    bench_retrieval.main(["corpus", "--passages", "50", "--out", corpus])
    build_index.main(["--corpus", corpus, "--out", index])
    return ["--corpus", corpus, "--index", index]


def passages(indexed) -> list[str]:
    with open(indexed[1]) as lines:
        return [json.loads(line)["contents"] for line in lines]


def test_synthetic_passages_have_titles_and_a_hundred_words_each(indexed):
    contents = passages(indexed)
    assert [text.splitlines()[0] for text in contents] == [f'"Title {n}"' for n in range(50)]
    assert all(re.fullmatch(r"[a-z]{5}( [a-z]{5}){99}", text.splitlines()[1]) for text in contents)


def test_bm25_is_timed_and_agrees_with_the_library(indexed, capsys):
    bench_retrieval.main(["bm25", *indexed, "--queries", "4"])
    printed = capsys.readouterr().out
    assert "index of 0.000 GB opened in " in printed and "most resident after any of 4 queries" in printed
    rates = re.search(
        r"batched (\d+) queries/s, one by one (\d+)\nbm25s' own .*: (\d+) queries/s, the same scores", printed
    )
    assert all(int(rate) > 0 for rate in rates.groups())


def test_recall_is_the_share_of_questions_answered_in_the_first_passages(indexed, tmp_path, capsys):
    """The word "title" stands in every passage; without another, the corpus' first ones come first."""
    asked = [
        (passages(indexed)[30].splitlines()[1], "Title 30"),
        ("title", "Title 5"),
        ("title", "nowhere"),
        ("title", "yes"),  # no text can prove it: not counted
    ]
    questions = tmp_path / "questions.jsonl"
    records = [{"id": str(n), "question": q, "golden_answers": [a]} for n, (q, a) in enumerate(asked)]
    questions.write_text("".join(json.dumps(record) + "\n" for record in records))
    bench_retrieval.main(["recall", *indexed, "--questions", str(questions)])
    identity, shares = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"bm25:[0-9a-f]{16}", identity)
    assert shares == f"{questions}: recall@3 33.3%, recall@10 66.7%"


@pytest.mark.parametrize("mode", [["recall", "--corpus=c", "--index=i", "--questions=q"], ["fit"]])
def test_a_seed_is_refused_where_nothing_is_drawn(mode, capsys):
    with pytest.raises(SystemExit):
        bench_retrieval.main([*mode, "--seed", "1"])
    assert "unrecognized arguments: --seed 1" in capsys.readouterr().err
