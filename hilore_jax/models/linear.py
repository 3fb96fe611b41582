"""The linear map as a parameter of the block: one face, made by a factory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.sharding import gathered

LinearFactory = Callable[..., Any]
"""`factory(name, config, *, rngs)` returns a module `x [..., in] -> y [..., out]`."""


def has_bias(name: str, config: DecoderConfig) -> bool:
    """Whether the linear map of that name carries a bias in this family."""
    return config.qkv_bias and name in ("q_proj", "k_proj", "v_proj")


class Dense(nnx.Module):
    """`y = x W + b` with W stored as `[in, out]` and computed in the dtype of x.

    Args:
        name: which linear map of the block, from `config.LINEARS`.
        config: shapes, storage dtype, bias.
        rngs: source of the initial weights, normal with variance 1 / in.

    Example:
        >>> import jax.numpy as jnp
        >>> config = DecoderConfig(
        ...     vocab_size=8, d_model=4, d_ff=6, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=4
        ... )
        >>> Dense("up_proj", config, rngs=nnx.Rngs(0))(jnp.ones((2, 4))).shape
        (2, 6)
    """

    def __init__(self, name: str, config: DecoderConfig, *, rngs: nnx.Rngs):
        d_in, d_out = config.linear_shape(name)
        kernel = jax.random.normal(rngs.params(), (d_in, d_out)) * d_in**-0.5
        self.kernel = nnx.Param(kernel.astype(config.storage_dtype))
        zeros = jnp.zeros(d_out, config.storage_dtype)
        self.bias = nnx.Param(zeros) if has_bias(name, config) else None

    def weight(self, dtype: DTypeLike) -> Float[Array, "d_in d_out"]:
        """The kernel in a dtype, whole on every device: cast before it is gathered."""
        return gathered(self.kernel[...].astype(dtype))

    def __call__(self, x: Float[Array, "*rows d_in"]) -> Float[Array, "*rows d_out"]:
        """Applies the map to the last axis of x, in the dtype of x."""
        y = x @ self.weight(x.dtype)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)
