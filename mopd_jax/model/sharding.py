"""Where every array lies: one table from logical axes to mesh axes, and the shardings it implies.

The mesh has three axes: `data` (rows only), `fsdp` (rows, and the width of the weights) and `tensor`
(heads, MLP width and vocabulary). Arrays name their axes logically where they are made; `spec`
translates. A name that is not in the table and two axes of one array on one mesh axis are errors,
never a silently replicated array.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from mopd_jax.config import Attention
from mopd_jax.refusal import Refusal

MESH_AXES = ("data", "fsdp", "tensor")

RULES: dict[str, tuple[str, ...]] = {
    # weights
    "layers": (),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "norm": (),
    # activations: rows are split, the residual stream is whole on each device
    "batch": ("data", "fsdp"),
    "length": (),
    "width": (),
    # key/value cache: groups are its rows
    "groups": ("data", "fsdp"),
    "candidates": (),
    "slots": (),
}


def spec(axes: tuple[str, ...]) -> PartitionSpec:
    """Translates logical axis names to a `PartitionSpec`, one entry per name.

    Raises ValueError for a name that is not in `RULES`, and for two names on one mesh axis.
    """
    taken: dict[str, str] = {}
    entries = []
    for name in axes:
        if name not in RULES:
            raise ValueError(
                f"logical axis {name!r} of {axes} is not in the table: known are {sorted(RULES)}"
            )
        for mesh_axis in RULES[name]:
            if mesh_axis in taken:
                raise ValueError(
                    f"logical axes {taken[mesh_axis]!r} and {name!r} of {axes} both lie on mesh axis "
                    f"{mesh_axis!r}: rename one of them or change RULES"
                )
            taken[mesh_axis] = name
        entries.append(RULES[name] if len(RULES[name]) > 1 else next(iter(RULES[name]), None))
    return PartitionSpec(*entries)


def make_mesh(shape: tuple[int, int, int], devices: list[jax.Device] | None = None) -> Mesh:
    """Returns a mesh over (data, fsdp, tensor) with automatic axes.

    `devices` defaults to all devices of all processes. Raises Refusal if `shape` does not use
    each of them exactly once.
    """
    devices = jax.devices() if devices is None else devices
    if len(shape) != len(MESH_AXES) or math.prod(shape) != len(devices):
        raise Refusal(
            f"mesh {tuple(shape)} over {MESH_AXES} needs {math.prod(shape)} devices, found {len(devices)}: "
            "change mesh.shape so that its product is the number of devices"
        )
    grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def local_mesh(tensor: int, process: int | None = None) -> Mesh:
    """Returns the mesh of a process's own engine: its first `tensor` devices, of this process for None."""
    return make_mesh((1, 1, tensor), jax.local_devices(process_index=process)[:tensor])


def abstract_mesh(shape: tuple[int, int, int]) -> AbstractMesh:
    """Returns a mesh without devices: enough to say how arrays would be laid out."""
    return AbstractMesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


@contextlib.contextmanager
def on_mesh(mesh: Mesh) -> Iterator[None]:
    """Traces and runs for `mesh`: `constrain` and the axis names of the parameters take effect."""
    with jax.set_mesh(mesh), nn.logical_axis_rules([(name, axes or None) for name, axes in RULES.items()]):
        yield


def constrain(x: jax.Array, *axes: str) -> jax.Array:
    """Returns `x` laid out as `axes` say on the mesh of `on_mesh`; `x` itself outside of one.

    Linen's own constraint does nothing, without a word, where the rules are not set: hence this one.
    """
    layout = spec(axes)
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, layout)


def row_shards(mesh: Mesh) -> int:
    """Returns over how many devices of `mesh` rows are split; the number of rows is a multiple of it."""
    return math.prod(mesh.shape[axis] for axis in RULES["batch"])


def map_shards(f: Callable[..., Any], weights: Any, *rows_B: jax.Array) -> Any:
    """Returns `f(weights, *rows)`, run by every data shard on its own rows; as it is outside `on_mesh`.

    `weights` are whole along the width inside, and their gradient is summed over the shards once, at
    the end: inside a loop XLA would do that, or gather the rows, on every turn. The tensor axis stays
    XLA's.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return f(weights, *rows_B)
    axes, rows = RULES["batch"], spec(("batch",))

    def each(weights, *rows_B):
        # Every shard's own copy: of a shared one the gradient would be summed wherever `f` uses it.
        return f(jax.lax.pcast(weights, axes, to="varying"), *rows_B)

    in_specs = (PartitionSpec(), *[rows] * len(rows_B))
    mapped = jax.shard_map(each, in_specs=in_specs, out_specs=rows, axis_names=set(axes))
    return mapped(weights, *rows_B)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays whose first axis is rows, e.g. ids [B, T]; the rest is whole."""
    return NamedSharding(mesh, spec(("batch",)))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that is whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def place(tree: Any, sharding: NamedSharding) -> Any:
    """Lays host arrays out as `sharding` says. Every process has them whole, and hands its part over."""
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, x.__getitem__), tree)


