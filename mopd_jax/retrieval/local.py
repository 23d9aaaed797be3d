"""Opens an index of either kind."""

from mopd_jax.retrieval import bm25, dense
from mopd_jax.retrieval.bm25 import BM25Search
from mopd_jax.retrieval.dense import DenseSearch
from mopd_jax.retrieval.index import kind_of

KINDS = {bm25.KIND: BM25Search, dense.KIND: DenseSearch}


def open_index(corpus: str, folder: str) -> BM25Search | DenseSearch:
    """Returns the retriever over an index that `tools/build_index` made of this corpus."""
    return KINDS[kind_of(folder)](corpus, folder)
