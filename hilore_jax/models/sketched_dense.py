"""A block's linear map with a sketched gradient, and the factory that chooses between maps."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from hilore_jax.logra.linear import SketchKey, SketchSlot
from hilore_jax.logra.sketch import sketched_dense
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.linear import Dense
from hilore_jax.models.lora import LoraDense
from hilore_jax.models.sharding import by_outputs


class SketchedDense(Dense):
    """`y = x W + b`, W's gradient a sketch: that of `slot`, `S = G A^T` (LoGRA; methods 2.1).

    A is drawn inside the block from `key`, so that no projection exists between blocks. The slot is
    a `SketchSlot` of zeros, `[out, rank]` float32, the key a `SketchKey`, `[2]` uint32.

    Args:
        name: which linear map of the block, from `config.LINEARS`.
        config: shapes and `config.sketches`, which must not be None.
        rngs: source of the initial weights.

    Raises:
        ValueError: the config has no sketches.

    Example:
        >>> from hilore_jax.logra.sketches import Sketches
        >>> from hilore_jax.models.config import SketchConfig
        >>> config = DecoderConfig(
        ...     vocab_size=8,
        ...     d_model=4,
        ...     d_ff=6,
        ...     n_layers=1,
        ...     n_heads=1,
        ...     n_kv_heads=1,
        ...     head_dim=4,
        ...     sketches=SketchConfig(Sketches(rank=2)),
        ... )
        >>> SketchedDense("up_proj", config, rngs=nnx.Rngs(0)).slot.shape
        (6, 2)
    """

    def __init__(self, name: str, config: DecoderConfig, *, rngs: nnx.Rngs):
        super().__init__(name, config, rngs=rngs)
        if config.sketches is None:
            raise ValueError(f"SketchedDense {name!r} needs config.sketches, found None")
        self.sketches = config.sketches.sketches
        d_out = config.linear_shape(name)[1]
        self.slot = SketchSlot(jnp.zeros((d_out, self.sketches.rank), jnp.float32))
        self.key = SketchKey(jnp.zeros(2, jnp.uint32))

    def __call__(self, x: Float[Array, "*rows d_in"]) -> Float[Array, "*rows d_out"]:
        """Applies the map to the last axis of x, in the dtype of x."""
        a = self.sketches.projection_in(x.dtype, self.key[...], x.shape[-1])
        y = sketched_dense(x, self.weight(x.dtype), by_outputs(self.slot[...]), a)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


def choose_linear(name: str, config: DecoderConfig, *, rngs: nnx.Rngs) -> Dense:
    """The default linear factory: an adapter or a sketch where the config has one, else dense.

    Args:
        name: which linear map of the block.
        config: shapes, adapters and sketches.
        rngs: source of the initial weights.

    Returns:
        A module `x [..., in] -> y [..., out]`.

    Example:
        >>> config = DecoderConfig(
        ...     vocab_size=8, d_model=4, d_ff=6, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=4
        ... )
        >>> type(choose_linear("up_proj", config, rngs=nnx.Rngs(0))).__name__
        'Dense'
    """
    if config.lora is not None and name in config.lora.targets:
        return LoraDense(name, config, rngs=rngs)
    if name in config.sketched_linears:
        return SketchedDense(name, config, rngs=rngs)
    return Dense(name, config, rngs=rngs)
