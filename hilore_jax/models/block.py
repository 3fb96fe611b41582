"""One decoder block, with its activations named, and its pure form."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, PyTree

from hilore_jax.models.attention import attention
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.linear import LinearFactory
from hilore_jax.models.names import named
from hilore_jax.models.rope import rotate
from hilore_jax.models.sharding import by_rows
from hilore_jax.models.sketched_dense import choose_linear

Heads = tuple[
    Float[Array, "batch seq q_width"],
    Float[Array, "batch seq kv_width"],
    Float[Array, "batch seq kv_width"],
]


class RMSNorm(nnx.Module):
    """`y = scale * x / sqrt(mean(x^2) + eps)` in float32 (Zhang and Sennrich, arXiv 1910.07467).

    Args:
        width: size of the normalized last axis.
        eps: added to the mean square.
        dtype: storage dtype of the scale, which starts at 1.

    Example:
        >>> RMSNorm(2, 0.0, jnp.float32)(jnp.array([3.0, 3.0])).tolist()
        [1.0, 1.0]
    """

    def __init__(self, width: int, eps: float, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones(width, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Normalizes the last axis; float32 inside, the dtype of x outside."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Block(nnx.Module):
    """Pre-norm attention and SwiGLU block of Llama, Qwen2 and Qwen3.

    Args:
        config: shapes and switches.
        linear: makes each linear map from its name; dense, LoRA or sketched by default.
        rngs: source of the initial weights.

    Example:
        >>> from hilore_jax.models.config import DecoderConfig
        >>> config = DecoderConfig(
        ...     vocab_size=8, d_model=4, d_ff=6, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=4
        ... )
        >>> x, half = jnp.ones((1, 3, 4)), jnp.ones((1, 3, 2))
        >>> Block(config, rngs=nnx.Rngs(0))(x, half, 0 * half).shape
        (1, 3, 4)
    """

    def __init__(
        self, config: DecoderConfig, *, linear: LinearFactory = choose_linear, rngs: nnx.Rngs
    ):
        self.config = config
        storage = config.storage_dtype
        self.q_proj = linear("q_proj", config, rngs=rngs)
        self.k_proj = linear("k_proj", config, rngs=rngs)
        self.v_proj = linear("v_proj", config, rngs=rngs)
        self.o_proj = linear("o_proj", config, rngs=rngs)
        self.gate_proj = linear("gate_proj", config, rngs=rngs)
        self.up_proj = linear("up_proj", config, rngs=rngs)
        self.down_proj = linear("down_proj", config, rngs=rngs)
        self.attn_norm = RMSNorm(config.d_model, config.rms_eps, storage)
        self.mlp_norm = RMSNorm(config.d_model, config.rms_eps, storage)
        per_head = (config.head_dim, config.rms_eps, storage)
        self.q_norm = RMSNorm(*per_head) if config.qk_norm else None
        self.k_norm = RMSNorm(*per_head) if config.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "batch seq d_model"],
        cos: Float[Array, "#batch seq half"],
        sin: Float[Array, "#batch seq half"],
        mask: Bool[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq d_model"]:
        """The block's output.

        Args:
            x: residual stream, compute dtype.
            cos: cosines of the positions, `rope.cos_sin`.
            sin: sines of the positions.
            mask: True at real tokens, or None when all are.

        Returns:
            The residual stream after the block.
        """
        x = named(by_rows(x), "block_in")
        q, k, v = self.heads(x, cos, sin)
        return self.finish(x, self.attend(q, k, v, mask))

    def heads(
        self,
        x: Float[Array, "batch seq d_model"],
        cos: Float[Array, "#batch seq half"],
        sin: Float[Array, "#batch seq half"],
    ) -> Heads:
        """Flat queries, keys and values of the block's input, after head norm and RoPE."""
        h = named(self.attn_norm(x), "attn_norm")
        q = self._rotated(self.q_proj(h), self.q_norm, cos, sin)
        k = self._rotated(self.k_proj(h), self.k_norm, cos, sin)
        return named(q, "q"), named(k, "k"), named(self.v_proj(h), "v")

    def attend(
        self,
        q: Float[Array, "batch seq q_width"],
        k: Float[Array, "batch seq kv_width"],
        v: Float[Array, "batch seq kv_width"],
        mask: Bool[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq q_width"]:
        """Attention's output, flat."""
        config = self.config
        return attention(
            q,
            k,
            v,
            mask,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            implementation=config.attention,
        )

    def finish(
        self, x: Float[Array, "batch seq d_model"], out: Float[Array, "batch seq q_width"]
    ) -> Float[Array, "batch seq d_model"]:
        """The block's output from its input and its attention's output."""
        x = named(x + self.o_proj(out), "attn_residual")
        h = named(self.mlp_norm(x), "mlp_norm")
        gate = named(self.gate_proj(h), "mlp_gate")
        up = named(self.up_proj(h), "mlp_up")
        return x + self.down_proj(named(jax.nn.silu(gate) * up, "mlp_act"))

    def _rotated(self, flat: Array, norm: RMSNorm | None, cos: Array, sin: Array) -> Array:
        x = flat.reshape(*flat.shape[:-1], -1, self.config.head_dim)
        x = x if norm is None else norm(x)
        return rotate(x, cos, sin).reshape(flat.shape)


@dataclasses.dataclass(frozen=True)
class BlockFn:
    """A block as a pure function `(params, x, cos, sin, mask) -> x`, equal and hashable by value.

    Attributes:
        graphdef: the static part of a `Block`; the same whether its arrays are stacked or not.

    Example:
        >>> from hilore_jax.models.config import DecoderConfig
        >>> config = DecoderConfig(
        ...     vocab_size=8, d_model=4, d_ff=6, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=4
        ... )
        >>> graphdef, params = nnx.split(Block(config, rngs=nnx.Rngs(0)))
        >>> BlockFn(graphdef) == BlockFn(graphdef)
        True
    """

    graphdef: nnx.GraphDef

    def __call__(
        self,
        params: PyTree,
        x: Float[Array, "batch seq d_model"],
        cos: Float[Array, "#batch seq half"],
        sin: Float[Array, "#batch seq half"],
        mask: Bool[Array, "batch seq"] | None = None,
    ) -> Float[Array, "batch seq d_model"]:
        """`Block.__call__` of the block with these params."""
        return nnx.merge(self.graphdef, params)(x, cos, sin, mask)
