"""Exact match in the stated order of rules, its exceptions, and the softer measures."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_jax.data.answers import contains, exact_match, normalise, token_f1


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        ("U.S.", "us"),
        ("3.5", "35"),
        ("1990-1995", "19901995"),
        ("1990–1995", "1990–1995"),
        ("Café  Zürich", "café zürich"),
        ("The  Beatles' \n Anthology", "beatles anthology"),
        ("an apple a day", "apple day"),
        ("Theatre and anthem", "theatre and anthem"),
        ("A-ha", "aha"),
        ("a–ha", "–ha"),
        ("The The", ""),
        ("*", ""),
    ],
)
def test_normalise(text, normalised):
    assert normalise(text) == normalised


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("the Eiffel Tower!", ("Eiffel Tower",), 1.0),
        ("Paris", ("London", "paris."), 1.0),
        ("Paris, France", ("Paris",), 0.0),
        ("US", ("U.S.",), 1.0),
        ("", ("A",), 0.0),
        ("A", ("A",), 1.0),
        (" a ", ("A",), 1.0),
        ("the", ("A",), 0.0),
        ("The The", ("the the",), 1.0),
        ("*", ("*",), 1.0),
        ("*", ("+", "The"), 0.0),
        ("A", ("A.",), 0.0),
        ("x", ("A",), 0.0),
        ("", (), 0.0),
        ("cafe", ("café",), 0.0),
    ],
)
def test_exact_match(prediction, golds, expected):
    assert exact_match(prediction, golds) == expected


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("Barack Hussein Obama", ("Barack Obama", "Obama"), 0.8),
        ("new new york", ("New York City",), 2 / 3),
        ("London", ("Paris",), 0.0),
        ("the Paris", ("Paris",), 1.0),
        ("", ("Paris",), 0.0),
        ("A", ("A",), 1.0),
        ("Paris", ("The The",), 0.0),
        ("Paris", (), 0.0),
    ],
)
def test_token_f1(prediction, golds, expected):
    assert token_f1(prediction, golds) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("It is Paris, France.", ("Paris",), 1.0),
        ("It is in the U.S.", ("Canada", "US"), 1.0),
        ("Paris", ("Paris, France",), 0.0),
        ("Paris", ("The The",), 0.0),
        ("The The", ("The The",), 1.0),
        ("", ("Paris",), 0.0),
    ],
)
def test_contains(prediction, golds, expected):
    assert contains(prediction, golds) == expected


@given(st.text(max_size=20), st.lists(st.text(max_size=20), min_size=1, max_size=3))
def test_an_exact_match_is_a_full_match_everywhere(prediction, golds):
    golds = [*golds, prediction]
    assert exact_match(prediction, golds) == token_f1(prediction, golds) == contains(prediction, golds) == 1.0


@given(st.text(max_size=20), st.lists(st.text(max_size=20), max_size=3))
def test_measures_are_ordered(prediction, golds):
    exact = exact_match(prediction, golds)
    assert exact <= token_f1(prediction, golds) <= 1.0
    assert exact <= contains(prediction, golds) <= 1.0


def test_every_real_gold_answer_matches_itself(shared_data):
    golds = []
    for path in sorted((shared_data / "questions").glob("*.jsonl")):
        golds += [a for line in path.open(encoding="utf-8") for a in json.loads(line)["golden_answers"]]
    assert len(golds) > 3000
    assert [gold for gold in golds if exact_match(gold, [gold]) != 1.0] == []
    assert exact_match("", golds) == 0.0
