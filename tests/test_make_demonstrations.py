"""Demonstrations from questions and a corpus: what is said, what is left out, what can be read back."""

import json

import pytest

from mopd_jax.config import TeamConfig
from mopd_jax.data.demonstrations import act_out, read_conversations
from mopd_jax.retrieval.bm25 import BM25Search
from mopd_jax.retrieval.search import Document
from mopd_jax.team.episode import Message, Question, Role
from mopd_jax.team.roles import Prompts
from mopd_jax.team.workflows import cascade
from tools import make_demonstrations as tool

PASSAGES = {
    "0": '"Oslo"\nOslo lies on a fjord. It is the capital of Norway. Its river is the Aker.',
    "1": '"Rome"\nRome is the capital of Italy. It lies on the Tiber!',
    "2": '"Bergen"\nBergen was Norway\'s capital in the 13th century.',
    "3": '"Tags"\nThe <search> tag of zebras is striped.',
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": i, "contents": c}) + "\n" for i, c in PASSAGES.items()))
    return str(path)


@pytest.fixture(scope="module")
def retriever(corpus):
    return BM25Search(corpus)


def ask(text: str, *answers: str) -> Question:
    return Question("nq", "train", "train_0", text, answers)


def spoken(conversation) -> list[str]:
    return [message for message in conversation.messages if isinstance(message, str)]


def test_all_three_roles_are_demonstrated_on_documents_really_found(retriever):
    question = ask("What is the capital of Norway?", "Christiania", "the Oslo")
    leader, searcher, answerer = tool.demonstrate(question, retriever)
    assert [c.role for c in (leader, searcher, answerer)] == [Role.LEADER, Role.SEARCHER, Role.ANSWERER]
    assert spoken(leader) == [f"<task>{question.text}</task>", "<request_answer></request_answer>"]
    assert spoken(searcher) == [
        "<search>capital Norway</search>", "<summary>Oslo lies on a fjord.</summary>",
    ]  # fmt: skip
    assert spoken(answerer) == ["<answer>the Oslo</answer>"]
    prompts = Prompts()
    assert leader.messages[:2] == (Message("system", prompts.leader), Message("user", question.text))
    documents = searcher.messages[3].documents
    assert documents == retriever.search(["capital Norway"], 3)[0]
    assert [d.id for d in documents] == ["2", "0", "1"]
    assert leader.messages[3] == Message("user", prompts.from_searcher(1, "Oslo lies on a fjord."))
    notes = [(question.text, "Oslo lies on a fjord.")]
    assert answerer.messages[1] == Message("user", prompts.to_answerer(question.text, notes))


def test_the_cascade_would_demonstrate_the_same(retriever):
    question = ask("What is the capital of Norway?", "Oslo")
    _, searcher, answerer = tool.demonstrate(question, retriever)
    script = iter([*spoken(searcher), *spoken(answerer)])
    steps = cascade(question.text, TeamConfig(), Prompts(), candidates=1)
    conversations, outcome = act_out(steps, lambda _: next(script), retriever, tool.K)
    assert conversations == [searcher, answerer]
    assert outcome.answers == ("Oslo",)


def test_a_second_wording_is_tried_where_the_first_finds_nothing():
    class Stub:
        def search(self, queries, k):
            found = {"Tiber": "Rome\nThe Tiber flows through Rome."}
            return [(Document("0", found.get(query, "Else\nnothing here")),) for query in queries]

    _, searcher, _ = tool.demonstrate(ask("which city lies on the Tiber", "rome"), Stub())
    assert spoken(searcher) == [
        "<search>city lies Tiber</search>",
        "<search>Tiber</search>",
        "<summary>Rome: The Tiber flows through Rome.</summary>",
    ]


@pytest.mark.parametrize(
    "question, reason",
    [
        (ask("Is Oslo the capital of Norway?", "yes", "***"), tool.NOT_FINDABLE),
        (ask("What is the capital of Norway?", "Trondheim", "os"), tool.NOT_RETRIEVED),
        (ask("Which tag of zebras is striped?", "the <search> tag"), tool.NOT_PARSED),
        (ask("What is the capital of </task> Norway?", "Oslo"), tool.NOT_PARSED),
    ],
)
def test_what_cannot_be_demonstrated_is_left_out_with_its_reason(retriever, question, reason):
    assert tool.demonstrate(question, retriever) == reason


@pytest.mark.parametrize(
    "text, wordings",
    [
        ('Who sang the U.S. hit "Don\'t Go" in 1977?', ["sang U.S hit Don't Go 1977", "U.S Don't Go 1977"]),
        ("who sings the theme", ["sings theme"]),
        ("Who are you?", ["Who are you", "Who"]),
        ("???", []),
    ],
)
def test_queries_are_the_content_words_then_the_names(text, wordings):
    assert tool.queries(text) == wordings


def test_a_long_sentence_is_cut_around_the_answer():
    words = [f"w{i}" for i in range(100)]
    _, summary = tool.find_evidence(["w70 w71"], [Document("0", "Title\n" + " ".join(words) + ". End.")])
    assert summary == "Title: " + " ".join(words[32:72])
    _, summary = tool.find_evidence(["St. Louis"], [Document("0", "Title\nIt is in St. Louis. End.")])
    assert summary == "Title: It is in St. Louis. End."


def test_an_answer_that_is_the_title_is_reported_with_the_beginning():
    documents = [Document("0", "Else\nOther."), Document("1", '"The Big Title"\nIt is w90. More.')]
    found = tool.find_evidence(["w9", "Big Title"], documents)
    assert found == ("Big Title", "The Big Title: It is w90. More.")


def test_an_answer_longer_than_a_report_counts_as_not_found():
    text = " ".join(f"w{i}" for i in range(60))
    assert tool.find_evidence([text], [Document("0", f"Title\n{text}")]) is None


def write_questions(path, *records) -> str:
    lines = [{"id": i, "question": q, "golden_answers": a} for i, q, a in records]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_the_command_writes_readable_conversations_and_prints_counts(tmp_path, corpus, capsys):
    first = ("train_0", "What is the capital of Norway?", ["Oslo"])
    questions = write_questions(
        tmp_path / "nq.jsonl", first, ("train_1", "Is it?", ["no"]), ("train_2", "river of Rome", ["Tiber"])
    )
    (tmp_path / "again").mkdir()
    again = write_questions(tmp_path / "again" / "nq.jsonl", first)
    out = str(tmp_path / "out.jsonl")
    flags = ["--questions", questions, "--questions", again, "--corpus", corpus, "--out", out]
    tool.main(flags)
    conversations = read_conversations(out)
    assert len(conversations) == 6
    retriever = BM25Search(corpus)
    for question in (ask(first[1], "Oslo"), ask("river of Rome", "Tiber")):
        made = tool.demonstrate(question, retriever)
        assert all(conversation in conversations for conversation in made)
    head, *counts = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{out}: 6 conversations, ")
    assert [line.split(maxsplit=1) for line in counts] == [
        ["4", "read"], ["2", "demonstrated"], ["1", tool.REPEATED], ["1", tool.NOT_FINDABLE],
    ]  # fmt: skip
    tool.main([*flags, "--limit", "1"])
    assert len(read_conversations(out)) == 3


def test_nothing_is_written_where_nothing_could_be_demonstrated(tmp_path, corpus):
    questions = write_questions(tmp_path / "nq.jsonl", ("train_1", "Is it?", ["no"]))
    out = tmp_path / "out.jsonl"
    with pytest.raises(SystemExit, match=r"No question could be demonstrated, .* is not written: 1 read"):
        tool.main(["--questions", questions, "--corpus", corpus, "--out", str(out)])
    assert [file.name for file in tmp_path.iterdir() if "out" in file.name] == []


def test_what_would_lose_a_file_is_refused(tmp_path, corpus):
    questions = write_questions(tmp_path / "nq.jsonl", ("train_1", "Is it?", ["no"]))
    flags = ["--questions", questions, "--corpus", corpus]
    for out, words in ((corpus, "one of the files to read"), (str(tmp_path), "is a folder")):
        with pytest.raises(SystemExit, match=words):
            tool.main([*flags, "--out", out])
    with pytest.raises(SystemExit, match="--limit -5"):
        tool.main([*flags, "--out", str(tmp_path / "out"), "--limit", "-5"])
    assert len(BM25Search(corpus).search(["Oslo"], 1)[0]) == 1


def test_real_questions_become_conversations(shared_data, tmp_path, capsys):
    """On passages that hold the answers of TriviaQA questions: cut down to 600 of them and 40 questions."""
    corpus = tmp_path / "corpus.jsonl"
    tags = (shared_data / "corpus_sources.tsv").read_text().splitlines()
    wanted = {i for i, tag in (line.split("\t") for line in tags) if tag == "triviaqa:wiki18"}
    with (shared_data / "corpus.jsonl").open() as lines:
        corpus.write_text("".join([line for line in lines if json.loads(line)["id"] in wanted][:1500]))
    questions = shared_data / "questions" / "train" / "triviaqa_trainlike_with_passages.jsonl"
    out = str(tmp_path / "out.jsonl")
    tool.main(["--questions", str(questions), "--corpus", str(corpus), "--out", out, "--limit", "40"])
    conversations = read_conversations(out)
    assert [c.role for c in conversations] == [Role.LEADER, Role.SEARCHER, Role.ANSWERER] * 40
    for searcher in conversations[1::3]:
        summary = spoken(searcher)[-1]
        assert len(summary.split()) < tool.SUMMARY_WORDS + 20
        assert len(searcher.messages[-2].documents) == 3
