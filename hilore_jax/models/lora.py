"""Low-rank adapters on the linear maps of a block."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.linear import Dense
from hilore_jax.models.names import named
from hilore_jax.models.sharding import gathered


class LoraDense(Dense):
    """`y = x W + b + (alpha / rank) (x A) B` (Hu et al. 2021, arXiv 2106.09685).

    A is normal with variance 1 / in and B is zero, so the map starts as the base map. Both are
    `nnx.LoRAParam` in float32 and are computed in the dtype of x.

    Args:
        name: which linear map of the block, from `config.LINEARS`.
        config: shapes and `config.lora`, which must not be None.
        rngs: source of the initial weights.

    Example:
        >>> from hilore_jax.models.config import LoraConfig
        >>> config = DecoderConfig(
        ...     vocab_size=8,
        ...     d_model=4,
        ...     d_ff=6,
        ...     n_layers=1,
        ...     n_heads=1,
        ...     n_kv_heads=1,
        ...     head_dim=4,
        ...     lora=LoraConfig(rank=2),
        ... )
        >>> LoraDense("up_proj", config, rngs=nnx.Rngs(0)).lora_b.shape
        (2, 6)
    """

    def __init__(self, name: str, config: DecoderConfig, *, rngs: nnx.Rngs):
        super().__init__(name, config, rngs=rngs)
        if config.lora is None:
            raise ValueError(f"LoraDense {name!r} needs config.lora, found None")
        d_in, d_out = config.linear_shape(name)
        a = jax.random.normal(rngs.params(), (d_in, config.lora.rank), jnp.float32)
        self.lora_a = nnx.LoRAParam(a * d_in**-0.5)
        self.lora_b = nnx.LoRAParam(jnp.zeros((config.lora.rank, d_out), jnp.float32))
        self.scale = config.lora.scale

    def __call__(self, x: Float[Array, "*rows d_in"]) -> Float[Array, "*rows d_out"]:
        """Applies the base map and the adapter to the last axis of x."""
        a, b = (gathered(v[...].astype(x.dtype)) for v in (self.lora_a, self.lora_b))
        return super().__call__(x) + (named(x @ a, "lora_hidden") @ b) * self.scale

    def delta(self) -> Float[Array, "*blocks d_in d_out"]:
        """The adapter as a dense matrix, `(alpha / rank) A B`, float32 (stacked if the map is)."""
        product = jnp.matmul(self.lora_a[...], self.lora_b[...], precision="highest")
        return product * self.scale
