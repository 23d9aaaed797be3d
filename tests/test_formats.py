"""Published question files of every format: read right, or refused with file, line and reason (kind 27)."""

import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from mopd_jax.data.formats import read_set
from mopd_jax.refusal import Refusal
from mopd_jax.team.episode import Question

CITIBANK = "Who was president of the United States in the year that Citibank was founded?"
NO_ANSWER, PASSAGE = "found no gold answer; the record's fields are", "It is a passage, for retrieval.corpus."


def question(id_: str, text: str, *answers: str) -> Question:
    return Question("any", "test", id_, text, answers)


WHOLE = {
    "agenticrag_bamboogle_test.jsonl": (125, {0: question("test_0", CITIBANK, "james madison")}),
    "agenticrag_bamboogle_test.parquet": (125, {0: question("test_0", CITIBANK, "james madison")}),
    "flashrag_popqa_test_1000.jsonl": (
        1000,
        {
            0: question(
                "test_10207", "Who was the composer of Easy Living?", "Ralph Rainger", "Ralph Reichenthal"
            )
        },
    ),
    "flashrag_quickstart_nq_test.jsonl": (
        17,
        {2: question("test_2", "which mode is used for short wave broadcast service", "Olivia", "MFSK")},
    ),
    "flashrag_triviaqa_test_1000.jsonl": (1000, {}),
    "hotpotqa_train_100_native.json": (
        100,
        {0: question("5a77ec115542992a6e59dff7", "If Gallu is a demon Lilu is what?", "a spirit")},
    ),
    "migres_2wiki_200.json": (
        200,
        {
            0: question(
                "b088d3ca08e211ebbda4ac1f6bf848b6",
                "Which film whose director is younger, Forbidden Ground or Free Guy?",
                "Free Guy",
            )
        },
    ),
    "nq_efficientqa_test_1.1.jsonl": (
        1769,
        {
            0: question(
                "test_0",
                "on the 6th day of christmas my true love sent to me",
                "6 geese a-laying",
                "maids a-milking",
            ),
            1: question("test_1", "how many 5 star generals are there in the us", "Nine"),
        },
    ),
    "nq_open_train_1000_prompt_target.jsonl": (
        1000,
        {0: question("nq-train-9", "in which year vivo launch its first phone in india", "2014")},
    ),
    "r1searcher_bamboogle.jsonl": (125, {0: question("1", CITIBANK, "james madison")}),
    "r1searcher_musique_500.jsonl": (
        500,
        {
            0: question(
                "1",
                "What was the director of Addicted to Love nominated for?",
                "Academy Award for Best Live Action Short Film",
            )
        },
    ),
    "searchr1_bamboogle_transcripts_125.json": (125, {0: question("test_0", CITIBANK, "james madison")}),
    "t2rag_popqa.json": (
        1000,
        {
            1: question(
                "popqa_1",
                "In what city was John Keating born?",
                "Hobart",
                "Hobart Town",
                "Hobarton",
                "Hobart, Tasmania",
                "Hobart, Tas.",
            )
        },
    ),
    "triviaqa_sample.json": (
        1,
        {
            0: question(
                "tc_33",
                "Which Lloyd Webber musical premiered in the US on 10th December 1993?",
                "Sunset Boulevard",
                "Sunset Blvd",
                "West Sunset Boulevard",
                "Sunset Bulevard",
                "Sunset Blvd.",
            )
        },
    ),
}
"""File → questions, all of its records, and some of them."""
REFUSED = {
    "hotpot_test_v1_simplified.json": (7405, f"line 1, record 1: {NO_ANSWER} ['question']."),
    "nq_efficientqa_dev_no_annotations.jsonl": (1800, f"line 1: {NO_ANSWER} ['question']."),
    "search_r1_example_corpus.jsonl": (10, PASSAGE),
}
"""File → records, none of them a question with an answer, and what is said of the first."""
IN_PART, NOT_AT_ALL = "bamboogle_prerelease_sheet1.csv", "r1searcher_np_title_abs_100.tsv"


def read(shared_data, name: str):
    return read_set([str(shared_data / "raw" / name)], "any", "test")


def test_every_published_file_is_in_one_of_the_tests_below(shared_data):
    assert {path.name for path in (shared_data / "raw").iterdir()} == {*WHOLE, *REFUSED, IN_PART, NOT_AT_ALL}


@pytest.mark.parametrize("name", WHOLE)
def test_a_published_file_is_read_whole(shared_data, name):
    count, samples = WHOLE[name]
    reading = read(shared_data, name)
    assert (len(reading.questions), reading.refused) == (count, [])
    assert {index: reading.questions[index] for index in samples} == samples


