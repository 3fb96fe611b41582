"""What a LoGRA run keeps between updates, and the sketched model that an update makes of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from hilore_jax.grpo.gradient_norm import first_ghat
from hilore_jax.logra.linear import SketchKey, SketchSlot
from hilore_jax.models.adapters import abstract_decoder
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.models.sharding import by_outputs
from hilore_jax.models.sketched import SketchedStack, sketched_stacks
from hilore_jax.training.step import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class LograSettings:
    """How large a step is.

    Attributes:
        update_ratio: norm of a proposal over that of the kernels, all layers together.
        b2: decay of RowAdam's second moments.
        step_control: measure the proposal's predicted KL and scale it to the budget.
        kl_budget: KL that an update may cause, nats a token, at the first update and at the last
            of `kl_updates`.
        kl_updates: length of the budget's descent, updates.
        alpha_max: the most that step control enlarges a proposal.
        realized_kl_every: updates between measurements of the KL that a step really caused; 0
            never measures.

    Raises:
        ValueError: a number that is not above 0.

    Example:
        >>> LograSettings(kl_budget=(1e-3, 1e-4)).alpha_max
        3.0
    """

    update_ratio: float = 6e-5
    b2: float = 0.95
    step_control: bool = True
    kl_budget: tuple[float, float] = (2e-4, 2e-5)
    kl_updates: int = 300
    alpha_max: float = 3.0
    realized_kl_every: int = 0

    def __post_init__(self):
        above = {"update_ratio": self.update_ratio, "alpha_max": self.alpha_max}
        above |= dict(zip(("first kl_budget", "last kl_budget"), self.kl_budget, strict=True))
        wrong = [f"{name} {x:g}" for name, x in above.items() if not 0 < x < math.inf]
        if wrong or self.kl_updates < 1 or not 0 <= self.b2 < 1 or self.realized_kl_every < 0:
            raise ValueError(
                f"LoGRA's {', '.join(wrong) or self}: expected finite numbers above 0, b2 from 0 "
                "and below 1, kl_updates of at least 1, realized_kl_every of at least 0"
            )


class LograState(NamedTuple):
    """The optimizer's state: nothing of a weight's size but what `dense` holds.

    Attributes:
        count: updates that moved the weights.
        v: root of RowAdam's second moments, `[n, out]` for each `SketchedStack.name`.
        mismatch: moving average of the rollouts' mismatch, nats a token.
        dense: the dense optimizer's, where it trains all other parameters; else None.
    """

    count: Int[Array, ""]
    v: Mapping[str, Float[Array, "n d_out"]]
    mismatch: Float[Array, ""]
    dense: optax.OptState | None


class Sketching(NamedTuple):
    """A `TrainState` as `make_gradients` reads it, for one update."""

    params: nnx.State  # slots of zeros, and dense parameters where they train
    frozen: nnx.State  # all others, kernels and keys of the sketched maps among them
    ghat: Float[Array, ""] | None


def init_logra_state(
    model: Decoder,
    config: DecoderConfig,
    key: Key[Array, ""],
    *,
    dense: optax.GradientTransformation | None = None,
    norm: float | None = None,
) -> tuple[nnx.GraphDef, TrainState]:
    """A LoGRA run's first state; `params` are the weights that it moves.

    Args:
        model: without sketches or adapters.
        config: its config with sketches, `models.sketched.sketched_config`.
        key: the run's key.
        dense: trains biases, norms, embedding, head and what has no sketch; None freezes them.
        norm: as for `training.step.init_state`.

    Returns:
        The model's static part (that of `model`: for rollouts and scores) and the state, which
        shares its arrays.

    Raises:
        ValueError: a model with sketches or adapters.
    """
    if model.config.sketches is not None or model.config.lora is not None:
        raise ValueError(
            "init_logra_state takes a plain decoder and the config of the sketched one, found a "
            f"decoder with {model.config.sketches or model.config.lora}"
        )
    targets = config.sketched_linears

    def is_target(path: tuple[Any, ...], value: Any) -> bool:
        del value
        return path[0] == "segments" and path[2] in targets and path[-1] == "kernel"

    trained = is_target if dense is None else nnx.Param
    graphdef, params, frozen = nnx.split(model, trained, ...)
    v = {
        stack.name: jnp.zeros((stack.count, stack.shape[1]), jnp.float32)
        for stack in sketched_stacks(config, model.segment_lengths)
    }
    inner = None
    if dense is not None:
        inner = dense.init(as_float32(dense_part(params, v)))
    zero = jnp.zeros((), jnp.float32)
    opt_state = LograState(jnp.zeros((), jnp.int32), v, zero, inner)
    ghat = None if norm is None else first_ghat(norm)
    return graphdef, TrainState(params, frozen, opt_state, jnp.zeros((), jnp.int32), key, ghat)


def sketched_graphdef(config: DecoderConfig, segments: tuple[int, ...]) -> nnx.GraphDef:
    """The sketched model's static part; its state is a `Sketching`'s two parts together."""
    return nnx.split(abstract_decoder(config, segments))[0]


def sketching(
    config: DecoderConfig,
    stacks: tuple[SketchedStack, ...],
    keys: Mapping[str, Array],
    state: TrainState,
) -> Sketching:
    """The sketched model of one update.

    Args:
        config: with sketches.
        stacks: all of the model's.
        keys: of this update's projections, `[n, 2]` a stack.
        state: of `init_logra_state`.

    Returns:
        What trains, slots of zeros in the place of kernels, and what does not.
    """
    if config.sketches is None:
        raise ValueError("sketching needs a config with sketches, found None")
    rank = config.sketches.sketches.rank
    slots, drawn = {}, {}
    for stack in stacks:
        path = ("segments", stack.segment, stack.linear)
        slots[*path, "slot"] = SketchSlot(
            by_outputs(jnp.zeros((stack.count, stack.shape[1], rank), jnp.float32))
        )
        drawn[*path, "key"] = SketchKey(keys[stack.name])
    params, frozen = nnx.from_flat_state(slots), [state.frozen, nnx.from_flat_state(drawn)]
    names = {stack.name for stack in stacks}
    if state.opt_state.dense is None:
        frozen.append(state.params)
    else:
        params = nnx.merge_state(params, dense_part(state.params, names))
        frozen.append(kernel_part(state.params, names))
    return Sketching(params, nnx.merge_state(*frozen), state.ghat)


def kernel_part(params: nnx.State, names: Any) -> nnx.State:
    """Of a run's parameters the kernels of the named stacks."""
    return _part(params, names, True)


