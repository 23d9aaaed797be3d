"""Exact inner-product search over embeddings that are spread over the devices of a mesh.

Shape letters: B queries, E embedded passages, D their width, k results.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mopd_jax.retrieval.encoder import power_of_two
from mopd_jax.retrieval.index import available_bytes, require_memory

BLOCK = 8192
"""Passages that are scored at a time: their scores stay in the processor's cache."""
GROUP = 128
"""Scores of which only the best is looked at first: the width of a TPU's vectors."""
AXIS = "shards"


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """Returns the mesh of one axis that embeddings are split over."""
    return Mesh(np.array(devices), (AXIS,))


def padded(passages: int, shards: int) -> int:
    """Returns the number of rows that `passages` take: each shard holds as many whole blocks."""
    return -(-passages // (shards * BLOCK)) * shards * BLOCK


def best(scores_BE: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the `k` highest scores of each row and where they are; of equal ones the first.

    In two levels: the best `k` groups by their maxima, then the best `k` inside of them. A passage that is
    in none of these groups has `k` before it.
    """
    groups = scores_BE.reshape(len(scores_BE), -1, GROUP)
    _, chosen = jax.lax.top_k(groups.max(-1), min(k, groups.shape[1]))
    chosen = jnp.sort(chosen, -1)
    inside = jnp.take_along_axis(groups, chosen[..., None], 1).reshape(len(scores_BE), -1)
    scores, places = jax.lax.top_k(inside, k)
    return scores, jnp.take_along_axis(chosen, places // GROUP, 1) * GROUP + places % GROUP


def _shard_best(queries_BD: jax.Array, shard_ED: jax.Array, passages: int, k: int):
    """Searches the rows of one device, block by block, then merges what all devices found."""
    blocks = shard_ED.reshape(-1, BLOCK, shard_ED.shape[1])
    first = jax.lax.axis_index(AXIS) * len(shard_ED) + BLOCK * jnp.arange(len(blocks), dtype=jnp.int32)

    def step(found, block):
        block_ED, start = block
        scores_EB = jnp.einsum("ed,bd->eb", block_ED, queries_BD, preferred_element_type=jnp.float32)
        exists = start + jnp.arange(BLOCK) < passages
        scores, places = best(jnp.where(exists, scores_EB.T, -jnp.inf), k)
        return _merge(found, (scores, places + start), k=k), None

    nothing = (jnp.full((len(queries_BD), k), -jnp.inf), jnp.zeros((len(queries_BD), k), jnp.int32))
    found, _ = jax.lax.scan(step, nothing, (blocks, first))
    return _merge([jax.lax.all_gather(x, AXIS, axis=1, tiled=True) for x in found], k=k)


def _merge(*found: Sequence[jax.Array], k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the best `k` of (scores, passages) [B, any] taken together; of equal scores the earlier."""
    scores, passages = (jnp.concatenate(parts, 1) for parts in zip(*found, strict=True))
    scores, places = jax.lax.top_k(scores, k)
    return scores, jnp.take_along_axis(passages, places, 1)


def make_search(mesh: Mesh, passages: int, k: int):
    """Returns the jitted program: queries [B, D], embeddings [E, D] → scores [B, k], passages [B, k].

    E is `padded(passages, mesh.size)`; embeddings are split over the mesh, the rest is whole everywhere.
    """
    mapped = jax.shard_map(
        functools.partial(_shard_best, passages=passages, k=k),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(AXIS)),
        out_specs=PartitionSpec(),
        check_vma=False,  # what top_k makes of gathered scores is the same everywhere, which JAX cannot see
    )
    return jax.jit(mapped)


def lower_search(mesh: Mesh, passages: int, width: int, queries: int, k: int) -> jax.stages.Lowered:
    """Returns the program for bfloat16 embeddings, ready to be compiled for the mesh's devices."""
    sizes = {PartitionSpec(): queries, PartitionSpec(AXIS): padded(passages, mesh.size)}
    arguments = [
        jax.ShapeDtypeStruct((rows, width), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for spec, rows in sizes.items()
    ]
    return make_search(mesh, passages, k).lower(*arguments)


class ExactSearch:
    """Embeddings on the devices of this process, and the program that searches them."""

    def __init__(self, embeddings_ED: np.ndarray, mesh: Mesh):
        """Lays the bfloat16 embeddings (they may be mapped from disk) out over the mesh.

        Raises:
          Refusal: a device has no room for its part.
        """
        self._passages, width = embeddings_ED.shape
        rows = padded(self._passages, mesh.size)
        require_memory(
            f"Each of {mesh.size} devices",
            rows // mesh.size * width * 2,
            _free_bytes(mesh),
            "search on more devices, or on a machine of their own with tools/serve_retriever",
        )
        layout = NamedSharding(mesh, PartitionSpec(AXIS))
        part = functools.partial(_rows, embeddings_ED, rows)
        self._embeddings_ED = jax.make_array_from_callback((rows, width), layout, part)
        self._program = functools.cache(functools.partial(make_search, mesh, self._passages))

    def top(self, queries_BD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns scores, float32, and passages [B, min(k, passages)], best first; of equal scores the first.

        Queries are rounded to bfloat16 like the embeddings; products are summed in float32.
        """
        rows = max(8, power_of_two(len(queries_BD)))
        padded_BD = np.zeros((rows, queries_BD.shape[1]), jnp.bfloat16)
        padded_BD[: len(queries_BD)] = queries_BD
        found = self._program(min(k, self._passages))(padded_BD, self._embeddings_ED)
        scores, passages = (np.asarray(x)[: len(queries_BD)] for x in found)
        return scores, passages


def _rows(embeddings_ED: np.ndarray, total: int, index: tuple[slice, ...]) -> np.ndarray:
    """Returns one device's rows, with zeros where there are no more passages."""
    start, stop, _ = index[0].indices(total)
    part_ED = np.zeros((stop - start, embeddings_ED.shape[1]), embeddings_ED.dtype)
    held = embeddings_ED[start:stop]
    part_ED[: len(held)] = held
    return part_ED


def _free_bytes(mesh: Mesh) -> float:
    """Returns how much memory is free on each device; the devices of a CPU share that of the machine."""
    devices = list(mesh.devices.flat)
    stats = [device.memory_stats() for device in devices]
    if any(s is None or "bytes_limit" not in s for s in stats):
        return available_bytes() / len(devices)
    return min(s["bytes_limit"] - s["bytes_in_use"] for s in stats)
