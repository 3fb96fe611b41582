"""A bonus for policies that stay undecided."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from hilore_jax.grpo.checks import check_mask, check_number, check_shapes
from hilore_jax.grpo.terms import loss_scalars


def entropy_loss(
    entropy: Float[Array | np.ndarray, "batch seq"],
    mask: Shaped[Array | np.ndarray, "batch seq"],
    update_tokens: ArrayLike,
    coefficient: ArrayLike,
) -> Float[Array, ""]:
    r"""The part of a loss that pays for entropy: `-c sum_t mask_t H_t / N`.

    H is a function of all logits, so that this term is not part of `omega = d loss / d logp`:
    exposure says nothing of it, and plans that are held to a risk cannot be held with it.

    Args:
        entropy: `[batch, seq]`, of the policy at each token, nats (`token_logprobs(entropy=True)`).
        mask: `[batch, seq]`, the optimized tokens.
        update_tokens: as in `loss_and_coefficients`.
        coefficient: scalar c >= 0.

    Returns:
        A scalar, float32 (float64 if `entropy` is); its gradient goes to `entropy` alone.

    Raises:
        ValueError: shapes that differ, or a coefficient that is negative or not finite.

    Example:
        >>> import jax.numpy as jnp, hilore_jax as hl
        >>> print(hl.grpo.entropy_loss(jnp.array([[2.0, 9.0]]), jnp.array([[1, 0]]), 4, 0.5))
        -0.25
    """
    check_number("coefficient", coefficient, least=0.0)
    shape = np.shape(entropy)
    check_shapes(
        {"mask": mask, "entropy": entropy}, reference="entropy", allowed={"mask": (shape,)}
    )
    entropy, mask = jnp.asarray(entropy), check_mask(mask)
    weight = loss_scalars(entropy.dtype, update_tokens, len(entropy)).weight
    terms = jnp.where(mask, weight * jnp.where(mask, entropy, 0), 0)
    return -jnp.asarray(coefficient).astype(entropy.dtype) * jnp.sum(terms)