@pytest.mark.parametrize("name", REFUSED)
def test_records_that_are_no_questions_with_answers_are_refused_one_by_one(shared_data, name):
    count, reason = REFUSED[name]
    reading = read(shared_data, name)
    assert (len(reading.questions), len(reading.refused)) == (0, count)
    assert name in reading.refused[0] and reason in reading.refused[0]


def test_a_sheet_with_damaged_characters_loses_those_two_questions(shared_data):
    """Two questions hold "?" and a stray byte where quotation marks were."""
    reading = read(shared_data, IN_PART)
    assert len(reading.questions) == 123
    assert reading.questions[0] == question("test_0", CITIBANK, "james madison")
    mother = "Who is the mother of the father of George Washington?"
    assert [q.answers for q in reading.questions if q.text == mother] == [("Mildred Warner", "Mildred Gale")]
    assert all(f"{IN_PART}, line" in r and "the text is damaged" in r for r in reading.refused)
    assert len(reading.refused) == 2


def test_a_table_of_passages_is_refused_as_a_whole(shared_data):
    with pytest.raises(Refusal, match=rf"{NOT_AT_ALL}, line 1: found the columns .*passages"):
        read(shared_data, NOT_AT_ALL)


def test_the_two_forms_of_one_file_give_the_same_questions(shared_data):
    parquet, lines = (read(shared_data, f"agenticrag_bamboogle_test.{end}") for end in ("parquet", "jsonl"))
    assert parquet.questions == lines.questions


def test_joined_answers_are_taken_apart(shared_data):
    reading = read(shared_data, "nq_open_train_1000_prompt_target.jsonl")
    assert ("Godavari", "Krishna") in {q.answers for q in reading.questions}
    assert not any("|||" in answer for q in reading.questions for answer in q.answers)


def test_doubled_quotes_stay_as_published(shared_data):
    texts = {q.text for q in read(shared_data, "flashrag_triviaqa_test_1000.jsonl").questions}
    assert '"What philosopher said ""God is dead""?"' in texts


@pytest.mark.parametrize(
    "record, answers",
    [
        ({"question": "q", "answer": "a|b", "type": "bridge"}, ("a|b",)),
        ({"question": "q", "answer": "half a pair: \ud800"}, ("half a pair: ?",)),
        ({"question": "q", "answer": "a", "answer_aliases": ["b", "c"]}, ("a", "b", "c")),
        (
            {"Question": "q", "QuestionId": "1", "Answer": {"Value": "a", "HumanAnswers": ["b"]}},
            ("a", "b"),
        ),
    ],
)
def test_which_answers_count(tmp_path, record, answers):
    path = tmp_path / "q.json"
    path.write_text(json.dumps(record))
    assert [q.answers for q in read_set([str(path)], "any", "test").questions] == [answers]


@pytest.mark.parametrize(
    "line, reason",
    [
        ('{"id": 1', r"line 2: not JSON"),
        ("[1]", "line 2: found a JSON list"),
        ('{"question": "q", "answer": []}', "line 2: found no gold answer"),
        ('{"question": "q", "answer": null}', "line 2: found no gold answer"),
        ('{"question": "q", "answer": [3]}', 'line 2: field "golden_answers" is \\[3\\]'),
        ('{"question": null, "answer": "a"}', 'line 2: field "question" is None'),
        ('{"query": "q", "answer": "a"}', r"line 2: found the fields \['answer', 'query'\], expected golden"),
        ('{"question": "again", "answer": "a", "id": "test_0"}', r"'test_0'\) was already used in .*line 1"),
        ('{"extra_info": 1, "reward_model": {"ground_truth": "a"}}', 'line 2: field "question" is None'),
        ('{"QuestionId": "1", "Question": "q"}', "line 2: found no gold answer"),
    ],
)
def test_a_bad_record_is_refused_and_the_others_are_read(tmp_path, line, reason):
    path = tmp_path / "q.jsonl"
    path.write_text(f'{{"question": "q", "answer": "a"}}\n{line}\n\n{{"question": "r", "answer": "b"}}\n')
    reading = read_set([str(path)], "any", "test")
    assert [q.id for q in reading.questions] == ["test_0", "test_2"]
    (refused,) = reading.refused
    assert re.search(reason, refused)


def test_the_line_of_a_record_in_a_list_is_counted(tmp_path):
    path = tmp_path / "q.json"
    path.write_bytes(
        b'\xef\xbb\xbf[\r\n {"question": "q",\r\n  "answer": "a"},\r\n {"question": "r"}, {"question": "s"}]'
    )
    reading = read_set([str(path)], "any", "dev")
    assert [(q.id, q.split) for q in reading.questions] == [("dev_0", "dev")]
    assert [r.split(":")[0] for r in reading.refused] == [f"{path}, line 4, record {n}" for n in (2, 3)]


