"""How a LoGRA run's updates are carried out: one compiled program, under static policies."""

from __future__ import annotations

import functools
from typing import Any

import jax
import optax
from flax import nnx

from hilore_jax.actions import Policy
from hilore_jax.compiler import compiler_options
from hilore_jax.models.config import DecoderConfig
from hilore_jax.training.batch import Batch
from hilore_jax.training.logra_state import LograSettings
from hilore_jax.training.logra_update import make_logra_update, make_sketch_gradients
from hilore_jax.training.step import TrainState, jit_update


class SketchedUpdate:
    """The whole LoGRA update as one program, every microbatch under the same policies.

    Args:
        config: of the sketched model.
        segments: blocks in each of its stacks.
        policies: one a block.
        settings: the step's size.
        dense: the optimizer of parameters without sketches; None freezes them.
        max_grad_norm: as for `make_logra_update`.
        factors: also return the factors, for packets.
        **options: those of `make_micro_gradients`.

    Attributes:
        n_traces: how often the update was traced.
        about: `update_temp_bytes`, which XLA reports of it.
    """

    def __init__(
        self,
        config: DecoderConfig,
        segments: tuple[int, ...],
        policies: tuple[Policy, ...],
        settings: LograSettings,
        *,
        dense: optax.GradientTransformation | None = None,
        max_grad_norm: float | None = 1.0,
        factors: bool = False,
        **options: Any,
    ):
        self.n_traces = 0
        self.about: dict[str, int | None] = {}
        self._compiled: Any = None
        self._policies = policies
        update = make_logra_update(
            config,
            segments,
            settings,
            dense=dense,
            max_grad_norm=max_grad_norm,
            factors=factors,
            **options,
        )

        def counted(policies: tuple[Policy, ...], state: TrainState, batch: Batch):
            self.n_traces += 1
            return update(policies, state, batch)

        self._lower = functools.partial(jit_update(counted).lower, policies)
        gradients = make_sketch_gradients(config, segments, **options)
        self._gradients = jax.jit(gradients, static_argnums=0, compiler_options=compiler_options())

    def compile(self, state: TrainState, batch: Batch) -> Any:
        """The update `(state, batch) -> (state, metrics)`, compiled once; it donates the state."""
        if self._compiled is None:
            self._compiled = self._lower(state, batch).compile()
            analysis = self._compiled.memory_analysis()
            temp = None if analysis is None else int(analysis.temp_size_in_bytes)
            self.about = {"update_temp_bytes": temp}
        return self._compiled

    def gradient(
        self, state: TrainState, batch: Batch, *, exact: bool = False
    ) -> tuple[nnx.State, dict[str, Any]]:
        """The update's sketches before clipping, without applying them; `exact`: all recomputed.

        The relative error of sketches is, in the mean, that of the gradients.
        """
        policies = (Policy({}),) * len(self._policies) if exact else self._policies
        return self._gradients(policies, state, batch)
