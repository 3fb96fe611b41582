"""The gradient of the GRPO loss of one update, microbatch by microbatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from hilore_jax.actions import Policy
from hilore_jax.grpo import (
    entropy_loss,
    exposure,
    loss_and_coefficients,
    ratio_metrics,
    token_logprobs,
)
from hilore_jax.grpo.terms import LossOptions
from hilore_jax.training.batch import Batch, check_batch

_OF_RATIOS = ("clip", "clip_high", "clip_dual", "ratio", "surrogate")

Policies = tuple[Policy, ...] | None
Metrics = dict[str, Any]


def make_micro_gradients(
    graphdef: nnx.GraphDef,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_coef: float = 0.0,
    logprobs: Callable[..., Any] = token_logprobs,
    **loss: Unpack[LossOptions],
) -> Callable[..., tuple[nnx.State, Metrics]]:
    """The gradient that one microbatch contributes to an update's.

    Args:
        graphdef: the model's static part, from `init_state`.
        temperature: softmax temperature at which tokens are scored.
        entropy: also report the mean entropy of the policy over the optimized tokens, nats; costs
            the reductions over the vocabulary a second time.
        entropy_coef: weight of the entropy bonus, whose part of the gradient no exposure counts;
            above 0 the entropy is reported too.
        logprobs: scores tokens; another than `token_logprobs` takes no `entropy`.
        **loss: the options of `grpo.loss_and_coefficients`.

    Returns:
        `gradients(policies, params, frozen, micro, update_tokens) -> (grads, seen)`: gradients in
        the parameters' dtype, of losses divided by the whole update's tokens (methods 1.1), or by
        the batch's own divisors, so that those of microbatches add up; `seen` is what
        `update_metrics` reads, sums of one microbatch.
    """
    micro_loss = make_micro_loss(
        graphdef,
        temperature=temperature,
        entropy=entropy,
        entropy_coef=entropy_coef,
        logprobs=logprobs,
        **loss,
    )

    def gradients(policies: Policies, params, frozen, micro: Batch, update_tokens):
        (_, seen), grads = jax.value_and_grad(micro_loss, has_aux=True)(
            params, frozen, micro, update_tokens, policies
        )
        return grads, seen

    return gradients


def make_micro_loss(
    graphdef: nnx.GraphDef,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_coef: float = 0.0,
    logprobs: Callable[..., Any] = token_logprobs,
    **loss: Unpack[LossOptions],
) -> Callable[..., tuple[Any, Metrics]]:
    """The part of an update's loss that one microbatch contributes.

    Args:
        graphdef: the model's static part, from `init_state`.
        temperature: see `make_micro_gradients`, as the others.
        entropy: see there.
        entropy_coef: see there.
        logprobs: see there.
        **loss: see there.

    Returns:
        `loss(params, frozen, micro, update_tokens, policies) -> (loss, seen)`.
    """

    def micro_loss(params, frozen, micro: Batch, update_tokens, policies):
        model = nnx.merge(graphdef, params, frozen)
        hidden = model.hidden(micro.tokens, micro.attention_mask, policies=policies)
        scored = scored_inputs(hidden, model.unembedding(), micro)
        asked = {"entropy": True} if entropy or entropy_coef else {}
        logp = logprobs(*scored, temperature, **asked)
        logp, nats = logp if isinstance(logp, tuple) else (logp, None)
        terms = loss_terms(logp, micro)
        value, omega = loss_and_coefficients(*terms, divisors(micro, update_tokens), **loss)
        if entropy_coef:
            assert nats is not None
            of_each = divisors(micro, update_tokens)
            value += entropy_loss(nats, micro.completion_mask, of_each, entropy_coef)
        seen = observe(value, logp, omega, nats, micro, **loss)
        return value, jax.lax.stop_gradient(seen)

    return micro_loss


def loss_terms(logp: Any, micro: Batch) -> tuple[Any, Any, Any, Any, Any]:
    """What a microbatch's loss compares, and its mask, in the order that `grpo` takes them."""
    return logp, micro.logp_old, micro.logp_ref, micro.advantages, micro.completion_mask


def divisors(micro: Batch, update_tokens: Any) -> Any:
    """What the sums of a microbatch's rows are divided by."""
    return update_tokens if micro.divisors is None else micro.divisors


def scored_inputs(hidden: Any, unembedding: Any, micro: Batch) -> tuple[Any, Any, Any]:
    """What `token_logprobs` takes for a microbatch's completions: position t-1 scores token t."""
    width = micro.completion_mask.shape[-1]
    return hidden[:, -width - 1 : -1], unembedding, micro.tokens[:, -width:]


