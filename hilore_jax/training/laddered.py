"""An update microbatch by microbatch, each under the plan that its exposure allows."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from hilore_jax.actions import Policy
from hilore_jax.compiler import compiler_options
from hilore_jax.grpo import dead_rows, estimate_exposure
from hilore_jax.grpo.terms import LossOptions
from hilore_jax.planning.buckets import Buckets
from hilore_jax.training.attempts import Attempts
from hilore_jax.training.batch import Batch, check_batch
from hilore_jax.training.gradients import (
    add_gradients,
    divisors,
    make_micro_gradients,
    update_metrics,
    zero_gradients,
)
from hilore_jax.training.rows import Layout, lay_out, row_tokens, spread_rows, take_rows
from hilore_jax.training.step import TrainState, make_apply

_LOG = logging.getLogger("hilore_jax")


class LadderedUpdate:
    """An actor update whose microbatches choose their policies by exposure.

    Before the forward each microbatch's bucket is chosen by `grpo.estimate_exposure`. Its gradient
    is added to the update's only if the exact exposure, known after the forward, is within what the
    bucket's plan is allowed for: the executable itself decides, so that the host asks once an
    update. A microbatch above its bucket is done again under the right one before anything is
    applied. One program a distinct policy tuple is compiled, once.

    Args:
        graphdef: the model's static part, from `init_state`; its stacks may be finer than any
            plan's runs (`planning.refined.refined_segments`).
        optimizer: sees float32 gradients and parameters.
        buckets: exposure edges and risks.
        policies: of each bucket, one policy a block.
        skip_rows: leave out rows whose omega is exactly zero; N still counts their tokens. Metrics
            that are means over tokens then leave them out as well.
        pack_by_exposure: deal rows into microbatches in order of estimated exposure.
        max_grad_norm: largest global norm.
        temperature: as for `make_micro_gradients`, like those below.
        entropy: as there.
        **loss: the loss's options; rows of zero advantage matter unless `beta` is 0.

    Attributes:
        n_traces: how often a microbatch's program was traced.
        about: `update_temp_bytes`, the most that a compiled microbatch needs.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        optimizer: optax.GradientTransformation,
        buckets: Buckets,
        policies: Sequence[tuple[Policy, ...]],
        *,
        skip_rows: bool = False,
        pack_by_exposure: bool = False,
        max_grad_norm: float | None = 1.0,
        temperature: float = 1.0,
        entropy: bool = False,
        **loss: Unpack[LossOptions],
    ):
        if len(policies) != len(buckets.edges):
            raise ValueError(f"{len(policies)} policy tuples for {len(buckets.edges)} buckets")
        self.buckets, self.policies = buckets, tuple(policies)
        self.skip_rows, self.pack_by_exposure = skip_rows, pack_by_exposure
        self.n_traces = 0
        self.about: dict[str, int | None] = {}
        self._gradients = make_micro_gradients(
            graphdef, temperature=temperature, entropy=entropy, **loss
        )
        self._programs: dict[Any, Any] = {}
        self._look = jax.jit(functools.partial(_look, **loss))
        self._zeros = jax.jit(zero_gradients)
        apply = make_apply(optimizer, max_grad_norm)

        def finish(state: TrainState, total: nnx.State, seen: dict[str, Any]):
            metrics = update_metrics(total, seen)
            return apply(state, total, metrics), metrics

        self._finish = jax.jit(finish, donate_argnums=0, compiler_options=compiler_options())

    def compile(self, state: TrainState, batch: Batch) -> Callable[..., Any]:
        """Compiles every bucket's program ahead; returns `update`."""
        for policies in self.policies:
            self._program(policies, state, batch)
        return self.update

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        """One actor update; the state is donated.

        Returns:
            The state and metrics: those of `make_actor_update`, and `ladder_hits/<edge>` (accepted
            microbatches, by the edge at the calibration's gradient norm), `ladder_redo`,
            `risk_used` and `risk_budget` (relative gradient error, predicted and allowed),
            `grad_norm_ema` (the Ghat to which they are relative), `rows_skipped`,
            `micro_exposure`, exposures a microbatch, and `micro_of_row`, where each row was put
            (-1: left out).

        Raises:
            ValueError: a batch that is malformed.
        """
        total, seen, report = self._sum(state, batch)
        if not len(report["micro_exposure"]):
            _LOG.warning("no row of this update can move the policy: it is left as it is")
        state, metrics = self._finish(state, total, seen)
        return state, {**metrics, **report}

    def gradient(
        self, state: TrainState, batch: Batch, *, exact: bool = False
    ) -> tuple[nnx.State, dict[str, Any]]:
        """The update's gradient before clipping, without applying it.

        Args:
            state: left as it is.
            batch: as for `update`.
            exact: everything recomputed instead of the plans that exposures allow.

        Returns:
            The gradient, and `micro_exposure` with, of a ladder, the metrics of its choice.
        """
        total, _, report = self._sum(state, batch, exact=exact)
        return total, report

    def _sum(self, state: TrainState, batch: Batch, *, exact: bool = False) -> tuple[Any, Any, Any]:
        """The summed gradient, what microbatches saw, and what is reported of them."""
        check_batch(batch)
        ghat, (estimate, dead, tokens) = jax.device_get((state.ghat, self._look(batch)))
        layout = lay_out(
            dead if self.skip_rows else np.zeros_like(dead),
            estimate if self.pack_by_exposure else None,
            batch.tokens.shape[1],
        )
        counts, update_tokens = layout.sums(tokens), int(tokens.sum())
        policies = [(Policy({}),) * len(self.policies[0])] if exact else self.policies
        buckets = one_bucket(policies[0])[0] if exact else self.buckets.at(ghat)

        def attempt(policies, total, micro: int, limit):
            return self._program(policies, state, batch)(
                total,
                state.params,
                state.frozen,
                batch,
                layout.index[micro],
                layout.valid[micro],
                np.float32(update_tokens),
                limit,
            )

        tried = Attempts(buckets, policies, counts, update_tokens, attempt)
        total, chosen, seen, redone = tried.all(
            self._zeros(state.params), layout.sums(estimate.astype(np.float64))
        )
        report = {
            "n_tokens": tokens.sum(),
            "rows_skipped": np.int32(layout.skipped),
            "micro_of_row": layout.places(),
            **({} if ghat is None else {"grad_norm_ema": ghat}),
            **({} if exact else self._report(buckets, chosen, seen, counts, tokens, redone)),
        }
        return total, self._stacked(state, batch, layout, seen), report

    def _report(self, buckets, chosen, seen, counts, tokens, redone) -> dict[str, Any]:
        exposures = [float(one["exposure"]) for one in seen]
        found: dict[str, Any] = {"micro_exposure": np.asarray(exposures, np.float32)}
        if buckets.budget is None:
            return found
        for bucket, edge in enumerate(self.buckets.edges):
            found[f"ladder_hits/{edge:g}"] = np.int32(chosen.count(bucket))
        risks = [buckets.risk(b, e) for b, e in zip(chosen, exposures, strict=True)]
        used, allowed = (
            buckets.used(risks),
            buckets.allowed(int(counts.sum()), int(tokens.sum())),
        )
        return found | {
            "ladder_redo": np.int32(redone),
            "risk_used": np.float64(used),
            "risk_budget": np.float64(allowed),
        }

    def _program(self, policies: tuple[Policy, ...], state: TrainState, batch: Batch) -> Any:
        """The compiled microbatch under some policies, made once."""
        key = policies, batch.tokens.shape, batch.completion_mask.shape
        if key not in self._programs:
            jitted = jax.jit(
                functools.partial(self._step, policies),
                donate_argnums=0,
                compiler_options=compiler_options(),
            )
            compiled = jitted.lower(*self._shapes(state, batch)).compile()
            analysis = compiled.memory_analysis()
            if analysis is not None:
                most = max(
                    int(analysis.temp_size_in_bytes), self.about.get("update_temp_bytes") or 0
                )
                self.about["update_temp_bytes"] = most
            self._programs[key] = compiled
        return self._programs[key]

    def _step(self, policies, total, params, frozen, batch, index, valid, update_tokens, limit):
        """The sum with one microbatch more, if its exposure is allowed."""
        self.n_traces += 1
        micro = take_rows(batch, index, valid)
        grads, seen = self._gradients(policies, params, frozen, micro, update_tokens)
        accepted = seen["exposure"] <= limit  # NaN is not
        added = add_gradients(total, grads)
        total = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), added, total)
        return total, {**seen, "accepted": accepted}

    def _shapes(self, state: TrainState, batch: Batch) -> tuple[Any, ...]:
        rows = batch.tokens.shape[1]
        row = functools.partial(jax.ShapeDtypeStruct, (rows,))
        one = jax.ShapeDtypeStruct((), jnp.float32)
        total = jax.eval_shape(zero_gradients, state.params)
        return total, state.params, state.frozen, batch, row(jnp.int32), row(jnp.bool_), one, one

    def _stacked(
        self, state: TrainState, batch: Batch, layout: Layout, seen: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """What microbatches saw, always as many as the batch has, in the order of its rows."""
        micro, rows, width = batch.completion_mask.shape
        nothing = {
            "bad": np.zeros((micro * rows, width), bool),
            "omega": np.zeros((micro * rows, width), np.float32),
        }
        tables = {
            name: spread_rows(layout, [one[name] for one in seen], none).reshape(micro, rows, width)
            for name, none in nothing.items()
        }
        apart = (*tables, "accepted")
        plain = [{k: v for k, v in one.items() if k not in apart} for one in seen]
        if not plain:  # the same names and dtypes, all zero
            shapes = self._program(self.policies[-1], state, batch).out_info[1]
            plain = [jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), dict(shapes))]
            plain = [{k: v for k, v in plain[0].items() if k not in apart}]
        empty = jax.tree.map(np.zeros_like, plain[0])
        plain += [empty] * (micro - len(plain))
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *plain)
        return {**stacked, **tables}


def one_bucket(policies: tuple[Policy, ...]) -> tuple[Buckets, tuple[tuple[Policy, ...]]]:
    """Static policies as a ladder with one bucket, whose risk is not known.

    Example:
        >>> one_bucket((Policy({}),))[0].select(1e9)
        0
    """
    return Buckets((math.inf,), (0.0,), budget=None), (policies,)


def _look(batch: Batch, **loss: Unpack[LossOptions]) -> tuple[Any, Any, Any]:
    """What is known of each row before the forward: exposure, whether it matters, tokens."""
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    known = flat.logp_old, flat.logp_ref, flat.advantages, flat.completion_mask
    tokens = row_tokens(batch)
    of_each = divisors(flat, jnp.sum(tokens))
    guess = estimate_exposure(*known, of_each, per_row=True, **loss)
    return guess.value, dead_rows(*known, beta=loss.get("beta", 1e-3)), tokens
