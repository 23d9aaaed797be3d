"""Question files, refused ones, the draws of training, and the choice for evaluation."""

import collections
import dataclasses
import json

import pytest

from mopd_jax.data.questions import Joined, QuestionSource, fingerprint, load_questions, open_sets, select
from mopd_jax.team.episode import Question


def write(path, *records) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), "utf-8")
    return str(path)


def make(dataset: str, count: int) -> list[Question]:
    return [Question(dataset, "test", f"test_{i}", f"{dataset} {i}?", (str(i),)) for i in range(count)]


def test_a_flashrag_file_is_read_with_its_dataset_split_and_answers(tmp_path):
    path = write(
        tmp_path / "trivia.jsonl",
        {"id": "train_4", "question": ' ""Who""? ', "golden_answers": [" A", "B|||C", "A"]},
        {"id": 7, "question": "q", "golden_answers": ["*"], "metadata": {"dataset": "nq"}},
        {"id": "2hop__1", "question": "q", "golden_answers": ["a|b"], "metadata": None},
    )
    assert load_questions(path) == [
        Question("trivia", "train", "train_4", '""Who""?', ("A", "B", "C")),
        Question("nq", "", "7", "q", ("*",)),
        Question("trivia", "", "2hop__1", "q", ("a|b",)),
    ]


GOOD = {"id": "dev_1", "question": "q", "golden_answers": ["a"]}


@pytest.mark.parametrize(
    "bad, reason",
    [
        ({"question": None}, '"question" is None'),
        ({"question": " "}, "\"question\" is ' '"),
        ({"golden_answers": []}, '"golden_answers" is \\[\\]'),
        ({"golden_answers": "a"}, "\"golden_answers\" is 'a', expected a non-empty list"),
        ({"golden_answers": [1]}, '"golden_answers" is \\[1\\]'),
        ({"golden_answers": ["a", " "]}, "holds an empty answer"),
        ({"golden_answers": ["a|||"]}, "holds an empty answer"),
        ({"id": ""}, "\"id\" is ''"),
        ({"id": "dev_1"}, r"\('bad', 'dev', 'dev_1'\) was already used in .*bad.jsonl, line 1"),
        ({"metadata": "nq"}, "\"metadata\" is 'nq', expected an object"),
        ({"metadata": {"dataset": 3}}, '"dataset" is 3'),
    ],
)
def test_a_bad_record_is_refused_with_file_line_and_reason(tmp_path, bad, reason):
    path = write(tmp_path / "bad.jsonl", GOOD, GOOD | {"id": "dev_2"} | bad)
    with pytest.raises(ValueError, match=f"bad.jsonl, line 2: .*{reason}"):
        load_questions(path)


def test_a_record_without_answers_and_an_empty_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r'line 1: field "golden_answers" is None.*fields are .*answer'):
        load_questions(write(tmp_path / "a.jsonl", {"id": "1", "question": "q", "answer": "a"}))
    with pytest.raises(ValueError, match=r"b\.jsonl: found no question"):
        load_questions(write(tmp_path / "b.jsonl"))


def test_the_same_id_in_two_datasets_is_fine_and_in_two_files_of_one_dataset_refused(tmp_path):
    named = {"metadata": {"dataset": "nq"}}
    nq = write(tmp_path / "nq.jsonl", GOOD)
    hotpotqa = write(tmp_path / "hotpotqa.jsonl", GOOD)
    assert [q.dataset for q in Joined(open_sets([nq, hotpotqa]))] == ["nq", "hotpotqa"]
    with pytest.raises(ValueError, match=r"again.jsonl: \('nq', 'dev', 'dev_1'\) is also in .*nq.jsonl"):
        open_sets([nq, write(tmp_path / "again.jsonl", GOOD | named)])