def make_gradients(
    graphdef: nnx.GraphDef, **options: Any
) -> Callable[[Policies, Any, Batch], tuple[nnx.State, Metrics]]:
    """The gradient of one update's loss, without applying it.

    Args:
        graphdef: the model's static part, from `init_state`.
        **options: those of `make_micro_gradients`.

    Returns:
        `gradients(policies, state, batch) -> (grads, metrics)`: float32 gradients of `state.params`
        accumulated over the microbatches, each divided by the whole update's tokens (methods 1.1),
        and metrics under TRL's names, with `grad_norm_ema`, the state's Ghat, where it has one.
    """
    return sum_micro_gradients(make_micro_gradients(graphdef, **options), update_metrics)


def sum_micro_gradients(
    micro_gradients: Callable[..., Any], metrics: Callable[[nnx.State, Any], Metrics]
) -> Callable[[Policies, Any, Batch], tuple[nnx.State, Metrics]]:
    """`make_gradients` of any gradients of a microbatch, and their metrics from what was seen."""

    def gradients(policies: Policies, state: Any, batch: Batch):
        check_batch(batch)
        update_tokens = jnp.sum(batch.completion_mask, dtype=jnp.float32)

        def accumulate(total, micro):
            grads, seen = micro_gradients(
                policies, state.params, state.frozen, micro, update_tokens
            )
            return add_gradients(total, grads), seen

        grads, seen = jax.lax.scan(accumulate, zero_gradients(state.params), batch)
        used = {} if state.ghat is None else {"grad_norm_ema": state.ghat}
        return grads, {**metrics(grads, seen), **used}

    return gradients


def zero_gradients(params: nnx.State) -> nnx.State:
    """The float32 sum of no microbatch's gradients."""
    return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)


def add_gradients(total: nnx.State, grads: nnx.State) -> nnx.State:
    """The float32 sum with one microbatch more."""
    return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads)


def observe(value, logp, omega, nats, micro: Batch, **loss: Unpack[LossOptions]) -> dict[str, Any]:
    """What the metrics need of one microbatch: sums over its optimized tokens, never means.

    `bad` and `omega`, the coefficients, are `[rows, completion]`; `value` is the loss.
    """
    terms = loss_terms(logp, micro)
    of_ratios: dict[str, Any] = {k: v for k, v in loss.items() if k in _OF_RATIOS}
    finite = jnp.isfinite(logp)
    for term in terms[1:-1]:
        if term is not None:
            finite &= jnp.isfinite(term if term.ndim == 2 else term[:, None])
    gap = None
    if micro.logp_rollout is not None:
        gap = jnp.sum(micro.logp_rollout - logp, where=micro.completion_mask)
    return {
        "loss": value,
        "gap": gap,
        "exposure": exposure(omega, micro.completion_mask),
        "entropy": None if nats is None else jnp.sum(nats, where=micro.completion_mask),
        "ratios": ratio_metrics(*terms, **of_ratios),
        "bad": micro.completion_mask & ~finite,
        "omega": jnp.where(micro.completion_mask, omega, 0),
    }


def update_metrics(grads: nnx.State, seen: dict[str, Any]) -> Metrics:
    """Metrics of an update under TRL's names.

    Args:
        grads: the update's gradients, summed over the microbatches.
        seen: what `observe` returned, stacked over the microbatches.

    Returns:
        Scalars, `rollout_gap` (mean log-prob of the rollouts' policy less the trained one's, nats)
        where the batch has the former, and `micro_exposure` `[micro]` and `omega`
        `[micro, rows, completion]`.
    """
    tables = {"bad": None, "omega": None}
    sums = jax.tree.map(lambda values: jnp.sum(values, axis=0), {**seen, **tables})
    largest = jnp.max(seen["ratios"].is_ratio_max)
    ratios = dataclasses.replace(sums["ratios"], is_ratio_max=largest)
    loss, norm, bad = sums["loss"], optax.tree.norm(grads), seen["bad"].ravel()
    finite = ~jnp.any(bad) & jnp.isfinite(loss) & jnp.isfinite(norm)
    entropy = {}
    if sums["entropy"] is not None:
        entropy["entropy"] = sums["entropy"] / jnp.maximum(ratios.tokens, 1)
    gap = {}
    if sums["gap"] is not None:
        gap["rollout_gap"] = sums["gap"] / jnp.maximum(ratios.tokens, 1)
    return {
        "loss": loss,
        "grad_norm": norm,
        **ratios.means(),
        **entropy,
        **gap,
        "exposure": sums["exposure"],
        "micro_exposure": seen["exposure"],
        "omega": seen["omega"],
        "n_tokens": ratios.tokens,
        "nonfinite": (~finite).astype(jnp.int32),
        "nonfinite_index": jnp.where(jnp.any(bad), jnp.argmax(bad), -1).astype(jnp.int32),
    }
