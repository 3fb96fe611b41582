"""`calibrate`: isolated interventions on blocks, against exact gradients of the same microbatch."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hilore_jax.actions import Policy
from hilore_jax.compiler import compiler_options
from hilore_jax.intervene import Interventions
from hilore_jax.planning.bar import LINES, Bar
from hilore_jax.planning.calibration import Calibration
from hilore_jax.planning.fingerprint import program_digest
from hilore_jax.planning.fits import Row, factors, fitted, joint_bias
from hilore_jax.planning.measurements import Record, row_of, subject
from hilore_jax.planning.memory_cache import library_version
from hilore_jax.planning.plan import Blocks
from hilore_jax.planning.request import check_calibrate
from hilore_jax.planning.schedule import Schedule

Loss = Callable[..., tuple[Any, Any]]


def calibrate(
    loss: Loss,
    params: Any,
    microbatches: Sequence[Any],
    *,
    blocks: Blocks,
    policies: Sequence[Policy],
    args: tuple[Any, ...] = (),
    count: int = 16,
    per_update: int | None = None,
    passes: int = 350,
    risk: str = "squared",
    seed: int = 0,
    resume: str | Path | None = None,
    progress: bool | None = None,
) -> Calibration:
    """Measures what each policy on each block does to the gradient, by exposure.

        d = ||g_L - g||,  x = E e,  kappa = max(0, sum x d / sum x x),  risk = kappa e E / Ghat

    with g the gradient that one microbatch contributes to its update's and e the relative error of
    the tensors that the policy decodes (HiLoRe, arXiv 2609.33570, with absolute gradients; its own
    form, `y = d / ||g||` and e relative to all saved states, is `risk="paper"`).

    One executable computes every gradient: which blocks follow which policy is an argument. Every
    policy is tried on every block once, on microbatches in turn; what is left of `passes` tries
    random policies on all blocks at once, and says how far the risks add up as they should.

    Args:
        loss: `loss(policies, params, microbatch, *args) -> (loss, exposure)`, where policies go to
            `hl.scan_blocks`; the part that a microbatch contributes to an update's loss, divided by
            the whole update's tokens, and its exposure.
        params: what the update differentiates.
        microbatches: of equal shapes; consecutive ones make complete updates.
        blocks: the repeated block.
        policies: to measure, at most 10; those without compression have no risk and are left out.
        args: other arguments of the loss, such as frozen weights.
        count: microbatches to use.
        per_update: how many of them make one update; None: all.
        passes: most gradients to compute.
        risk: "squared" or "paper".
        seed: of the joint policies.
        resume: file that every measurement is added to, and where an earlier call's are found: of
            the same settings, loss, versions of jax and of this library, and the same values of
            params, args and, but for the rounding of floats, microbatches. One exact gradient is
            computed again, and must come out the same.
        progress: show a bar, or a line now and then off a terminal; default: a bar on a terminal.

    Returns:
        The calibration.

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: fewer microbatches than `count`, one without exposure, too few passes, no policy
            that compresses, an unknown `risk`, or another calibration's measurements in `resume`.
        FloatingPointError: an exact gradient that is not finite; names the microbatch. An
            intervention that is not finite is logged with its block, and may not be used.

    Example:
        >>> import jax, jax.numpy as jnp, hilore_jax as hl
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> def block(w, x):
        ...     return x + jnp.tanh(checkpoint_name(x @ w, "h"))
        >>> def loss(policies, w, x):
        ...     y = hl.scan_blocks(block, w, x, policies)
        ...     return jnp.mean(y**2), jnp.mean(jnp.abs(y))
        >>> w = jax.random.normal(jax.random.key(0), (2, 4, 4)) / 2
        >>> data = list(jax.random.normal(jax.random.key(1), (2, 3, 4)))
        >>> policy = hl.Policy({"h": hl.Compress("int8")})
        >>> blocks = hl.Blocks(block, (w[0], data[0]), 2)
        >>> made = hl.calibrate(loss, w, data, blocks=blocks, policies=[policy], count=2, passes=8)
        >>> [m.block for m in made.measured], made.compilations, made.passes
        ([0, 1], 2, 6)
    """
    began = time.perf_counter()
    numbers = {"count": count, "per_update": per_update, "passes": passes, "seed": seed}
    check_calibrate(
        loss,
        params,
        microbatches,
        blocks=blocks,
        policies=policies,
        args=args,
        numbers=numbers,
        resume=resume,
        progress=progress,
    )
    how = Schedule(blocks, tuple(policies), count, per_update, passes, risk, seed)
    entries, schedule = how.entries, how.choices()
    if len(microbatches) < count:
        raise ValueError(
            f"hl.calibrate was given {len(microbatches)} microbatches, expected {count}: sample "
            "more, or ask for fewer with count=."
        )
    microbatches = microbatches[:count]
    probe = _Probe(loss, params, microbatches[0], entries, blocks.count, args)
    about = None
    if resume is not None:
        about = subject(how.identity, probe.program, params, args, microbatches)
    record = Record(resume, about, began)
    probe.compile()
    if known := record.exact():
        again = probe(microbatches[known.micro], [0] * blocks.count, keep=True)
        record.check(known, again.exposure, again.norm)
    total, done = sum(map(len, schedule)) + count, len(record.rows)
    with Bar(progress, total, "gradient", every=LINES, done=done) as bar:
        size = per_update or count
        for first in range(0, count, size):
            whole = range(first, min(first + size, count))
            for m in whole:
                todo = [c for c in schedule[m] if not record.has(m, c)]
                known = str(first) in record.norms
                if known and not todo:
                    continue
                exact = probe(microbatches[m], [0] * blocks.count, keep=True)
                _check_exact(exact, m)
                if record.add(Row(m, (), exact.exposure, exact.distance, exact.norm, ())):
                    bar.end()
                if not known:
                    probe.gather(first == m)
                for chosen in todo:
                    found = probe(microbatches[m], chosen)
                    record.add(row_of(m, chosen, found, entries))
                    bar.end()
            if str(first) not in record.norms:
                record.norms[str(first)] = probe.gathered()
        record.write()
    rows = record.rows
    measured = fitted(rows, entries, risk)
    norm = float(np.mean(list(record.norms.values())))
    bias, joint = joint_bias(rows, measured, entries, risk)
    return Calibration(
        measured=measured,
        norm=norm,
        bias=bias,
        exposures=tuple(row.exposure for row in sorted(rows) if not row.chosen),
        fingerprint=how.fingerprint,
        passes=len(rows),
        seconds=record.seconds,
        compilations=probe.compilations,
        versions={"jax": jax.__version__, "hilore_jax": library_version()},
        form=risk,
        joint=joint,
        factors=tuple(factors(rows, risk).values()),
    )


class _Found(NamedTuple):
    """What one pass found, on the host."""

    exposure: float
    distance: float
    norm: float
    errors: np.ndarray


class _Probe:
    """The one executable of all gradients, with the exact gradient of the microbatch at hand."""

    def __init__(
        self,
        loss: Loss,
        params: Any,
        microbatch: Any,
        entries: tuple[Policy, ...],
        blocks: int,
        args: tuple[Any, ...],
    ):
        def probe(reference: Any, params: Any, micro: Any, index: Any, args: Any) -> Any:
            def objective(params: Any, token: Any) -> tuple[Any, Any]:
                return loss(Interventions(entries, index, token), params, micro, *args)

            token = jnp.zeros((blocks, 2))
            (_, exposure), (grads, errors) = jax.value_and_grad(
                objective, argnums=(0, 1), has_aux=True
            )(params, token)
            pairs = list(zip(jax.tree.leaves(grads), jax.tree.leaves(reference), strict=True))
            distance = sum(jnp.sum((g.astype(jnp.float32) - r) ** 2) for g, r in pairs)
            norm = sum(jnp.sum(g.astype(jnp.float32) ** 2) for g, _ in pairs)
            # The reference is donated: an exact pass replaces it, others hand it on.
            exact = jnp.all(index == 0)
            reference = jax.tree.map(lambda g, r: jnp.where(exact, g, r), grads, reference)
            return reference, (exposure, jnp.sqrt(distance), jnp.sqrt(norm), errors)

        def gather(total: Any, reference: Any, first: Any) -> tuple[Any, Any]:
            added = jax.tree.map(lambda t, r: jnp.where(first, 0.0, t) + r, total, reference)
            return added, jnp.sqrt(sum(jnp.sum(t * t) for t in jax.tree.leaves(added)))

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        self._reference, self._total = zeros, jax.tree.map(jnp.copy, zeros)
        self._params, self._args, self._norm = params, args, 0.0
        self.compilations = 0
        index = jnp.zeros(blocks, jnp.int32)
        self._traced = _traced(probe, zeros, params, microbatch, index, args)
        self._gathering = _traced(gather, zeros, zeros, jnp.array(False))

    @property
    def program(self) -> str:
        """A hash of the gradient's traced program."""
        return program_digest(self._traced.jaxpr)

    def compile(self) -> None:
        """Once, before the first gradient."""
        self._run, self._gather = (t.lower().compile() for t in (self._traced, self._gathering))
        self.compilations += 2

    def __call__(self, micro: Any, index: Sequence[int], keep: bool = False) -> _Found:
        """One gradient; an exact one (`keep`) becomes what the next ones are compared with."""
        assert keep == (not any(index))
        which = jnp.asarray(index, jnp.int32)
        self._reference, found = self._run(self._reference, self._params, micro, which, self._args)
        exposure, distance, norm, errors = jax.device_get(found)
        return _Found(float(exposure), 0.0 if keep else float(distance), float(norm), errors)

    def gather(self, first: bool) -> None:
        """Adds the exact gradient to its update's."""
        self._total, norm = self._gather(self._total, self._reference, jnp.array(first))
        self._norm = float(norm)

    def gathered(self) -> float:
        """The norm of the update's gradient."""
        return self._norm


def _traced(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(fn, donate_argnums=0, compiler_options=compiler_options()).trace(*args)


def _check_exact(found: _Found, micro: int) -> None:
    if not (math.isfinite(found.norm) and math.isfinite(found.exposure)):
        raise FloatingPointError(
            f"microbatch {micro}'s exact gradient has norm {found.norm} and exposure "
            f"{found.exposure}; expected finite ones. Check the weights, log-probs and rewards."
        )
    if not found.exposure > 0:
        raise ValueError(
            f"microbatch {micro} has exposure {found.exposure}: its gradient is 0, so that nothing "
            "can be measured on it. Leave out groups whose rewards are all equal."
        )