def test_every_epoch_draws_each_question_once_in_an_order_of_its_own():
    questions = make("nq", 5) + make("hotpotqa", 3)
    source = QuestionSource([questions[:5], questions[5:]], seed=3)
    draws = [draw for step in range(8) for draw in source.batch(step, 3)]
    epochs = [draws[8 * e : 8 * (e + 1)] for e in range(3)]
    for number, epoch in enumerate(epochs):
        assert {draw for _, draw in epoch} == {number}
        assert collections.Counter(q for q, _ in epoch) == collections.Counter(questions)
    orders = [[questions.index(q) for q, _ in epoch] for epoch in epochs]
    assert orders == [[6, 1, 5, 2, 7, 4, 3, 0], [7, 3, 5, 6, 4, 0, 2, 1], [2, 4, 1, 3, 6, 5, 0, 7]]


def test_a_batch_depends_on_seed_step_and_count_alone():
    questions = make("nq", 7)
    source = QuestionSource([questions], seed=0)
    late = source.batch(50, 4)
    source.batch(0, 4), source.batch(99, 4)
    assert source.batch(50, 4) == late == QuestionSource([questions], seed=0).batch(50, 4)
    orders = [[QuestionSource([questions], seed).batch(0, 7)] for seed in range(4)]
    assert all(orders.count(order) == 1 for order in orders)


def test_a_batch_larger_than_the_set_tells_the_draws_of_one_question_apart():
    batch = QuestionSource([make("nq", 2)], seed=1).batch(0, 6)
    assert len({(q.id, draw) for q, draw in batch}) == 6
    with pytest.raises(ValueError, match="no training questions"):
        QuestionSource([], seed=0)


def test_a_mixture_holds_exact_shares_and_shows_each_set_evenly():
    """Weights 3 : 1 over sets of 4 and 3 questions: every 4 draws hold 3 of the first and 1 of the other."""
    nq, hotpotqa = make("nq", 4), make("hotpotqa", 3)
    source = QuestionSource([nq, hotpotqa], seed=3, weights=(3, 1))
    draws = [draw for step in range(16) for draw in source.batch(step, 3)]
    rounds = [[q.dataset for q, _ in draws[i : i + 4]] for i in range(0, 48, 4)]
    assert all(sorted(datasets) == ["hotpotqa", "nq", "nq", "nq"] for datasets in rounds)
    assert len(set(map(tuple, rounds))) == 4, "the sets are mixed inside a round"
    for questions, epochs in ((nq, 9), (hotpotqa, 4)):
        expected = {(q, epoch): 1 for q in questions for epoch in range(epochs)}
        assert collections.Counter(draw for draw in draws if draw[0] in questions) == expected
    firsts = [[q.id for q, epoch in draws if q in nq and epoch == e] for e in range(9)]
    assert len(set(map(tuple, firsts))) > 1, "each epoch has its own order"


def test_a_batch_of_a_mixture_depends_on_seed_and_step_alone():
    sets = [make("nq", 7), make("hotpotqa", 5)]
    source = QuestionSource(sets, seed=0, weights=(2, 1))
    late = source.batch(50, 4)
    assert source.batch(0, 4) != late == QuestionSource(sets, seed=0, weights=(2, 1)).batch(50, 4)
    assert late != QuestionSource(sets, seed=1, weights=(2, 1)).batch(50, 4)


def test_the_fingerprint_follows_every_field_and_the_order():
    questions = make("nq", 3)
    changed = [
        [dataclasses.replace(questions[0], **{field: value}), *questions[1:]]
        for field, value in {
            "dataset": "x", "split": "x", "id": "x", "text": "x", "answers": ("0", "x"),
        }.items()
    ]  # fmt: skip
    prints = {fingerprint(qs) for qs in [questions, questions[::-1], questions[:2], *changed]}
    assert len(prints) == 8


