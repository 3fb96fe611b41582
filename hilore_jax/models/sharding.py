"""Where a decoder's arrays lie on a mesh of axes `data` and `fsdp`.

Parameters are cut along `fsdp`, rows of a batch along both (ZeRO, arXiv 1910.02054; FSDP). A block
gathers each kernel in the compute dtype where it multiplies, and nothing longer lived than that
product is whole. The axes are those of the mesh in use (`jax.set_mesh`); without one, or with axes
of other names, nothing here does anything.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

FSDP, DATA = "fsdp", "data"
_TABLES = ("embedding", "head")


def parameter_sharding(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Where a decoder's variables lie, and whatever is shaped like them: gradients, moments.

    Stacked kernels `[n, in, out]` are cut along their inputs, whose products are then whole in a
    gathered kernel's order; tables `[vocab, d_model]` along the vocabulary, so that each device
    scores its own words. What the devices do not divide, and stacks of vectors, each has whole.

    Args:
        tree: arrays or shapes, by the paths of a decoder's state anywhere in theirs.
        mesh: with an axis `fsdp`.

    Returns:
        The tree with `NamedSharding`s.

    Raises:
        ValueError: the mesh has no axis `fsdp`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> mesh = jax.sharding.AbstractMesh((1, 4), ("data", "fsdp"))
        >>> shapes = {"kernel": jax.ShapeDtypeStruct((2, 8, 6), jnp.float32)}
        >>> tuple(parameter_sharding(shapes, mesh)["kernel"].spec)
        (None, 'fsdp', None)
    """
    if FSDP not in mesh.axis_names:
        raise ValueError(f"the mesh has axes {mesh.axis_names}, expected one named {FSDP!r}")
    size = mesh.shape[FSDP]

    def place(path: tuple, leaf: Any) -> NamedSharding:
        stacked = len(leaf.shape) == 3
        table = len(leaf.shape) == 2 and any(name in jax.tree_util.keystr(path) for name in _TABLES)
        if not (stacked or table) or leaf.shape[-2] % size:
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, PartitionSpec(*(None,) * stacked, FSDP, None))

    return jax.tree_util.tree_map_with_path(place, tree)


def batch_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Where `[micro, rows, ...]` arrays of a batch lie: rows over all devices.

    Example:
        >>> import jax
        >>> tuple(batch_sharding(jax.sharding.AbstractMesh((2, 4), ("data", "fsdp"))).spec)
        (None, ('data', 'fsdp'))
    """
    return NamedSharding(mesh, PartitionSpec(None, _rows(mesh)))


def gathered(kernel: Float[Array, "d_in d_out"]) -> Float[Array, "d_in d_out"]:
    """A kernel that every device has whole, from its parts along `fsdp` of the mesh in use."""
    return _constrain(kernel, PartitionSpec()) if FSDP in _automatic() else kernel


def is_cut() -> bool:
    """Whether the mesh in use has an axis along which kernels and sketches are cut."""
    return FSDP in _automatic()


def by_outputs(sketch: Float[Array, "*n d_out rank"]) -> Float[Array, "*n d_out rank"]:
    """A sketch, or a slot whose cotangent is one, with its outputs cut along `fsdp`."""
    if not is_cut() or sketch.shape[-2] % jax.sharding.get_abstract_mesh().shape[FSDP]:
        return sketch
    return _constrain(sketch, PartitionSpec(*(None,) * (sketch.ndim - 2), FSDP, None))


def by_rows(x: Float[Array, "batch ..."]) -> Float[Array, "batch ..."]:
    """Activations whose rows lie on all devices of the mesh in use; where those divide them."""
    axes = _rows(axes) if (axes := _automatic()) else ()
    sizes = [jax.sharding.get_abstract_mesh().shape[axis] for axis in axes]
    if not axes or x.shape[0] % math.prod(sizes):
        return x
    return _constrain(x, PartitionSpec(axes))


def _constrain(x: Array, spec: PartitionSpec) -> Array:
    return jax.lax.with_sharding_constraint(x, spec)


def _automatic() -> tuple[str, ...]:
    """Axes of the mesh in use along which the compiler places arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(name for name in (DATA, FSDP) if types.get(name) == AxisType.Auto)


def _rows(where: Mesh | AbstractMesh | tuple[str, ...]) -> tuple[str, ...]:
    names = where if isinstance(where, tuple) else where.axis_names
    return tuple(name for name in (DATA, FSDP) if name in names)