def hand_over(tree: Any, shardings: Any) -> Any:
    """Returns arrays laid out as `shardings` say, a tree alike over a `local_mesh` of this process.

    Arrays of this process alone are copied there. Those that lie on devices of all processes are first
    brought, by the same programs everywhere, to a mesh on which every process holds a whole copy; of
    that each takes its own.
    """
    if all(x.is_fully_addressable for x in jax.tree.leaves(tree)):
        return jax.device_put(tree, shardings)
    wide = _copies(jax.tree.leaves(shardings)[0].mesh.size)
    # Not a jitted identity: a program wants its devices in one order, a pod's mesh has its own.
    copies = jax.device_put(tree, jax.tree.map(lambda s: NamedSharding(wide, s.spec), shardings))
    return jax.tree.map(_own_part, copies, shardings)


def _copies(tensor: int) -> Mesh:
    """Returns a mesh of all devices whose first axis counts copies of a `local_mesh`."""
    devices = []
    for process in range(jax.process_count()):
        devices += local_mesh(tensor, process).devices.flat
        devices += jax.local_devices(process_index=process)[tensor:]
    grid = np.array(devices).reshape(-1, 1, 1, tensor)
    return Mesh(grid, ("copies", *MESH_AXES), axis_types=(AxisType.Auto,) * grid.ndim)


def _own_part(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    parts = {shard.device: shard.data for shard in x.addressable_shards}
    own = [parts[device] for device in sharding.mesh.devices.flat]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, own)


def laid_out(shapes: Any, layout: Any) -> Any:
    """Returns a tree of shapes as `ShapeDtypeStruct`s that carry their sharding.

    `layout` is a tree of shardings like `shapes`, or one sharding for all of it.
    """
    if isinstance(layout, NamedSharding):
        layout = jax.tree.map(lambda _: layout, shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, layout)


def abstract_params(model: nn.Module) -> dict[str, Any]:
    """Returns the parameter tree as `ShapeDtypeStruct`s (float32), without allocating anything."""
    return jax.eval_shape(lambda: nn.unbox(_boxed_params(model, jax.random.key(0))))


def param_shardings(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    """Returns the `NamedSharding` of each parameter, from the axis names declared beside it.

    Raises Refusal for a parameter axis that its mesh axis does not divide.
    """
    axes = nn.get_partition_spec(jax.eval_shape(lambda: _boxed_params(model, jax.random.key(0))))
    shardings = jax.tree.map(lambda names: NamedSharding(mesh, spec(tuple(names))), axes, is_leaf=_is_spec)
    jax.tree_util.tree_map_with_path(_check_divides, abstract_params(model), axes, shardings)
    return shardings


def init_params(
    model: nn.Module, key: jax.Array, mesh: Mesh, dtype: jnp.dtype = jnp.float32
) -> dict[str, Any]:
    """Returns random parameters, made by each device for its own shards only."""
    shardings = param_shardings(model, mesh)

    def init(key):
        return jax.tree.map(lambda x: x.astype(dtype), nn.unbox(_boxed_params(model, key)))

    with on_mesh(mesh):
        return jax.jit(init, out_shardings=shardings)(key)


def _boxed_params(model: nn.Module, key: jax.Array) -> dict[str, Any]:
    # One token per data shard: the fewest rows that the constraints inside the model accept, and fewer than
    # splash attention does; parameters are the same for either.
    mesh = jax.sharding.get_abstract_mesh()
    token = jnp.zeros((1 if mesh.empty else row_shards(mesh), 1), jnp.int32)
    model = model.clone(config=dataclasses.replace(model.config, attention=Attention.XLA))
    return model.init(key, token, token, token, method="logits")["params"]


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _check_divides(path, array: jax.ShapeDtypeStruct, axes: PartitionSpec, sharding: NamedSharding) -> None:
    for size, name, entry in zip(array.shape, axes, sharding.spec, strict=True):
        mesh_axes = (entry,) if isinstance(entry, str) else entry or ()
        parts = math.prod(sharding.mesh.shape[axis] for axis in mesh_axes)
        if size % parts:
            raise Refusal(
                f"{jax.tree_util.keystr(path)}: axis {name!r} of size {size} cannot be split over "
                f"{'×'.join(mesh_axes)} = {parts}: choose a mesh whose {'×'.join(mesh_axes)} divides {size}"
            )
