"""Abstract arguments of a function, placed on a target's devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from hilore_jax.planning.target import Target


def place(args: tuple[Any, ...], target: Target) -> tuple[tuple[Any, ...], Mesh | None]:
    """Shapes and shardings to lower a function with, so that it compiles for a target.

    A `NamedSharding` over an `AbstractMesh` is carried over to a mesh of the target's devices; one
    over a mesh of them is kept. A leaf without a sharding, or on a single device, wherever that
    is, is copied to every device: of the first such mesh, or as `target.sharding()` says.

    Args:
        args: pytrees of arrays, scalars and `ShapeDtypeStruct`s.
        target: what is compiled for.

    Returns:
        The same pytrees of `ShapeDtypeStruct`s, and the mesh that stands for an abstract one
        (the first, in the order of the leaves), or None.

    Raises:
        ValueError: no array at all, or a sharding that cannot be the target's.
        TypeError: a leaf that is neither an array nor a shape.
    """
    # One concrete mesh for each abstract one.
    meshes: dict[AbstractMesh, Mesh] = {}
    leaves, tree = jax.tree_util.tree_flatten_with_path(args)
    if not leaves:
        raise ValueError(
            f"nothing to place on target {target.name!r}: the function takes no array, and a "
            "program without arguments compiles for this process's default device."
        )
    shapes = [(name, abstract(name, leaf)) for name, leaf in _named(leaves)]
    placed = [_on_a_mesh(name, shape, target, meshes) for name, shape in shapes]
    # One program has one mesh: what is not sharded is replicated over the others' own.
    own = next((s.sharding.mesh for s in placed if isinstance(s.sharding, NamedSharding)), None)
    default = target.sharding() if own is None else NamedSharding(own, PartitionSpec())
    names = [name for name, _ in shapes]
    placed = [_elsewhere(*pair, default, target) for pair in zip(names, placed, strict=True)]
    return jax.tree.unflatten(tree, placed), next(iter(meshes.values()), None)


def describe_arguments(args: tuple[Any, ...]) -> list[str]:
    """Structure, shapes, dtypes and shardings as text that is equal in every process.

    Args:
        args: as for `place`; the target's devices are not looked at.

    Returns:
        The structure, then a line a leaf.

    Example:
        >>> import jax.numpy as jnp
        >>> describe_arguments((jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), 1))
        ['PyTreeDef((*, *))', 'bfloat16[2,3]', 'int32[] weak']
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(args)
    lines = [str(tree)]
    for path, leaf in leaves:
        shape = abstract(jax.tree_util.keystr(path), leaf)
        text = f"{shape.dtype}[{','.join(map(str, shape.shape))}]"
        text += " weak" if shape.weak_type else ""
        lines.append(text + _describe_sharding(shape.sharding))
    return lines


def abstract(where: str, leaf: Any) -> jax.ShapeDtypeStruct:
    """A leaf's shape, dtype and sharding; `where` names it in the error."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        aval = jax.typeof(leaf)
        weak = bool(getattr(aval, "weak_type", False))
        return jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, sharding=getattr(leaf, "sharding", None), weak_type=weak
        )
    except (TypeError, AttributeError) as error:
        raise TypeError(
            f"argument{where} is a {type(leaf).__name__}, neither an array nor a "
            "jax.ShapeDtypeStruct. Bind static arguments first, with functools.partial."
        ) from error


def _describe_sharding(sharding: Sharding | None) -> str:
    if sharding is None or isinstance(sharding, SingleDeviceSharding):
        return f" in {_host_kind(sharding)}" if _host_kind(sharding) else ""
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        axes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        kind = f" in {_host_kind(sharding)}" if _host_kind(sharding) else ""
        return f" over {axes} {mesh.axis_types} as {sharding.spec}{kind}"
    return f" {sharding}"


def _host_kind(sharding: Sharding | None) -> str | None:
    """The kind of host memory that a sharding asks for, if it does."""
    kind = getattr(sharding, "memory_kind", None)
    # A CPU device's own memory is called unpinned_host.
    return kind if kind == "pinned_host" else None


def _named(leaves: list[tuple[Any, Any]]) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def _is_free(sharding: Sharding | None) -> bool:
    """Whether a leaf may go wherever the target wants it."""
    return sharding is None or isinstance(sharding, SingleDeviceSharding)


def _on_a_mesh(
    where: str, shape: jax.ShapeDtypeStruct, target: Target, meshes: dict[AbstractMesh, Mesh]
) -> jax.ShapeDtypeStruct:
    """The leaf over a mesh of the target's devices, if it is over a mesh."""
    sharding = shape.sharding
    if _is_free(sharding):
        return shape
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        placed = NamedSharding(_concrete(where, sharding.mesh, target, meshes), sharding.spec)
        return shape.update(sharding=_in_host_memory(where, placed, _host_kind(sharding), target))
    _check_devices(where, sharding, target)
    return shape


def _elsewhere(
    where: str, shape: jax.ShapeDtypeStruct, default: Sharding, target: Target
) -> jax.ShapeDtypeStruct:
    """The leaf where leaves without a sharding go, if it is one."""
    if not _is_free(shape.sharding):
        return shape
    kind = _host_kind(shape.sharding)
    return shape.update(sharding=_in_host_memory(where, default, kind, target))


def _in_host_memory(where: str, placed: Sharding, kind: str | None, target: Target) -> Sharding:
    if kind is None:
        return placed
    placed = placed.with_memory_kind(kind)
    if placed.memory_kind != kind:
        raise ValueError(
            f"argument{where} lies in {kind} memory, which jax {jax.__version__} cannot say of an "
            f"argument on target {target.name!r}. Pass it in device memory."
        )
    return placed


def _concrete(
    where: str, mesh: AbstractMesh, target: Target, meshes: dict[AbstractMesh, Mesh]
) -> Mesh:
    if mesh.size != target.count:
        raise ValueError(
            f"argument{where} is sharded over a mesh {dict(mesh.shape)} of {mesh.size} devices; "
            f"target {target.name!r} has {target.count}."
        )
    if mesh not in meshes:
        devices = np.array(target.devices(), dtype=object).reshape(mesh.axis_sizes)
        meshes[mesh] = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    return meshes[mesh]


def _check_devices(where: str, sharding: Sharding, target: Target) -> None:
    if sharding.device_set != set(target.devices()):
        kinds = sorted({device.device_kind for device in sharding.device_set})
        raise ValueError(
            f"argument{where} is sharded over {len(sharding.device_set)} devices ({kinds[0]}) that "
            f"are not those of target {target.name!r}. Build its sharding over target.mesh(...), "
            "or over a jax.sharding.AbstractMesh of the same shape."
        )
