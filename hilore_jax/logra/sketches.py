"""Which sketches a run keeps: the settings that a trainer and its followers share."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer, UInt32

from hilore_jax.logra.projection import KINDS, Kind, layer_key, projection, update_key

_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Sketches:
    """How gradients are sketched, the same for all layers: hashable, and a part of every packet.

    Attributes:
        rank: r, rows of the projections. A layer with a side of no more than that is left dense.
        seed: base seed of the projections, from 0 to 2^64 - 1.
        kind: "rademacher" or "gaussian".
        dtype: dtype of A, "bfloat16" or "float32": what it is rounded to for the sketch and for the
            merge alike.

    Raises:
        ValueError: one of them is none of these.

    Example:
        >>> Sketches(rank=2).projection(Sketches(rank=2).key("blocks.0.q_proj", 0), 3).shape
        (2, 3)
    """

    rank: int = 256
    seed: int = 0
    kind: Kind = "rademacher"
    dtype: str = "float32"

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"the sketches' rank is {self.rank}, expected at least 1")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"the sketches' seed is {self.seed}, expected 0 to 2^64 - 1")
        if self.kind not in KINDS:
            raise ValueError(f"the sketches' kind is {self.kind!r}, expected {' or '.join(KINDS)}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"the sketches' dtype is {self.dtype!r}, expected {_DTYPES}")

    def key(self, layer: str, update: Integer[Array, ""] | int) -> UInt32[Array, "2"]:
        """The key of a layer's projection during an update, uint32."""
        return update_key(layer_key(self.seed, layer), update)

    def projection(self, key: UInt32[Array, "2"], width: int) -> Float[Array, "rank width"]:
        """A, `[rank, width]`, of a layer with that many inputs."""
        return projection(key, self.rank, width, self.kind, jnp.dtype(self.dtype))

    def projection_in(
        self, dtype: DTypeLike, key: UInt32[Array, "2"], width: int
    ) -> Float[Array, "rank width"]:
        """A in the dtype that a layer computes in, the same numbers as those of the merge.

        Raises:
            ValueError: they would be rounded once more.
        """
        self.check_compute(dtype)
        return self.projection(key, width).astype(dtype)

    def check_compute(self, dtype: DTypeLike) -> None:
        """Refuses a compute dtype that does not hold A's entries.

        Raises:
            ValueError: the sketch would be by another A than the merge.

        Example:
            >>> Sketches(dtype="bfloat16").check_compute("float32")
        """
        if jnp.promote_types(self.dtype, dtype) != jnp.dtype(dtype):
            raise ValueError(
                f"sketches of dtype {self.dtype} in a layer that computes in {jnp.dtype(dtype)}: A "
                "would be rounded for the sketch and not for the merge; give Sketches(dtype="
                f"{jnp.dtype(dtype).name!r}), or compute in {self.dtype}"
            )

    def projections(self, keys: UInt32[Array, "n 2"], width: int) -> Float[Array, "n rank width"]:
        """The projections of layers with equal shapes, one a key."""
        return jax.vmap(functools.partial(self.projection, width=width))(keys)
