"""Exact search on a mesh: the right passages in the right order, on any number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mopd_jax.retrieval.exact import BLOCK, GROUP, ExactSearch, best, make_mesh, padded


def vectors(count: int, width: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, width), np.float32).astype(jnp.bfloat16)


def expected(queries_BD, embeddings_ED, k):
    """Passages by descending score, equal ones in their own order; scores in float64."""
    scores_BE = queries_BD.astype(np.float64) @ embeddings_ED.astype(np.float64).T
    order = np.argsort(-scores_BE, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores_BE, order, 1), order


def mesh(devices: int):
    return make_mesh(jax.devices()[:devices])


@pytest.mark.parametrize(("devices", "count"), [(1, 20_000), (2, 20_000), (8, 20_000), (8, 70_000)])
def test_the_best_passages_are_found_in_their_order(devices, count):
    embeddings, queries = vectors(count), vectors(5, seed=1)
    found = ExactSearch(embeddings, mesh(devices)).top(queries, 7)
    scores, passages = expected(queries, embeddings, 7)
    np.testing.assert_allclose(found[0], scores, rtol=1e-5)
    np.testing.assert_array_equal(found[1], passages)


@pytest.mark.parametrize("devices", [1, 8])
def test_equal_scores_keep_the_order_of_the_passages(devices):
    embeddings = np.tile(vectors(3), (7000, 1))
    scores, passages = ExactSearch(embeddings, mesh(devices)).top(vectors(2, seed=1), 5)
    best_kind = passages[:, :1] % 3
    np.testing.assert_array_equal(passages, best_kind + 3 * np.arange(5))
    np.testing.assert_array_equal(scores, scores[:, :1].repeat(5, 1))


@pytest.mark.parametrize("devices", [1, 8])
def test_two_passages_and_k_three_give_two_none_repeated(devices):
    """Rows that only fill a block never win, not even over passages with negative scores."""
    embeddings = -np.abs(vectors(2))
    scores, passages = ExactSearch(embeddings, mesh(devices)).top(np.ones((3, 8), np.float32), 3)
    assert scores.shape == passages.shape == (3, 2)
    assert np.sort(passages).tolist() == [[0, 1]] * 3 and (scores < 0).all()


def test_two_levels_find_what_one_does():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 50, (4, 16 * GROUP)).astype(np.float32)  # many are equal
    for k in (1, 3, 16, 200):
        found, places = best(jnp.asarray(scores), k)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(places, order)
        np.testing.assert_array_equal(found, np.take_along_axis(scores, order, 1))


def test_every_device_holds_its_part_alone():
    search = ExactSearch(vectors(20_000), mesh(8))
    assert padded(20_000, 8) == 8 * BLOCK and padded(8 * BLOCK + 1, 8) == 16 * BLOCK
    assert {shard.data.shape for shard in search._embeddings_ED.addressable_shards} == {(BLOCK, 8)}


def test_an_index_larger_than_memory_is_refused_with_need_and_have():
    huge = np.broadcast_to(np.zeros((1, 768), jnp.bfloat16), (10**10, 768))
    with pytest.raises(
        ValueError, match=r"Each of 8 devices needs 19\d\d\.\d\d GB, \d+\.\d\d GB are free: search"
    ):
        ExactSearch(huge, mesh(8))


def test_faiss_finds_the_same():
    faiss = pytest.importorskip("faiss")
    embeddings, queries = vectors(30_000, 64), vectors(32, 64, seed=1)
    flat = faiss.IndexFlatIP(64)
    flat.add(embeddings.astype(np.float32))
    scores, passages = flat.search(queries.astype(np.float32), 3)
    found = ExactSearch(embeddings, mesh(2)).top(queries, 3)
    np.testing.assert_array_equal(found[1], passages)
    np.testing.assert_allclose(found[0], scores, rtol=1e-5)
