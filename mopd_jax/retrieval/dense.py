"""Dense search: a BERT encoder, and exact search over its embeddings on this process' own devices."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mopd_jax.retrieval.corpus import Corpus, batched, fingerprint, scan
from mopd_jax.retrieval.encoder import FILES, Encoder
from mopd_jax.retrieval.exact import ExactSearch, make_mesh
from mopd_jax.retrieval.index import building, seal, unseal
from mopd_jax.retrieval.search import Document

KIND = "dense"
STARTS, EMBEDDINGS, ENCODER = "starts.npy", "embeddings.bf16", "encoder"
CHUNK = 4096
"""Passages that are embedded between two writes; inside, those of like length share a batch."""


def build(
    corpus: str,
    folder: str,
    encoder: str,
    query_prefix: str = "",
    passage_prefix: str = "",
    tokens: int = 256,
    progress: bool = False,
) -> None:
    """Embeds a corpus file and makes the index in `folder`, in place of an earlier one.

    The encoder's files and both prefixes become a part of the index: queries cannot be embedded otherwise.

    Args:
      corpus: `{"id", "contents"}` JSONL file.
      folder: of the index.
      encoder: Hugging Face folder of a BERT encoder.
      query_prefix: stands before every query ("query: " for E5).
      passage_prefix: stands before every passage ("passage: " for E5).
      tokens: of a longer passage the end is left out.
      progress: show a bar.

    Raises:
      Refusal: corpus or encoder are refused (`corpus.scan`, `encoder.Encoder`), or `folder` holds
        something else.
    """
    embedder, starts = Encoder(Path(encoder), make_mesh(jax.local_devices()), tokens), []
    with building(folder) as partial:
        with (partial / EMBEDDINGS).open("wb") as file:
            for chunk in batched(scan(corpus, "Embedding" if progress else ""), CHUNK):
                starts += [start for start, _ in chunk]
                vectors = embedder.embed([passage_prefix + document.contents for _, document in chunk])
                file.write(vectors.astype(jnp.bfloat16).tobytes())
        np.save(partial / STARTS, np.array(starts, np.int64))
        (partial / ENCODER).mkdir()
        for name in FILES:
            shutil.copyfile(Path(encoder) / name, partial / ENCODER / name)
        made_by = {"encoder": fingerprint(Path(encoder) / "model.safetensors"), "tokens": tokens}
        made_by |= {"query_prefix": query_prefix, "passage_prefix": passage_prefix}
        seal(partial, KIND, corpus, passages=len(starts), width=embedder.width, made_by=made_by)


class DenseSearch:
    """A retriever over an index that `build` made; every query gets `min(k, passages)` documents."""

    identity: str
    """"dense:", the fingerprint of the corpus, and a hash of how it was embedded."""

    def __init__(self, corpus: str, folder: str):
        """Opens the index and lays its embeddings out over this process' devices.

        Raises as `index.unseal`, `encoder.Encoder` and `exact.ExactSearch`.
        """
        meta, mesh = unseal(folder, KIND, corpus), make_mesh(jax.local_devices())
        made_by = meta["made_by"]
        self._encoder = Encoder(Path(folder) / ENCODER, mesh, made_by["tokens"])
        self._prefix = made_by["query_prefix"]
        vectors_ED = np.memmap(Path(folder) / EMBEDDINGS, jnp.bfloat16, "r").reshape(-1, meta["width"])
        self._exact = ExactSearch(vectors_ED, mesh)
        self._corpus = Corpus(corpus, np.load(Path(folder) / STARTS, mmap_mode="r"))
        how = hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()
        self.identity = f"{KIND}:{meta['corpus']}:{how[:16]}"

    def search(self, queries: Sequence[str], k: int) -> list[tuple[Document, ...]]:
        """Returns one tuple per query, best first, with `min(k, passages)` documents, none repeated."""
        if not queries:
            return []
        vectors_BD = self._encoder.embed([self._prefix + query for query in queries])
        hits = zip(*(x.tolist() for x in self._exact.top(vectors_BD, k)), strict=True)
        return [
            tuple(self._corpus.document(n, score) for score, n in zip(scores, numbers, strict=True))
            for scores, numbers in hits
        ]
