"""How a run's update is carried out: what a learner compiles and calls."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import optax
from flax import nnx

from hilore_jax.actions import Policy
from hilore_jax.compiler import compiler_options
from hilore_jax.models.config import DecoderConfig
from hilore_jax.planning.ladder import Ladder
from hilore_jax.planning.plan import Plan
from hilore_jax.planning.refined import refined_segments
from hilore_jax.training.batch import Batch
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.gated import sum_gated_gradients
from hilore_jax.training.gradients import make_gradients
from hilore_jax.training.laddered import LadderedUpdate, one_bucket
from hilore_jax.training.load import load_file
from hilore_jax.training.logra_config import dense_optimizer, settings_of
from hilore_jax.training.logra_strategy import SketchedUpdate
from hilore_jax.training.loss_config import loss_options
from hilore_jax.training.planned import gate_options, load_plan, refuse_rejected, run_policies
from hilore_jax.training.report import kept_bytes
from hilore_jax.training.situation import check_blocks
from hilore_jax.training.step import TrainState, jit_update, make_apply

_LOG = logging.getLogger("hilore_jax")

Update = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]


@runtime_checkable
class Strategy(Protocol):
    """What carries out updates.

    Attributes:
        n_traces: programs traced so far.
        about: figures of what was compiled, the same in every line of metrics.
    """

    n_traces: int
    about: dict[str, int | None]

    def compile(self, state: TrainState, batch: Batch) -> Update:
        """`update(state, batch) -> (state, metrics)`, compiled once; it donates the state."""
        ...

    def gradient(
        self, state: TrainState, batch: Batch, *, exact: bool = False
    ) -> tuple[nnx.State, dict[str, Any]]:
        """The update's gradient before clipping, and its metrics; `exact`: all recomputed."""
        ...


