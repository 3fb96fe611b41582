"""One LoGRA actor update: sketches over microbatches, a proposal, its size by KL, the merge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float

from hilore_jax.grpo.gradient_norm import next_ghat
from hilore_jax.logra.merge import ROWS
from hilore_jax.logra.proposal import (
    Proposal,
    factor_square,
    grams_of,
    move_stack,
    propose,
    weight_square,
)
from hilore_jax.logra.row_adam import is_usable
from hilore_jax.logra.step_control import kl_budget, less_mismatch, next_mismatch, step_control
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.sharding import is_cut
from hilore_jax.models.sketched import sketched_stacks, stack_keys, stacked
from hilore_jax.training.batch import Batch
from hilore_jax.training.gradients import Metrics, Policies, make_gradients
from hilore_jax.training.logra_probe import (
    displacement,
    mean_predicted_kl,
    mean_realized_kl,
    probe_hidden,
    probes_of,
)
from hilore_jax.training.logra_state import (
    LograSettings,
    LograState,
    Sketching,
    as_float32,
    dense_part,
    sketched_graphdef,
    sketching,
    with_kernels,
)
from hilore_jax.training.step import TrainState


class _Control(NamedTuple):
    """What step control found."""

    alpha: Float[Array, ""]
    usable: Bool[Array, ""]
    metrics: Metrics
    states: Array | None  # of the probes, before the step


def make_sketch_gradients(
    config: DecoderConfig, segments: tuple[int, ...], **options: Any
) -> Callable[[Policies, TrainState, Batch], tuple[nnx.State, Metrics]]:
    """The sketches of one update's gradient, without applying them.

    Args:
        config: of the sketched model.
        segments: blocks in each of its stacks.
        **options: those of `make_micro_gradients`.

    Returns:
        `gradients(policies, state, batch) -> (sketches, metrics)`: a state whose leaves are slots,
        and dense parameters where they train; float32.
    """
    inner = make_gradients(sketched_graphdef(config, segments), **options)
    stacks = sketched_stacks(config, segments)

    def gradients(policies: Policies, state: TrainState, batch: Batch):
        keys = _keys(config, stacks, state)
        return inner(policies, sketching(config, stacks, keys, state), batch)  # pyright: ignore

    return gradients


def make_logra_update(
    config: DecoderConfig,
    segments: tuple[int, ...],
    settings: LograSettings,
    *,
    dense: optax.GradientTransformation | None = None,
    max_grad_norm: float | None = 1.0,
    temperature: float = 1.0,
    factors: bool = False,
    **options: Any,
) -> Callable[[Policies, TrainState, Batch], tuple[TrainState, Metrics]]:
    """One complete LoGRA update (arXiv 2610.06647; methods 2).

    Sketches that are zero, or no optimized token, leave the weights and the optimizer's state as
    they are, bit for bit. With a loss, gradient, log-prob or predicted KL that is not finite the
    whole state stays as it is and `metrics["nonfinite"]` is 1.

    Args:
        config: of the sketched model, `models.sketched.sketched_config`.
        segments: blocks in each of its stacks.
        settings: the step's size.
        dense: the optimizer of all other parameters, as in `init_logra_state`; they are not part
            of the predicted KL.
        max_grad_norm: see `logra.proposal.propose`.
        temperature: softmax temperature of the rollouts.
        factors: also return F of each stack, `metrics["factors"]`, bfloat16 `[n, out, rank]`.
        **options: others of `make_micro_gradients`.

    Returns:
        `update(policies, state, batch) -> (state, metrics)`, pure; `state` is
        `init_logra_state`'s. Metrics are those of `make_actor_update`, `grad_norm` estimated by
        the norm of the sketches, and `sketch_norm` (of `S A`), `update_ratio` (of what is really
        moved), `alpha`, and with step control `predicted_kl` (of the step made), `kl_budget`,
        `mismatch` and, if asked for, `realized_kl` (not a number where it is not due).

    Raises:
        ValueError: a config without sketches.
    """
    if config.sketches is None:
        raise ValueError("make_logra_update needs a config with sketches, found None")
    sketches = config.sketches.sketches
    stacks = sketched_stacks(config, segments)
    graphdef = sketched_graphdef(config, segments)
    gradients = make_gradients(graphdef, temperature=temperature, **options)
    widths = {stack.name: stack.shape[0] for stack in stacks}

    def control(view: Sketching, state: TrainState, batch: Batch, made: Proposal, gap) -> _Control:
        one = jnp.ones((), jnp.float32)
        if not settings.step_control:
            return _Control(one, jnp.bool_(True), {}, None)
        probes = probes_of(batch)
        states, moved, head = displacement(graphdef, view, probes, made.d)
        q = mean_predicted_kl(states, moved, head, probes, temperature)
        mismatch = state.opt_state.mismatch
        mismatch = mismatch if gap is None else next_mismatch(mismatch, gap)
        first, last = settings.kl_budget
        budget = kl_budget(state.step + 1, first=first, last=last, updates=settings.kl_updates)
        budget = less_mismatch(budget, mismatch)
        alpha, usable = step_control(q, budget, alpha_max=settings.alpha_max)
        # A predicted KL that cannot be used is shown as it is: it names what went wrong.
        shown = jnp.where(usable, alpha**2, 1.0) * q
        found = {"predicted_kl": shown, "kl_budget": budget, "mismatch": mismatch}
        return _Control(alpha, usable, found, states)

    def realized(moved: Sketching, number: Array, batch: Batch, states: Array) -> Array:
        probes = probes_of(batch)

        def measure() -> Array:
            after, head = probe_hidden(graphdef, moved.params, moved.frozen, probes)
            return mean_realized_kl(states, after, head, probes, temperature)

        due = number % settings.realized_kl_every == 0
        return jax.lax.cond(due, measure, lambda: jnp.float32(jnp.nan))

    def update(policies: Policies, state: TrainState, batch: Batch):
        keys = _keys(config, stacks, state)
        view = sketching(config, stacks, keys, state)
        grads, metrics = gradients(policies, view, batch)  # pyright: ignore[reportArgumentType]
        old: LograState = state.opt_state
        kernels = {name: stacked(state.params, "kernel")[name] for name in widths}
        found, rest = stacked(grads, "slot"), dense_part(grads, widths)
        grams, weights = grams_of(sketches, keys, widths), weight_square(kernels)
        made = propose(
            found,
            grams,
            old.v,
            old.count + 1,
            weight_square=weights,
            ratio=settings.update_ratio,
            max_norm=max_grad_norm,
            dense_gradient_square=optax.tree.norm(rest, squared=True) if dense else 0.0,
            b2=settings.b2,
        )
        controlled = control(view, state, batch, made, metrics.pop("rollout_gap", None))
        finite = (metrics["nonfinite"] == 0) & controlled.usable
        _, some = is_usable(found)
        moves = finite & (metrics["n_tokens"] > 0) & some
        f = {
            name: jnp.where(moves, controlled.alpha * d, 0.0).astype(jnp.bfloat16)
            for name, d in made.d.items()
        }
        rows = None if is_cut() else ROWS
        new = {
            name: move_stack(kernels[name], f[name], keys[name], sketches, moves, rows=rows)
            for name in f
        }
        params = with_kernels(state.params, new)
        inner = old.dense
        if dense is not None:
            params, inner = _step_dense(dense, params, rest, made.clip, inner, widths, moves)
        # Kernels that are all zero move nowhere: the proposal is relative to them.
        ratio = jnp.sqrt(factor_square(f, grams) / jnp.where(weights == 0, 1.0, weights))
        metrics |= {
            "nonfinite": (~finite).astype(jnp.int32),
            "sketch_norm": made.sketch_norm,
            "update_ratio": ratio,
            "alpha": controlled.alpha,
            **controlled.metrics,
        }
        mismatch = controlled.metrics.get("mismatch", old.mismatch)
        opt_state = LograState(
            old.count + moves.astype(jnp.int32),
            {name: jnp.where(moves, made.v[name], old.v[name]) for name in made.v},
            jnp.where(moves, mismatch, old.mismatch),
            inner,
        )
        ghat = state.ghat
        if ghat is not None:
            ghat = next_ghat(ghat, metrics["grad_norm"], moves)
        after = dataclasses.replace(
            state,
            params=params,
            opt_state=opt_state,
            step=state.step + finite.astype(state.step.dtype),
            ghat=ghat,
        )
        if controlled.states is not None and settings.realized_kl_every:
            moved = sketching(config, stacks, keys, after)
            metrics["realized_kl"] = realized(moved, state.step, batch, controlled.states)
        return after, metrics | ({"factors": f} if factors else {})

    return update


def _keys(config: DecoderConfig, stacks: Any, state: TrainState) -> dict[str, Array]:
    assert config.sketches is not None
    return stack_keys(stacks, config.sketches.sketches, state.step)


def _step_dense(
    dense: optax.GradientTransformation,
    params: nnx.State,
    grads: nnx.State,
    clip: Array,
    opt_state: Any,
    names: Mapping[str, Any],
    moves: Array,
) -> tuple[nnx.State, Any]:
    """The dense optimizer's step for all parameters but the sketched kernels."""
    held = dense_part(params, names)
    clipped = jax.tree.map(lambda g: g * clip, grads)
    step, after = dense.update(clipped, opt_state, as_float32(held))

    def move(old: Array, step: Array) -> Array:
        return jnp.where(moves, (old.astype(step.dtype) + step).astype(old.dtype), old)

    kept = jax.tree.map(lambda new, old: jnp.where(moves, new, old), after, opt_state)
    return nnx.merge_state(params, jax.tree.map(move, held, step)), kept
