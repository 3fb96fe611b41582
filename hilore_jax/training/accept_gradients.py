"""Gradients of complete held-out updates, whole and microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hilore_jax.actions import Policy
from hilore_jax.compiler import compiler_options
from hilore_jax.training.batch import Batch
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.gradients import add_gradients, make_micro_gradients, zero_gradients
from hilore_jax.training.rollouts import Measured


def update_gradients(data: Measured, config: TrainConfig) -> Callable[..., tuple[Any, Any]]:
    """`gradients(policies, batch) -> (gradient, exposures)` of complete updates, jitted.

    Args:
        data: the model, and the updates it is for.
        config: clipping, the weight of the reference term, and temperature.
    """
    micro_gradients = _micro_gradients(data, config)

    def gradients(policies: Sequence[Policy], params: Any, frozen: Any, batch: Batch):
        tokens = update_tokens(batch)

        def accumulate(total, micro):
            grads, seen = micro_gradients(policies, params, frozen, micro, tokens)
            return add_gradients(total, grads), seen["exposure"]

        return jax.lax.scan(accumulate, zero_gradients(params), batch)

    jitted = jax.jit(gradients, static_argnums=0, compiler_options=compiler_options())
    return lambda policies, batch: jitted(tuple(policies), data.params, data.frozen, batch)


def mixed_gradients(data: Measured, config: TrainConfig) -> Callable[..., Any]:
    """`gradient(policies, batch)` of complete updates, one policy tuple for each microbatch.

    As in laddered training there is one program for each different tuple.

    Args:
        data: as for `update_gradients`.
        config: as there.
    """
    micro_gradients = _micro_gradients(data, config)

    def step(policies, total, params, frozen, batch, index, tokens):
        micro = jax.tree.map(lambda x: x[index], batch)
        return add_gradients(total, micro_gradients(policies, params, frozen, micro, tokens)[0])

    jitted = jax.jit(step, static_argnums=0, donate_argnums=1, compiler_options=compiler_options())

    def gradient(policies: Sequence[Sequence[Policy]], batch: Batch) -> Any:
        count = batch.tokens.shape[0]
        if len(policies) != count:
            raise ValueError(f"{len(policies)} policy tuples for {count} microbatches")
        total, tokens = zero_gradients(data.params), update_tokens(batch)
        for index, each in enumerate(policies):
            total = jitted(
                tuple(each), total, data.params, data.frozen, batch, jnp.int32(index), tokens
            )
        return total

    return gradient


def update_tokens(batch: Batch) -> Any:
    """N, the optimized tokens of a complete update, float32."""
    return jnp.sum(batch.completion_mask, dtype=jnp.float32)


def _micro_gradients(data: Measured, config: TrainConfig) -> Callable[..., tuple[Any, Any]]:
    return make_micro_gradients(
        data.graphdef, clip=config.clip, beta=config.beta, temperature=config.temperature
    )
