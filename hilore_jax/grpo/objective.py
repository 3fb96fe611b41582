"""The token-normalized GRPO loss and its coefficients, the derivative known before backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Num, Shaped

from hilore_jax.grpo.terms import (
    LOG_RATIO_LIMIT,
    LossScalars,
    TokenArrays,
    k3,
    loss_scalars,
    tangent_exp,
    token_arrays,
)


def loss_and_coefficients(
    logp: Num[Array | np.ndarray, "..."],
    logp_old: Num[Array | np.ndarray, "..."],
    logp_ref: Num[Array | np.ndarray, "..."] | None,
    advantages: Num[Array | np.ndarray, "..."],
    mask: Shaped[Array | np.ndarray, "..."],
    update_tokens: ArrayLike,
    *,
    clip: ArrayLike = 0.2,
    beta: ArrayLike = 1e-3,
    clip_high: ArrayLike | None = None,
) -> tuple[Float[Array, ""], Float[Array, "batch seq"]]:
    r"""GRPO loss of a microbatch and `omega = d loss / d logp`, known without a backward pass.

    With `N = update_tokens` (arXiv 2402.03300 for the loss, arXiv 2609.33570 for omega):

        rho_t   = e(logp_t - logp_old_t)
        k3_t    = e(logp_ref_t - logp_t) - (logp_ref_t - logp_t) - 1
        loss    = 1/N sum_t mask_t [-min(rho_t A_t, clip(rho_t, 1-eps, 1+eps) A_t) + beta k3_t]
        omega_t = mask_t/N [-active_t e'(logp_t - logp_old_t) A_t
                            + beta (1 - e'(logp_ref_t - logp_t))]
        active  = (A >= 0 and rho <= 1+eps) or (A < 0 and rho >= 1-eps)

    `e` is `exp` up to 20 and its tangent line beyond, `e(x) = e^20 (1 + x - 20)`, so
    `e'(x) = exp(min(x, 20))`: the loss is once continuously differentiable in the log-ratios and
    stays finite for any that occur (up to about 1e29). The gradient of the loss with respect to
    `logp` is omega by the loss's own rule, at the clip boundary too, where automatic
    differentiation would split the tie. All other arguments get zero gradient.

    Losses and gradients of microbatches add up: `N` counts the whole update, on all devices.

    Args:
        logp: `[batch, seq]`, log-probabilities under the current policy, nats.
        logp_old: `[batch, seq]`, under the policy that sampled, nats.
        logp_ref: `[batch, seq]`, under the reference, nats. None: no reference term, whatever
            `beta` is.
        advantages: `[batch]` or `[batch, seq]`.
        mask: `[batch, seq]`, bool or 0/1: the optimized response tokens. Where it is off, the
            other arrays may hold anything, NaN included.
        update_tokens: Scalar, tokens optimized in the complete update. 0 gives loss and omega 0.
        clip: Scalar eps >= 0.
        beta: Scalar >= 0, weight of the reference term.
        clip_high: Scalar >= 0, upper eps if it differs from the lower one.

    Returns:
        The loss, float32 scalar, and omega, float32 `[batch, seq]`, without gradient (float64 if
        an input is). A non-finite value under the mask stays visible as NaN under `jit`.

    Raises:
        ValueError: Shapes that differ, a scalar out of range, or (concrete) a non-finite value
            under the mask, named with its row and position.

    Example:
        >>> import jax.numpy as jnp, hilore_jax as hl
        >>> zeros, mask = jnp.zeros((1, 2)), jnp.array([[True, True]])
        >>> advantages = jnp.array([1.0])
        >>> loss, omega = hl.grpo.loss_and_coefficients(zeros, zeros, None, advantages, mask, 2)
        >>> print(loss, omega)
        -1.0 [[-0.5 -0.5]]
    """
    values, tokens = token_arrays(logp, logp_old, logp_ref, advantages, mask)
    scalars = loss_scalars(values.dtype, update_tokens, clip, clip_high, beta)
    tokens, scalars = jax.tree.map(jax.lax.stop_gradient, (tokens, scalars))
    omega = _omega(jax.lax.stop_gradient(values), tokens, scalars)
    return _loss(values, tokens, scalars), omega


# A custom JVP, not a custom VJP: the rule is linear in the tangent, so JAX transposes it to
# `omega * cotangent`, and the loss keeps working in forward mode.
@jax.custom_jvp
def _loss(logp: Array, tokens: TokenArrays, scalars: LossScalars) -> Array:
    rho = tangent_exp(logp - tokens.logp_old)
    clipped = jnp.clip(rho, scalars.low, scalars.high)
    terms = -jnp.minimum(rho * tokens.advantages, clipped * tokens.advantages)
    if tokens.logp_ref is not None:
        terms = terms + scalars.beta * k3(tokens.logp_ref - logp)
    return scalars.weight * jnp.sum(jnp.where(tokens.mask, terms, jnp.zeros_like(terms)))


@_loss.defjvp
def _loss_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return _loss(*primals), jnp.sum(_omega(*primals) * tangents[0])


def _omega(logp: Array, tokens: TokenArrays, scalars: LossScalars) -> Array:
    log_ratio = logp - tokens.logp_old
    rho = tangent_exp(log_ratio)
    slope = jnp.exp(jnp.minimum(log_ratio, LOG_RATIO_LIMIT))
    # Written as its complement so that NaN, which compares false, counts as active and shows.
    inactive = jnp.where(tokens.advantages >= 0, rho > scalars.high, rho < scalars.low)
    terms = jnp.where(inactive, jnp.zeros_like(slope), -slope * tokens.advantages)
    if tokens.logp_ref is not None:
        gap = jnp.minimum(tokens.logp_ref - logp, LOG_RATIO_LIMIT)
        terms = terms - scalars.beta * jnp.expm1(gap)
    return scalars.weight * jnp.where(tokens.mask, terms, jnp.zeros_like(terms))
