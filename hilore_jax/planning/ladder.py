"""A ladder of plans: the lower an update's exposure, the more may be compressed."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hilore_jax.actions import Compress, Policy
from hilore_jax.planning import plan_file
from hilore_jax.planning.buckets import Buckets, microbatch_risk, power_of_two_edges
from hilore_jax.planning.budget import Budget
from hilore_jax.planning.fields import Format, checked_schema, read_json
from hilore_jax.planning.memory_cache import write_whole
from hilore_jax.planning.plan import Blocks, Plan, runs
from hilore_jax.planning.refined import refined_segments
from hilore_jax.planning.request import check_ladder, check_request
from hilore_jax.planning.rungs import check_finite, never_slower, planned, planner
from hilore_jax.planning.solve import Update
from hilore_jax.planning.target import Target

FORMAT = Format("ladder", (1,), "plan again", ("edges", "plans"))


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Plans by exposure, all made ahead, so that choosing one never compiles anything.

    Attributes:
        edges: upper exposure of each bucket, ascending: powers of two, then infinity.
        plans: one a bucket. Its risk is that at the bucket's upper edge, or above, and one that
            compresses says so by its `exposure`; the last compresses nothing, so that any exposure
            has a plan.
        risk: R, the relative gradient error allowed to a whole update.
        share: of the update's tokens in one microbatch, for which the plans were made. Others are
            converted, see `hilore_jax.planning.buckets.Buckets`.

    Example:
        >>> import jax, jax.numpy as jnp, hilore_jax as hl
        >>> def block(w, x):
        ...     return x + jnp.tanh(jax.ad_checkpoint.checkpoint_name(x @ w, "mlp_gate"))
        >>> def update(policies, w, x):
        ...     return w - jax.grad(lambda w: hl.scan_blocks(block, w, x, policies).sum())(w), {}
        >>> w, x = jnp.ones((4, 16, 16)), jnp.ones((512, 16))
        >>> how = {"blocks": hl.Blocks(block, (w[0], x), 4), "target": "cpu"}
        >>> plan = hl.plan(update, (w, x), budget=hl.Budget("2x gc", risk=0.0), **how)
        >>> ladder = hl.Ladder((1.0, float("inf")), (plan, plan))
        >>> ladder.select(0.7), ladder.select(3.0), ladder.n_executables
        (0, 1, 1)
    """

    edges: tuple[float, ...]
    plans: tuple[Plan, ...]
    risk: float = 0.015
    share: float = 1.0

    def __post_init__(self) -> None:
        if len(self.plans) != len(self.edges):
            raise ValueError(f"{len(self.plans)} plans for {len(self.edges)} buckets {self.edges}.")
        if len({made.paper for made in self.plans}) != 1:
            raise ValueError("some plans add risks linearly, others as squares: expected one form.")
        if any(compresses(policy) for policy in self.plans[-1].policies):
            raise ValueError(
                "the last plan of a ladder serves every exposure and must compress nothing; plan "
                "it with a risk budget of 0."
            )
        counts = sorted({len(made.policies) for made in self.plans})
        if len(counts) != 1:
            raise ValueError(f"the ladder's plans are for {counts} blocks: expected one number.")
        norms = {made.norm for made in self.plans[:-1]}
        if len(norms) > 1:
            raise ValueError(
                f"the ladder's plans were calibrated at gradient norms {sorted(map(str, norms))}: "
                "expected one calibration for all of them."
            )
        check_finite(self.risk)
        allowed = microbatch_risk(self.risk, self.share, paper=self.paper)
        for edge, made in zip(self.edges[:-1], self.plans[:-1], strict=True):
            if not made.risk <= allowed * (1 + 1e-12):
                raise ValueError(
                    f"the plan of the bucket up to exposure {edge:g} has risk {made.risk:g}, above "
                    f"{allowed:g}, its microbatch's part of R = {self.risk:g}. Plan it with "
                    f"Budget(risk={allowed:g}) and that exposure."
                )
            _check_exposure(made, edge)
        _ = self.buckets  # its own checks

    @property
    def paper(self) -> bool:
        """Whether risks add linearly, as in the paper; all plans agree in that."""
        return self.plans[0].paper

    @property
    def norm(self) -> float | None:
        """Ghat of the calibration behind the risks; None: not known, or no risk is relative."""
        return self.plans[0].norm

    @functools.cached_property
    def buckets(self) -> Buckets:
        """Edges, risks and shares: what the choice needs of the plans."""
        pairs = zip(self.plans[:-1], self.edges[:-1], strict=True)
        risks = (*(_risk_at(made, edge) for made, edge in pairs), 0.0)
        return Buckets(self.edges, risks, self.risk, self.share, self.paper, self.norm)

    @property
    def segments(self) -> tuple[int, ...]:
        """Lengths of the stacks in which every plan finds its runs, see `planning.refined`."""
        return refined_segments(made.policies for made in self.plans)

    @property
    def n_executables(self) -> int:
        """How many different programs the plans are."""
        return len({made.policies for made in self.plans})

    def select(
        self, exposure: float, tokens: int | None = None, update_tokens: int | None = None
    ) -> int:
        """The first bucket whose upper edge covers an exposure, in well under a millisecond.

        Args:
            exposure: of one microbatch, >= 0.
            tokens: its optimized tokens; None: the share that was planned for.
            update_tokens: those of the whole update.

        Returns:
            Index into `edges` and `plans`.

        Raises:
            ValueError: the exposure is negative or NaN, or the tokens exceed the update's.
        """
        return self.buckets.select(exposure, tokens, update_tokens)

    def __str__(self) -> str:
        lines = [
            f"ladder of {len(self.plans)} plans in {self.n_executables} programs, R = "
            f"{self.risk:g}, microbatches of {self.share:.3g} of the update's tokens",
            f"{'exposure to':>12} {'risk':>9} {'peak MiB':>9} {'removed':>8}  policies",
        ]
        for edge, made in zip(self.edges, self.plans, strict=True):
            policies = "; ".join(f"{n} x {policy}" for policy, n in runs(made.policies))
            lines.append(
                f"{edge:>12.4g} {made.risk:>9.2g} {made.memory.peak / 2**20:>9.1f} "
                f"{made.removed_flops:>8.1%}  {policies}"
            )
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Writes the ladder as JSON; a reader never sees half of it."""
        fields = {
            "schema": FORMAT.schemas[-1],
            "edges": [None if edge == math.inf else edge for edge in self.edges],
            "plans": [plan_file.plan_fields(made) for made in self.plans],
            "risk": self.risk,
            "share": self.share,
        }
        write_whole(Path(path), json.dumps(fields, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path, found: Mapping[str, str] | None = None) -> "Ladder":
        """Reads a ladder.

        Args:
            path: a file that `save` wrote.
            found: a `fingerprint` that must agree with every plan's.

        Raises:
            OSError: the file cannot be read.
            ValueError: not a ladder, of another schema, damaged (names the field, what was found
                and what was expected), or made for another situation.
        """
        _, file = read_json(path, FORMAT)
        parts = file.fields(("edges", "plans", "risk", "share"))
        edges = tuple(edge.number_or_infinity() for edge in parts["edges"].items(1))
        plans = tuple(
            plan_file.read_plan(*checked_schema(part, plan_file.FORMAT), found)
            for part in parts["plans"].items(1)
        )
        numbers = {name: parts[name].number() for name in ("risk", "share")}
        return file.made(cls, edges=edges, plans=plans, **numbers)


def plan_ladder(
    update: Update,
    args: tuple[Any, ...] | Callable[[tuple[Policy, ...]], tuple[Any, ...]],
    *,
    blocks: Blocks,
    budget: Budget,
    target: str | Target = "device",
    calibration: Any = None,
    exposures: Sequence[float] | None = None,
    share: float = 1.0,
    most: int = 8,
    plan_at: Callable[[float], Plan] | None = None,
    **options: Any,
) -> Ladder:
    """One plan for every power of two of exposure, and an exact one for all above.

    A compression's risk is `kappa e E / Ghat`: it grows with the exposure E of the update's
    coefficients (methods of arXiv 2609.33570, with absolute gradients), so that a calm microbatch
    may keep more in low precision. Each plan is `hilore_jax.plan` at its bucket's upper edge,
    within

        sum_b risk_b^2 <= R^2 tokens / update_tokens;   the paper's: sum_b risk_b <= R tokens / ...

    Args:
        update: as for `hilore_jax.plan`.
        args: as for `hilore_jax.plan`.
        blocks: as for `hilore_jax.plan`.
        budget: memory, and R of the whole update; R = 0 compresses nothing in any bucket.
        target: as for `hilore_jax.plan`.
        calibration: measured risks, a `Calibration`; its exposures are the default.
        exposures: of microbatches as the run will see them (estimates where it selects by them).
        share: tokens of a microbatch over those of the update.
        most: finite buckets.
        plan_at: makes the plan at an exposure, instead of `hilore_jax.plan`; called with infinity
            for the last, which must compress nothing. A plan that compresses must have an
            `exposure` of at least what was asked for.
        **options: others of `hilore_jax.plan`.

    Returns:
        The ladder.

    Raises:
        TypeError: an argument of a wrong kind, or one that `hilore_jax.plan` does not have.
        ValueError: as `hilore_jax.plan`; exposures that are negative, not finite or missing; a
            share outside (0, 1]; a plan of `plan_at` above its risk, or for too little exposure.

    Example:
        >>> import dataclasses, math, jax, jax.numpy as jnp, hilore_jax as hl
        >>> def block(w, x):
        ...     return x + jnp.tanh(jax.ad_checkpoint.checkpoint_name(x @ w, "mlp_gate"))
        >>> def update(policies, w, x):
        ...     return w - jax.grad(lambda w: hl.scan_blocks(block, w, x, policies).sum())(w), {}
        >>> args = w, x = jnp.ones((4, 16, 16)), jnp.ones((512, 16))
        >>> how = {"blocks": hl.Blocks(block, (w[0], x), 4), "target": "cpu"}
        >>> def at(edge):  # stands in for a calibration
        ...     budget = hl.Budget("2x gc", risk=0.0 if edge == math.inf else 0.015)
        ...     made = hl.plan(update, args, budget=budget, risks=lambda *_: 0.004 * edge, **how)
        ...     return dataclasses.replace(made, exposure=edge)  # what its risks are for
        >>> more = {"exposures": [0.9, 1.6], "plan_at": at, "budget": hl.Budget("2x gc")}
        >>> ladder = hl.plan_ladder(update, args, **more, **how)
        >>> ladder.edges, ladder.select(0.7)
        ((1.0, 2.0, inf), 0)
    """
    asked = {"update": update, "args": args, "blocks": blocks, "budget": budget, "target": target}
    check_request("hl.plan_ladder", **asked, calibration=calibration)
    check_ladder(exposures, share, most, plan_at, options)
    check_finite(budget.risk)
    if exposures is None and calibration is None:
        raise ValueError("hl.plan_ladder needs exposures, or a calibration that has them.")
    edges = power_of_two_edges(calibration.exposures if exposures is None else exposures, most)
    if not 0 < share <= 1:
        raise ValueError(f"share = {share}: expected tokens / update tokens in (0, 1].")
    if plan_at is None:
        if calibration is None:
            raise ValueError(
                "hl.plan_ladder needs a calibration (hl.calibrate): default risks do not depend on "
                "exposure, so that every bucket would get the same plan."
            )
        plan_at = planner(
            update,
            args,
            edges[-2],
            dataclasses.replace(
                budget, risk=microbatch_risk(budget.risk, share, paper=calibration.form == "paper")
            ),
            blocks=blocks,
            target=target,
            calibration=calibration,
            **options,
        )
    plans = never_slower([planned(plan_at, edge) for edge in edges])
    return Ladder(edges, plans, budget.risk, share)


def compresses(policy: Policy) -> bool:
    """Whether a policy keeps anything in low precision.

    Example:
        >>> compresses(Policy({})), compresses(Policy({"q": Compress("int8")}))
        (False, True)
    """
    return bool(policy.names(Compress))


def _risk_at(made: Plan, edge: float) -> float:
    """A plan's risk at its bucket's edge: less where it was made for more exposure."""
    if made.exposure is None or not edge < made.exposure < math.inf:
        return made.risk
    return made.risk * edge / made.exposure


def _check_exposure(made: Plan, edge: float) -> None:
    """Refuses a plan that compresses, and whose risks are for less exposure than its bucket has."""
    if not any(compresses(policy) for policy in made.policies):
        return
    if made.exposure is None or not made.exposure >= edge:
        held = "no exposure" if made.exposure is None else f"exposure {made.exposure:g}"
        raise ValueError(
            f"the plan of the bucket up to exposure {edge:g} compresses, with risks that are for "
            f"{held}: at the bucket's edge they are not known to be within its budget. Plan it "
            f"with hl.plan(..., calibration=..., exposure={edge:g}); where risks come from "
            f"elsewhere, say what they are for: dataclasses.replace(plan, exposure={edge:g})."
        )
