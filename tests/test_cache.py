"""The memory of search results: what is asked again, what is counted, what is forgotten."""

import pytest

from mopd_jax.retrieval.cache import CachedSearch
from mopd_jax.retrieval.search import Document, SearchError


class Counting:
    """Finds a document named after query and k, and keeps what it was asked; fails for "bad"."""

    identity = "counting"

    def __init__(self):
        self.asked = []

    def search(self, queries, k):
        self.asked.append((list(queries), k))
        if "bad" in queries:
            raise SearchError("bad")
        return [(Document(f"{query}/{k}", "text"),) for query in queries]


@pytest.fixture
def backend():
    return Counting()


def ids(found):
    return [document.id for (document,) in found]


def test_every_query_is_asked_once_and_answered_in_its_place(backend):
    cached = CachedSearch(backend, 10)
    assert ids(cached.search(["a", "b", "a"], 3)) == ["a/3", "b/3", "a/3"]
    assert ids(cached.search(["c", "b"], 3)) == ["c/3", "b/3"]
    assert ids(cached.search(["b"], 2)) == ["b/2"]
    assert ids(cached.search(["a", "c"], 3)) == ["a/3", "c/3"]
    assert backend.asked == [(["a", "b"], 3), (["c"], 3), (["b"], 2)]
    assert cached.identity == "counting"


def test_counts_are_those_since_the_last_look(backend):
    cached = CachedSearch(backend, 10)
    cached.search(["a", "b", "a"], 3)
    assert cached.take_counts() == (3, 1)
    cached.search(["a", "c"], 3)
    assert cached.take_counts() == (2, 1)
    assert cached.take_counts() == (0, 0)


def test_the_least_recently_used_goes_first(backend):
    cached = CachedSearch(backend, 2)
    for query in ("a", "b", "a", "c", "a", "b"):
        cached.search([query], 1)
    assert [queries for queries, _ in backend.asked] == [["a"], ["b"], ["c"], ["b"]]


@pytest.mark.parametrize("size", [0, 1])
def test_a_batch_larger_than_the_memory_is_answered_whole(backend, size):
    cached = CachedSearch(backend, size)
    assert ids(cached.search(["a", "b", "a"], 3)) == ["a/3", "b/3", "a/3"]
    assert ids(cached.search(["b"], 3)) == ["b/3"]
    assert len(backend.asked) == 2 - size


def test_a_failed_search_is_not_remembered(backend):
    cached = CachedSearch(backend, 10)
    for _ in range(2):
        with pytest.raises(SearchError):
            cached.search(["a", "bad"], 3)
    assert ids(cached.search(["a"], 3)) == ["a/3"]
    assert [queries for queries, _ in backend.asked] == [["a", "bad"], ["a", "bad"], ["a"]]
