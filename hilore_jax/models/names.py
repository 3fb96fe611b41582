"""The one registry of activation names, from which policies, plans and reports derive."""

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from hilore_jax.logra.sketch import SKETCH_HIDDEN

NAMES: tuple[str, ...] = (
    "block_in",
    "attn_norm",
    "lora_hidden",
    SKETCH_HIDDEN,
    "q",
    "k",
    "v",
    "attn_out",
    "attn_lse",
    "attn_residual",
    "mlp_norm",
    "mlp_gate",
    "mlp_up",
    "mlp_act",
)
"""Activations that a decoder block names, in the order in which its forward computes them.

`lora_hidden` is `x A` of every adapter, there with LoRA only. The gradient of B reads it, and it is
the one small product whose recomputation needs the exact input of each linear map: unless it is
kept, compressing those inputs spares nothing.

`sketch_hidden` is `A x` of every sketched map, there with LoGRA only: all that the sketch of its
gradient reads (`logra.sketched_dense`, which names it).
"""


def named(x: Float[Array, "..."], name: str) -> Float[Array, "..."]:
    """Names an activation, so that a policy can say what backward reads in its place.

    Args:
        x: the activation, any shape.
        name: one of `NAMES`.

    Returns:
        `x`, unchanged.

    Raises:
        ValueError: `name` is not in the registry.

    Example:
        >>> import jax.numpy as jnp
        >>> named(jnp.ones(2), "mlp_act").tolist()
        [1.0, 1.0]
    """
    if name not in NAMES:
        raise ValueError(f"activation name {name!r} is not in the registry: {', '.join(NAMES)}")
    return checkpoint_name(x, name)
