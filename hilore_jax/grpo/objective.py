"""GRPO's losses and their coefficients, the derivatives that are known before backward."""

from __future__ import annotations

import functools
import typing
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Num, Shaped

from hilore_jax.grpo.terms import (
    LOG_RATIO_LIMIT,
    LossScalars,
    Ratio,
    Reference,
    Surrogate,
    TokenArrays,
    check_choice,
    k3,
    log_ratios,
    loss_scalars,
    tangent_exp,
    token_arrays,
)


class _Form(NamedTuple):
    """Which formula: static."""

    ratio: Ratio
    surrogate: Surrogate
    reference: Reference


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
    clip_dual: ArrayLike | None = None,
    ratio: Ratio = "token",
    surrogate: Surrogate = "clip",
    reference: Reference = "k3",
) -> tuple[Float[Array, ""], Float[Array, "batch seq"]]:
    r"""GRPO loss of a microbatch and `omega = d loss / d logp`, known without a backward pass.

    With `N = update_tokens` (arXiv 2402.03300 for the loss, arXiv 2609.33570 for omega):

        rho_t   = e(logp_t - logp_old_t)
        k3_t    = e(logp_ref_t - logp_t) - (logp_ref_t - logp_t) - 1
        loss    = 1/N sum_t mask_t [-min(rho_t A_t, clip(rho_t, 1-eps, 1+eps) A_t) + beta k3_t]
        omega_t = mask_t/N [-active_t e'(logp_t - logp_old_t) A_t
                            + beta (1 - e'(logp_ref_t - logp_t))]
        active  = (A >= 0 and rho <= 1+eps) or (A < 0 and 1-eps <= rho <= clip_dual)

    `e` is `exp` up to 20 and its tangent line beyond, `e(x) = e^20 (1 + x - 20)`, so
    `e'(x) = exp(min(x, 20))`: the loss is once continuously differentiable in the log-ratios and
    stays finite for any that occur (up to about 1e29). The gradient of the loss with respect to
    `logp` is omega by the loss's own rule, at the clip boundary too, where automatic
    differentiation would split the tie. All other arguments get zero gradient.

    Losses and gradients of microbatches add up: `N` counts the whole update, on all devices. Other
    means over the tokens are one `N` a row, see `loss_divisors`.

    Args:
        logp: `[batch, seq]`, log-probabilities under the current policy, nats.
        logp_old: `[batch, seq]`, under the policy that sampled, nats.
        logp_ref: `[batch, seq]`, under the reference, nats. None: no reference term, whatever
            `beta` is.
        advantages: `[batch]` or `[batch, seq]`.
        mask: `[batch, seq]`, bool or 0/1: the optimized response tokens. Where it is off, the
            other arrays may hold anything, NaN included.
        update_tokens: Scalar, tokens optimized in the complete update, or `[batch]`, what each
            row's sum is divided by. 0 gives loss and omega 0.
        clip: Scalar eps >= 0.
        beta: Scalar >= 0, weight of the reference term.
        clip_high: Scalar >= 0, upper eps if it differs from the lower one.
        clip_dual: Scalar > 1: where `A < 0`, the loss of a token is at most `-clip_dual A` (dual
            clip, arXiv 1912.09729).
        ratio: "token", or "sequence": rho of all tokens of a row is `e(mean_t log rho_t)` (GSPO,
            arXiv 2507.18071), and so is its clipping; its advantages are `[batch]`.
        surrogate: "clip" as above, or "cispo" (arXiv 2506.13585): no token is left out,
            `-sg(min(rho_t, 1+clip_high)) A_t logp_t`, omega `-min(rho_t, 1+clip_high) A_t`.
        reference: "k3" as above; "k2", `(logp - logp_ref)^2 / 2`; "k1", `logp - logp_ref`, whose
            omega is `beta` whatever the policies are.

    Returns:
        The loss, float32 scalar, and omega, float32 `[batch, seq]`, without gradient (float64 if
        an input is). A non-finite value under the mask stays visible as NaN under `jit`.

    Raises:
        ValueError: Shapes that differ, a scalar out of range, a word that is none of the above, a
            combination that has no meaning, or (concrete) a non-finite value under the mask, named
            with its row and position.

    Example:
        >>> import jax.numpy as jnp, hilore_jax as hl
        >>> zeros, mask = jnp.zeros((1, 2)), jnp.array([[True, True]])
        >>> advantages = jnp.array([1.0])
        >>> loss, omega = hl.grpo.loss_and_coefficients(zeros, zeros, None, advantages, mask, 2)
        >>> print(loss, omega)
        -1.0 [[-0.5 -0.5]]
    """
    check_form(advantages, clip_dual, ratio, surrogate, reference)
    values, tokens = token_arrays(logp, logp_old, logp_ref, advantages, mask)
    scalars = loss_scalars(
        values.dtype,
        update_tokens,
        len(values),
        clip=clip,
        beta=beta,
        clip_high=clip_high,
        clip_dual=clip_dual,
    )
    tokens, scalars = jax.tree.map(jax.lax.stop_gradient, (tokens, scalars))
    form = _Form(ratio, surrogate, reference)
    omega = _omega(form, jax.lax.stop_gradient(values), tokens, scalars)
    return _loss(form, values, tokens, scalars), omega


