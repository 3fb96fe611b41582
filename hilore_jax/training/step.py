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
from jaxtyping import Array, Float, Int, Key

from hilore_jax.compiler import compiler_options
from hilore_jax.grpo import token_logprobs
from hilore_jax.grpo.gradient_norm import WEIGHT, first_ghat, next_ghat
from hilore_jax.models.decoder import Decoder
from hilore_jax.training.batch import Batch
from hilore_jax.training.gradients import Metrics, Policies, make_gradients


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
    opt_state: Any  # the optimizer's; of LoGRA, a `training.logra_state.LograState`
    step: Int[Array, ""]  # int32
    key: Key[Array, ""]  # the run's key; randomness of update n is fold_in(key, n)
    ghat: Float[Array, ""] | None = None  # float32, the moving norm that divides calibrated risks


def init_state(
    model: Decoder,
    optimizer: optax.GradientTransformation,
    key: Key[Array, ""],
    norm: float | None = None,
    *,
    trained: Any = None,
) -> tuple[nnx.GraphDef, TrainState]:
    """Splits a model into what trains and what does not, with fresh optimizer state.

    Args:
        model: with LoRA its adapters train; without, every parameter.
        optimizer: its moments are kept in float32, whatever the parameters' dtype.
        key: the run's key.
        norm: mean norm of a calibration's gradients, where the moving average begins to which
            risks are relative; None: no risk is.
        trained: an `nnx` filter of other parameters to train, such as `nnx.PathContains("kernel")`.

    Returns:
        The model's static part and the state. The state shares the model's arrays: donating it
        invalidates the model, so merge the two again instead of keeping the model.
    """
    if trained is None:
        trained = nnx.Param if model.config.lora is None else nnx.LoRAParam
    graphdef, params, frozen = nnx.split(model, trained, ...)
    opt_state = optimizer.init(_float32(params))
    ghat = None if norm is None else first_ghat(norm)
    return graphdef, TrainState(params, frozen, opt_state, jnp.zeros((), jnp.int32), key, ghat)


def make_actor_update(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    max_grad_norm: float | None = 1.0,
    **options: Any,
) -> Callable[[Policies, TrainState, Batch], tuple[TrainState, Metrics]]:
    """One complete actor update: gradients, clipping by global norm, optimizer.

    Without an optimized token the loss is 0 and parameters and optimizer state stay as they are,
    also under weight decay and momentum. With a non-finite loss, gradient or log-prob the whole
    state stays as it is and `metrics["nonfinite"]` is 1; `raise_if_nonfinite` says where.

    Args:
        graphdef: the model's static part, from `init_state`.
        optimizer: e.g. `optax.adamw`; sees float32 gradients and parameters.
        max_grad_norm: gradients are scaled down to this global norm; None leaves them.
        **options: those of `make_micro_gradients`: the loss, `temperature` and others.

    Returns:
        `update(policies, state, batch) -> (state, metrics)`, pure; see `jit_update`.
    """
    gradients = make_gradients(graphdef, **options)
    apply = make_apply(optimizer, max_grad_norm)

    def update(policies: Policies, state: TrainState, batch: Batch):
        grads, metrics = gradients(policies, state, batch)
        return apply(state, grads, metrics), metrics

    return update


def make_apply(
    optimizer: optax.GradientTransformation,
    max_grad_norm: float | None = 1.0,
    norm_weight: float = WEIGHT,
) -> Callable[[TrainState, nnx.State, Metrics], TrainState]:
    """The second half of an update: clipping by global norm, optimizer, and what stays unchanged.

    Args:
        optimizer: sees float32 gradients and parameters.
        max_grad_norm: see `make_actor_update`.
        norm_weight: of the gradient's norm in the moving average, see `grpo.gradient_norm`.

    Returns:
        `apply(state, grads, metrics) -> state`; reads `nonfinite`, `n_tokens` and `grad_norm` of
        the metrics.
    """
    clipper = optax.identity()
    if max_grad_norm is not None:
        clipper = optax.clip_by_global_norm(max_grad_norm)

    def apply(state: TrainState, grads: nnx.State, metrics: Metrics) -> TrainState:
        clipped, _ = clipper.update(grads, clipper.init(grads))
        wide = _float32(state.params)
        step, opt_state = optimizer.update(clipped, state.opt_state, wide)
        params = jax.tree.map(lambda p, s: (p.astype(s.dtype) + s).astype(p.dtype), wide, step)
        params = jax.tree.map(lambda new, old: new.astype(old.dtype), params, state.params)
        finite = metrics["nonfinite"] == 0
        moved = finite & (metrics["n_tokens"] > 0)
        keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(moved, new, old))
        ghat = state.ghat
        if ghat is not None:
            ghat = next_ghat(ghat, metrics["grad_norm"], moved, weight=norm_weight)
        return TrainState(
            params=keep(params, state.params),
            frozen=state.frozen,
            opt_state=keep(opt_state, state.opt_state),
            step=state.step + finite.astype(state.step.dtype),
            key=state.key,
            ghat=ghat,
        )

    return apply


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
    if index < 0 and not np.isfinite(metrics.get("predicted_kl", 0.0)):
        raise FloatingPointError(
            "the predicted KL of this LoGRA step is not finite; the state was left unchanged. The "
            "sketches or the probes' logits overflow: lower update_ratio, compress less, or "
            "compute in float32"
        )
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


def _float32(tree):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