def dense_part(params: nnx.State, names: Any) -> nnx.State:
    """Of a run's parameters, or of their gradients, all but the named stacks'."""
    return _part(params, names, False)


def _part(params: nnx.State, names: Any, sketched: bool) -> nnx.State:
    flat = {
        path: variable
        for path, variable in nnx.to_flat_state(params)
        if (path[-1] in ("kernel", "slot") and f"{path[1]}.{path[2]}" in names) == sketched
    }
    return nnx.from_flat_state(flat)


def with_kernels(params: nnx.State, kernels: Mapping[str, Array]) -> nnx.State:
    """A run's parameters with other kernels in the named stacks."""
    flat = {}
    for path, variable in nnx.to_flat_state(params):
        name = f"{path[1]}.{path[2]}" if path[-1] == "kernel" else ""
        flat[path] = variable.copy(kernels[name]) if name in kernels else variable
    return nnx.from_flat_state(flat)


def with_slots(params: nnx.State, slots: Mapping[str, Array]) -> nnx.State:
    """A sketched model's parameters, zeros but for the slots: a tangent of them."""
    flat = {}
    for path, variable in nnx.to_flat_state(params):
        value = variable.get_value()
        new = slots[f"{path[1]}.{path[2]}"] if path[-1] == "slot" else jnp.zeros_like(value)
        flat[path] = variable.copy(new)
    return nnx.from_flat_state(flat)


def as_float32(tree: Any) -> Any:
    """The tree in float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