def check_form(
    advantages: Num[Array | np.ndarray, "..."],
    clip_dual: ArrayLike | None = None,
    ratio: Ratio = "token",
    surrogate: Surrogate = "clip",
    reference: Reference = "k3",
) -> None:
    """Raises a ValueError on a word that is not known, or a combination that has no meaning."""
    check_choice("ratio", ratio, typing.get_args(Ratio))
    check_choice("surrogate", surrogate, typing.get_args(Surrogate))
    check_choice("reference", reference, typing.get_args(Reference))
    if ratio == "sequence" and np.ndim(advantages) != 1:
        raise ValueError(
            f"advantages has shape {np.shape(advantages)} and ratio is 'sequence'; expected "
            "[batch]: tokens of one ratio are clipped together. Weight whole rows, or take "
            "ratio='token'."
        )
    if surrogate == "cispo" and clip_dual is not None:
        raise ValueError(
            f"clip_dual is {clip_dual} and surrogate is 'cispo', which holds all ratios to "
            "1 + clip_high already; leave clip_dual out."
        )


# A custom JVP, not a custom VJP: the rule is linear in the tangent, so JAX transposes it to
# `omega * cotangent`, and the loss keeps working in forward mode.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _loss(form: _Form, logp: Array, tokens: TokenArrays, scalars: LossScalars) -> Array:
    rho = tangent_exp(log_ratios(logp, tokens, form.ratio))
    if form.surrogate == "cispo":
        terms = -jnp.minimum(rho, scalars.high) * tokens.advantages * logp
    else:
        clipped = jnp.clip(rho, scalars.low, scalars.high)
        terms = -jnp.minimum(rho * tokens.advantages, clipped * tokens.advantages)
        most = -scalars.dual * jnp.where(tokens.advantages < 0, tokens.advantages, -1.0)
        terms = jnp.where(tokens.advantages < 0, jnp.minimum(terms, most), terms)
    if tokens.logp_ref is not None:
        gap = tokens.logp_ref - logp
        distances = {"k1": lambda: -gap, "k2": lambda: gap**2 / 2, "k3": lambda: k3(gap)}
        terms = terms + scalars.beta * distances[form.reference]()
    return jnp.sum(jnp.where(tokens.mask, scalars.weight * terms, jnp.zeros_like(terms)))


@_loss.defjvp
def _loss_jvp(form: _Form, primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return _loss(form, *primals), jnp.sum(_omega(form, *primals) * tangents[0])


def _omega(form: _Form, logp: Array, tokens: TokenArrays, scalars: LossScalars) -> Array:
    # With one ratio a row, a token's share 1/n of the row's mean comes back from all n tokens,
    # whose weights and advantages are equal: the same formula.
    log_ratio = log_ratios(logp, tokens, form.ratio)
    rho = tangent_exp(log_ratio)
    slope = jnp.exp(jnp.minimum(log_ratio, LOG_RATIO_LIMIT))
    if form.surrogate == "cispo":
        terms = -jnp.minimum(rho, scalars.high) * tokens.advantages
    else:
        # Written as its complement so that NaN, which compares false, counts as active and shows.
        outside = (rho < scalars.low) | (rho > scalars.dual)
        inactive = jnp.where(tokens.advantages >= 0, rho > scalars.high, outside)
        terms = jnp.where(inactive, jnp.zeros_like(slope), -slope * tokens.advantages)
    if tokens.logp_ref is not None:
        gap = tokens.logp_ref - logp
        slopes = {
            "k1": lambda: jnp.ones_like(gap) + 0 * gap,
            "k2": lambda: -gap,
            "k3": lambda: -jnp.expm1(jnp.minimum(gap, LOG_RATIO_LIMIT)),
        }
        terms = terms + scalars.beta * slopes[form.reference]()
    return jnp.where(tokens.mask, scalars.weight * terms, jnp.zeros_like(terms))