def test_the_fixed_five_thousand_have_the_composition_of_the_protocol():
    """Sizes of the seven sets and of the 5,000, evaluation.md."""
    sizes = {
        "bamboogle": 125, "nq": 3610, "triviaqa": 11313, "popqa": 14267,
        "hotpotqa": 7405, "2wikimultihopqa": 12576, "musique": 2417,
    }  # fmt: skip
    chosen = select([q for name, size in sizes.items() for q in make(name, size)], 5000)
    assert collections.Counter(q.dataset for q in chosen) == {
        "bamboogle": 125, "nq": 813, "triviaqa": 813, "popqa": 813,
        "hotpotqa": 812, "2wikimultihopqa": 812, "musique": 812,
    }  # fmt: skip


def test_the_choice_ignores_the_order_of_the_file_and_keeps_it():
    questions = make("nq", 50) + make("popqa", 50)
    chosen = select(questions, 20)
    assert set(select(questions[::-1], 20)) == set(chosen)
    assert chosen == [q for q in questions if q in chosen]
    assert chosen[:10] != questions[:10]
    assert select(questions, 0) == select(questions, 1000) == questions


@pytest.mark.parametrize(
    "name, records, sample",
    [
        ("flashrag_quickstart_nq_test", 17, (2, ("Olivia", "MFSK"))),
        ("flashrag_popqa_test_1000", 1000, (0, ("Ralph Rainger", "Ralph Reichenthal"))),
        ("flashrag_triviaqa_test_1000", 1000, None),
    ],
)
def test_published_flashrag_files_are_read(shared_data, name, records, sample):
    questions = load_questions(str(shared_data / "raw" / f"{name}.jsonl"))
    assert len(questions) == records
    assert {(q.dataset, q.split) for q in questions} == {(name, "test")}
    if sample:
        index, answers = sample
        assert questions[index].answers == answers


@pytest.mark.parametrize(
    "name, reason",
    [
        ("agenticrag_bamboogle_test.jsonl", 'line 1: field "id" is missing'),
        ("agenticrag_bamboogle_test.parquet", "line 1: not JSON"),
        ("bamboogle_prerelease_sheet1.csv", "line 1: not JSON"),
        ("hotpot_test_v1_simplified.json", "line 1: found a JSON list"),
        ("hotpotqa_train_100_native.json", "line 1: not JSON"),
        ("migres_2wiki_200.json", 'line 1: field "id" is missing'),
        ("nq_efficientqa_dev_no_annotations.jsonl", 'line 1: field "id" is missing'),
        ("nq_efficientqa_test_1.1.jsonl", 'line 1: field "id" is missing'),
        ("nq_open_train_1000_prompt_target.jsonl", 'line 1: field "id" is missing'),
        ("r1searcher_bamboogle.jsonl", 'line 1: field "id" is missing'),
        ("r1searcher_musique_500.jsonl", 'line 1: field "id" is missing'),
        ("r1searcher_np_title_abs_100.tsv", "line 1: found a JSON int|line 1: not JSON"),
        ("search_r1_example_corpus.jsonl", 'line 1: field "question" is missing'),
        ("searchr1_bamboogle_transcripts_125.json", "line 1: not JSON"),
        ("t2rag_popqa.json", "line 1: not JSON"),
        ("triviaqa_sample.json", "line 1: not JSON"),
    ],
)
def test_files_of_other_formats_are_refused_with_a_reason(shared_data, name, reason):
    with pytest.raises(ValueError, match=reason):
        load_questions(str(shared_data / "raw" / name))


def test_the_real_sets_are_read(shared_data):
    folder = shared_data / "questions"
    names = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    questions = Joined(open_sets([str(folder / f"{name}.jsonl") for name in names]))
    assert collections.Counter(q.dataset for q in questions) == dict(
        zip(names, (500, 500, 498, 500, 500, 458, 100), strict=True)
    )
    assert {q.split for q in questions if q.dataset == "musique"} == {"dev", "train", ""}
    joined = load_questions(str(folder / "train" / "nq_train.jsonl"))
    assert next(q for q in joined if q.id == "train_13").answers == ('"Buzz" Brainard', "Cameron")
    assert not any("|||" in answer for q in joined for answer in q.answers)
