"""One GRPO actor update as a pure function of (policies, state, batch)."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Int, Key

from hilore_jax.actions import Policy
from hilore_jax.compiler import compiler_options
from hilore_jax.grpo import exposure, loss_and_coefficients, ratio_metrics, token_logprobs
from hilore_jax.models.decoder import Decoder
from hilore_jax.training.batch import Batch, check_batch

Policies = tuple[Policy, ...] | None
Metrics = dict[str, Any]


@typing.no_type_check  # jax puts placeholders in the fields
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything an update reads and writes.

    `step` counts the updates consumed, also those without an optimized token; an update refused
    for a non-finite number leaves it, like everything else, unchanged.
    """

    params: nnx.State  # trainable
    frozen: nnx.State
    opt_state: optax.OptState
    step: Int[Array, ""]  # int32
    key: Key[Array, ""]  # the run's key; randomness of update n is fold_in(key, n)


def init_state(
    model: Decoder, optimizer: optax.GradientTransformation, key: Key[Array, ""]
) -> tuple[nnx.GraphDef, TrainState]:
    """Splits a model into what trains and what does not, with fresh optimizer state.

    Args:
        model: with LoRA its adapters train; without, every parameter.
        optimizer: its moments are kept in float32, whatever the parameters' dtype.
        key: the run's key.

    Returns:
        The model's static part and the state. The state shares the model's arrays: donating it
        invalidates the model, so merge the two again instead of keeping the model.
    """
    trainable = nnx.Param if model.config.lora is None else nnx.LoRAParam
    graphdef, params, frozen = nnx.split(model, trainable, ...)
    opt_state = optimizer.init(_float32(params))
    return graphdef, TrainState(params, frozen, opt_state, jnp.zeros((), jnp.int32), key)


def make_gradients(
    graphdef: nnx.GraphDef,
    *,
    clip: float = 0.2,
    beta: float = 1e-3,
    temperature: float = 1.0,
    entropy: bool = False,
    logprobs: Callable[..., Any] = token_logprobs,
) -> Callable[[Policies, TrainState, Batch], tuple[nnx.State, Metrics]]:
    """The gradient of one update's loss, without applying it.

    Args:
        graphdef: the model's static part, from `init_state`.
        clip: epsilon of the ratio's clipping.
        beta: weight of the K3 reference term.
        temperature: softmax temperature at which tokens are scored.
        entropy: also report the mean entropy of the policy over the optimized tokens, nats; costs
            the reductions over the vocabulary a second time.
        logprobs: scores tokens; another than `token_logprobs` takes no `entropy`.

    Returns:
        `gradients(policies, state, batch) -> (grads, metrics)`: float32 gradients of `state.params`
        accumulated over the microbatches, each divided by the whole update's tokens (methods 1.1),
        and metrics under TRL's names.
    """

    def micro_loss(params, frozen, micro: Batch, update_tokens, policies):
        model = nnx.merge(graphdef, params, frozen)
        hidden = model.hidden(micro.tokens, micro.attention_mask, policies=policies)
        width = micro.completion_mask.shape[-1]
        scored = hidden[:, -width - 1 : -1], model.unembedding(), micro.tokens[:, -width:]
        asked = {"entropy": True} if entropy else {}
        logp = logprobs(*scored, temperature, **asked)
        logp, nats = logp if isinstance(logp, tuple) else (logp, None)
        loss, omega = loss_and_coefficients(
            logp,
            micro.logp_old,
            micro.logp_ref,
            micro.advantages,
            micro.completion_mask,
            update_tokens,
            clip=clip,
            beta=beta,
        )
        return loss, jax.lax.stop_gradient(_observe(loss, logp, omega, nats, micro, clip))

    def gradients(policies: Policies, state: TrainState, batch: Batch):
        check_batch(batch)
        update_tokens = jnp.sum(batch.completion_mask, dtype=jnp.float32)

        def accumulate(total, micro):
            (_, seen), grads = jax.value_and_grad(micro_loss, has_aux=True)(
                state.params, state.frozen, micro, update_tokens, policies
            )
            return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads), seen

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params)
        grads, seen = jax.lax.scan(accumulate, zeros, batch)
        return grads, _metrics(grads, seen)

    return gradients