def test_a_list_that_is_cut_off_is_refused_as_a_whole(tmp_path):
    path = tmp_path / "q.json"
    for text, place in (('[{"question": "q", "ans', "record 1"), ('[{"question": "q"}', "record 2")):
        path.write_text(text)
        with pytest.raises(Refusal, match=rf"q.json, line 1, {place}: not JSON .*cut off"):
            read_set([str(path)], "any", "dev")


LIST = '[\n {"question": "q", "answer": "a"}]'
TRIVIA = '{"Data": [{"QuestionId": "1", "Question": "q", "Answer": {"Value": "a"}}]'


@pytest.mark.parametrize(
    "text, reason",
    [
        (LIST + "\n" + LIST, r"line 3: found '\[\\n \{.* behind the list, expected its end\. Give each list"),
        (LIST + " garbage\n", r"line 2: found 'garbage' behind the list"),
        (TRIVIA + ', "Domain": "Web"}\n{"Data": []}', r"line 2: found '\{\"Data\": \[\]\}' behind the list"),
    ],
)
def test_a_list_that_is_not_alone_in_its_file_is_refused(tmp_path, text, reason):
    path = tmp_path / "q.json"
    path.write_text(text)
    with pytest.raises(Refusal, match=rf"q\.json, {reason}"):
        read_set([str(path)], "any", "dev")


@pytest.mark.parametrize(
    "text, reason",
    [
        (TRIVIA, r"behind the list: not JSON .*cut off"),
        (TRIVIA + ', "Domain": "We', r"behind the list: not JSON .*cut off"),
        ("[" * 200_000, r"line 1, record 1: not JSON \(.*recursion"),
        ("[" + "9" * 5000 + "]", r"line 1, record 1: not JSON \(.*digits"),
    ],
)
def test_a_list_that_is_no_json_to_its_end_is_refused(tmp_path, text, reason):
    path = tmp_path / "q.json"
    path.write_text(text)
    with pytest.raises(Refusal, match=rf"q\.json, {reason}"):
        read_set([str(path)], "any", "dev")


@pytest.mark.parametrize("text", [LIST + "\r\n \n", TRIVIA + ',\n "Domain": "Web", "Version": 1.0}\n'])
def test_what_belongs_behind_a_list_is_read_over(tmp_path, text):
    path = tmp_path / "q.json"
    path.write_text(text)
    reading = read_set([str(path)], "any", "dev")
    assert [(q.text, q.answers) for q in reading.questions] == [("q", ("a",))] and reading.refused == []


def test_a_field_of_a_table_may_be_as_long_as_a_document(tmp_path):
    path, question = tmp_path / "q.csv", "q" * 200_000
    path.write_text(f"Question,Answer\n{question},a\n")
    assert [q.text for q in read_set([str(path)], "any", "dev").questions] == [question]
    path.write_text(f"Question,Answer\nq,a\n{'q' * 2**24}q,a\n")
    with pytest.raises(Refusal, match=r"q\.csv, line 3: no row of a table \(field larger than field limit"):
        read_set([str(path)], "any", "dev")


def test_a_parquet_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "q.parquet").write_text("{}")
    with pytest.raises(Refusal, match=r"q.parquet: no parquet file, .* \(.*Parquet"):
        read_set([str(tmp_path / "q.parquet")], "any", "dev")


@pytest.mark.parametrize("compression", ["snappy", "none"])
def test_a_parquet_file_with_a_damaged_page_is_refused(tmp_path, compression):
    """With its footer whole, the damage shows only as the page is read."""
    path = tmp_path / "q.parquet"
    columns = {"question": [f"q{i}" for i in range(1000)], "answer": ["a"] * 1000}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression=compression)
    data = bytearray(path.read_bytes())
    data[100:300] = b"\xff" * 200
    path.write_bytes(data)
    with pytest.raises(Refusal, match=r"q\.parquet: no parquet file, or a damaged one \(.*\)\. Copy"):
        read_set([str(path)], "any", "dev")


def test_files_of_one_set_are_joined_and_an_id_counts_once(tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text('{"id": "1", "question": "q", "golden_answers": ["a"], "metadata": {"dataset": "x"}}\n')
    two.write_text(one.read_text() + '{"id": "2", "question": "q", "golden_answers": ["a"]}\n')
    reading = read_set([str(one), str(two)], "any", "test")
    assert reading.questions == [question("1", "q", "a"), question("2", "q", "a")]
    assert reading.refused == [f"{two}, line 1: ('any', 'test', '1') was already used in {one}, line 1."]