class StaticUpdate:
    """The whole update as one program, every microbatch under the same policies.

    Args:
        graphdef: the model's static part.
        optimizer: of the trained parameters.
        policies: one a block.
        gate: what `make_gated_gradients` needs besides the options, for a gate.
        max_grad_norm: as in `make_actor_update`.
        **options: those of `make_micro_gradients`.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        optimizer: optax.GradientTransformation,
        policies: tuple[Policy, ...],
        gate: Mapping[str, Any] | None = None,
        max_grad_norm: float | None = 1.0,
        **options: Any,
    ):
        self.n_traces = 0
        self.about: dict[str, int | None] = {}
        self._compiled: Update | None = None
        self._policies = policies
        exact = planned = make_gradients(graphdef, **options)
        if gate is not None:
            planned = sum_gated_gradients(graphdef, **gate, **options)
        apply = make_apply(optimizer, max_grad_norm)

        def counted(policies: tuple[Policy, ...], state: TrainState, batch: Batch):
            self.n_traces += 1
            grads, metrics = planned(policies, state, batch)
            return apply(state, grads, metrics), metrics

        self._lower = functools.partial(jit_update(counted).lower, policies)
        jitted = functools.partial(jax.jit, static_argnums=0, compiler_options=compiler_options())
        self._planned, self._exact = jitted(planned), jitted(exact)

    def compile(self, state: TrainState, batch: Batch) -> Update:
        """The compiled update; `about` then holds `update_temp_bytes`, which XLA reports."""
        if self._compiled is None:
            compiled = self._lower(state, batch).compile()
            analysis = compiled.memory_analysis()
            temp = None if analysis is None else int(analysis.temp_size_in_bytes)
            self.about = {"update_temp_bytes": temp}
            self._compiled = compiled
            return compiled
        return self._compiled

    def gradient(
        self, state: TrainState, batch: Batch, *, exact: bool = False
    ) -> tuple[nnx.State, dict[str, Any]]:
        """The update's gradient before clipping, without applying it.

        Args:
            state: left as it is.
            batch: the complete update.
            exact: everything recomputed.

        Returns:
            The gradient and its metrics. Compiled at the first call, apart from the update.
        """
        if exact:
            return self._exact((Policy({}),) * len(self._policies), state, batch)
        return self._planned(self._policies, state, batch)


def plans(config: TrainConfig, shape: DecoderConfig) -> tuple[tuple[Policy, ...], ...]:
    """The policies that a run may use, one a block, the most compressed first.

    Raises:
        ValueError: a plan or a ladder that is not for the model, or that acceptance rejected,
            unless the settings allow that.
    """
    found = loaded_plans(config, shape)
    return tuple(made.policies for made in found) or (run_policies(config, shape),)


def loaded_plans(config: TrainConfig, shape: DecoderConfig) -> tuple[Plan, ...]:
    """The plans of the run's files: a ladder's, one, or none.

    Raises:
        ValueError: see `plans`.
    """
    ladder = load_ladder(config)
    if ladder is None:
        return (load_plan(config, shape),) if config.plan else ()
    first = ladder.plans[0]
    check_blocks(first.fingerprint, len(first.policies), shape, "ladder")
    for edge, made in zip(ladder.edges, ladder.plans, strict=True):
        where = f"the plan of the bucket up to exposure {edge:g} in {config.ladder}"
        refuse_rejected(config, made, where)
    return ladder.plans


def load_ladder(config: TrainConfig) -> Ladder | None:
    """The ladder that the settings name."""
    return load_file(config.ladder, "ladder", "--ladder") if config.ladder else None


def calibrated_norm(config: TrainConfig, shape: DecoderConfig) -> float | None:
    """Where the moving average begins to which the run's risks are relative.

    Args:
        config: the run's settings.
        shape: of the model.

    Returns:
        Ghat of the calibration behind the run's files. None: no risk was calibrated in a form that
        has it, the settings keep it fixed, or the files are too old to hold it, which is logged.
    """
    found = loaded_plans(config, shape)
    if config.fixed_gradient_norm or not found:
        return None
    first = found[0]
    if first.norm is None and first.block_risks is not None and not first.paper:
        _LOG.warning(
            "%s was written before plans kept the gradient norm of their calibration: risks stay "
            "relative to that norm throughout the run. Plan again to have them follow the run's.",
            config.ladder or config.plan,
        )
    return first.norm


def segment_lengths(config: TrainConfig, shape: DecoderConfig) -> tuple[int, ...]:
    """Stacks of blocks that no plan of the run has to cut."""
    return refined_segments(plans(config, shape))


def make_strategy(
    config: TrainConfig,
    shape: DecoderConfig,
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
) -> Strategy:
    """The way in which the settings ask for updates.

    Args:
        config: the run's settings.
        shape: of the model; with sketches for LoGRA.
        graphdef: the model's static part, its stacks in `segment_lengths`.
        optimizer: of the trained parameters.
    """
    options: dict[str, Any] = {
        **loss_options(config),
        "temperature": config.temperature or 1.0,
        "max_grad_norm": config.max_grad_norm,
        "entropy": config.log_entropy,
    }
    if config.entropy_coef:  # never with exposures, `loss_config.loss_faults`
        options["entropy_coef"] = config.entropy_coef
    if shape.sketches is not None:
        return SketchedUpdate(
            shape,
            segment_lengths(config, shape),
            plans(config, shape)[0],
            settings_of(config),
            dense=dense_optimizer(config, optimizer),
            factors=bool(config.sync),
            **options,
        )
    ladder, policies = load_ladder(config), plans(config, shape)
    if config.gate:
        gate = {"risk": config.risk, **gate_options(load_plan(config, shape))}
        return StaticUpdate(graphdef, optimizer, policies[0], gate, **options)
    if ladder is None and not (config.skip_rows or config.pack_by_exposure):
        return StaticUpdate(graphdef, optimizer, policies[0], **options)
    buckets = one_bucket(policies[0])[0] if ladder is None else ladder.buckets
    options |= {"skip_rows": config.skip_rows, "pack_by_exposure": config.pack_by_exposure}
    return LadderedUpdate(graphdef, optimizer, buckets, policies, **options)


def most_kept_bytes(
    config: TrainConfig, shape: DecoderConfig, rows: int, seq: int
) -> dict[str, int]:
    """`kept_bytes` of the run's policies; of a ladder, the most that any plan keeps of each."""
    found = [
        kept_bytes(shape, policies, rows, seq) for policies in dict.fromkeys(plans(config, shape))
    ]
    return {name: max(one[name] for one in found) for name in found[0]}