def make_actor_update(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    clip: float = 0.2,
    beta: float = 1e-3,
    temperature: float = 1.0,
    max_grad_norm: float | None = 1.0,
    entropy: bool = False,
    logprobs: Callable[..., Any] = token_logprobs,
) -> Callable[[Policies, TrainState, Batch], tuple[TrainState, Metrics]]:
    """One complete actor update: gradients, clipping by global norm, optimizer.

    Without an optimized token the loss is 0 and parameters and optimizer state stay as they are,
    also under weight decay and momentum. With a non-finite loss, gradient or log-prob the whole
    state stays as it is and `metrics["nonfinite"]` is 1; `raise_if_nonfinite` says where.

    Args:
        graphdef: the model's static part, from `init_state`.
        optimizer: e.g. `optax.adamw`; sees float32 gradients and parameters.
        clip: epsilon of the ratio's clipping.
        beta: weight of the K3 reference term.
        temperature: softmax temperature of the rollouts, at which tokens are scored.
        max_grad_norm: gradients are scaled down to this global norm; None leaves them.
        entropy: see `make_gradients`.
        logprobs: see `make_gradients`.

    Returns:
        `update(policies, state, batch) -> (state, metrics)`, pure; see `jit_update`.
    """
    gradients = make_gradients(
        graphdef,
        clip=clip,
        beta=beta,
        temperature=temperature,
        entropy=entropy,
        logprobs=logprobs,
    )
    clipper = optax.identity()
    if max_grad_norm is not None:
        clipper = optax.clip_by_global_norm(max_grad_norm)

    def update(policies: Policies, state: TrainState, batch: Batch):
        grads, metrics = gradients(policies, state, batch)
        clipped, _ = clipper.update(grads, clipper.init(grads))
        wide = _float32(state.params)
        step, opt_state = optimizer.update(clipped, state.opt_state, wide)
        params = jax.tree.map(lambda p, s: (p.astype(s.dtype) + s).astype(p.dtype), wide, step)
        params = jax.tree.map(lambda new, old: new.astype(old.dtype), params, state.params)
        finite = metrics["nonfinite"] == 0
        moved = finite & (metrics["n_tokens"] > 0)
        keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(moved, new, old))
        return TrainState(
            params=keep(params, state.params),
            frozen=state.frozen,
            opt_state=keep(opt_state, state.opt_state),
            step=state.step + finite.astype(state.step.dtype),
            key=state.key,
        ), metrics

    return update


def jit_update(update: Callable[..., Any]) -> Any:
    """`jax.jit` of an update: policies static, state donated, remat's compiler options."""
    return jax.jit(update, static_argnums=0, donate_argnums=1, compiler_options=compiler_options())


def make_score(graphdef: nnx.GraphDef, *, temperature: float = 1.0) -> Callable[..., Any]:
    """Log-probs of completions without gradients, microbatch by microbatch.

    Returns:
        `score(params, frozen, tokens, attention_mask, completion=...)` with `[micro, rows, seq]`
        arrays, jitted once per shape, to float32 `[micro, rows, completion]`. Used for the old
        policy and, with other parameters, for the reference.
    """

    def score(params, frozen, tokens, attention_mask, completion):
        model = nnx.merge(graphdef, params, frozen)

        def one(micro):
            hidden = model.hidden(*micro)[:, -completion - 1 : -1]
            targets = micro[0][:, -completion:]
            return token_logprobs(hidden, model.unembedding(), targets, temperature)

        return jax.lax.map(one, (tokens, attention_mask))

    return jax.jit(score, static_argnames="completion", compiler_options=compiler_options())


def raise_if_nonfinite(metrics: Metrics, batch: Batch) -> None:
    """Raises FloatingPointError, naming row and position, if the update met a non-finite number."""
    if not int(metrics["nonfinite"]):
        return
    index = int(metrics["nonfinite_index"])
    if index < 0:
        raise FloatingPointError(
            "the loss or a gradient of this update is not finite although every optimized token's "
            "log-prob is; the state was left unchanged. Lower the learning rate, compress less, or "
            "compute in float32"
        )
    micro, row, position = np.unravel_index(index, batch.completion_mask.shape)
    raise FloatingPointError(
        f"a log-prob or advantage is not finite at row {micro * batch.tokens.shape[1] + row} "
        f"(microbatch {micro}, row {row}), completion position {position}; the state was left "
        "unchanged. Check the weights, the old and reference log-probs and the rewards"
    )


def _observe(loss, logp, omega, nats, micro: Batch, clip: float) -> dict[str, Any]:
    """What the metrics need of one microbatch: sums over its optimized tokens, never means."""
    terms = (logp, micro.logp_old, micro.logp_ref, micro.advantages)
    finite = jnp.isfinite(logp)
    for term in terms[1:]:
        if term is not None:
            finite &= jnp.isfinite(term if term.ndim == 2 else term[:, None])
    return {
        "loss": loss,
        "exposure": exposure(omega, micro.completion_mask),
        "entropy": None if nats is None else jnp.sum(nats, where=micro.completion_mask),
        "ratios": ratio_metrics(*terms, micro.completion_mask, clip),
        "bad": micro.completion_mask & ~finite,
    }


def _metrics(grads, seen: dict[str, Any]) -> Metrics:
    sums = jax.tree.map(lambda values: jnp.sum(values, axis=0), {**seen, "bad": None})
    largest = jnp.max(seen["ratios"].is_ratio_max)
    ratios = dataclasses.replace(sums["ratios"], is_ratio_max=largest)
    loss, norm, bad = sums["loss"], optax.tree.norm(grads), seen["bad"].ravel()
    finite = ~jnp.any(bad) & jnp.isfinite(loss) & jnp.isfinite(norm)
    entropy = {}
    if sums["entropy"] is not None:
        entropy["entropy"] = sums["entropy"] / jnp.maximum(ratios.tokens, 1)
    return {
        "loss": loss,
        "grad_norm": norm,
        **ratios.means(),
        **entropy,
        "exposure": sums["exposure"],
        "n_tokens": ratios.tokens,
        "nonfinite": (~finite).astype(jnp.int32),
        "nonfinite_index": jnp.where(jnp.any(bad), jnp.argmax(bad), -1).astype(jnp.int32),
    }


def _float32(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
