"""`accept_ladder`: a ladder's plans tried on complete updates, each alone and as training mixes."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from hilore_jax.actions import Policy
from hilore_jax.planning.accept import LIMIT, Gradients, accept, verdict
from hilore_jax.planning.accept_mixed import Mix, Mixed, try_mixed, with_verdict
from hilore_jax.planning.buckets import microbatch_risk
from hilore_jax.planning.ladder import Ladder, compresses
from hilore_jax.planning.plan import Plan

# Optimized tokens of each microbatch of an update; a sequence or an array.
Tokens = Callable[[Any], Sequence[int] | Any]


@dataclasses.dataclass(frozen=True)
class Tried:
    """A ladder whose plans were tried.

    Attributes:
        ladder: with the verdicts in its plans.
        buckets: of each update, the bucket whose plan was tried on it.
        exposures: of each update, its most exposed microbatch's.
        mix: what updates said whose microbatches each had their own bucket's plan; None: not tried.
    """

    ladder: Ladder
    buckets: tuple[int, ...]
    exposures: tuple[float, ...]
    mix: Mix | None = None

    def __str__(self) -> str:
        lines = []
        for bucket, edge in enumerate(self.ladder.edges[:-1]):
            where, made = f"bucket up to exposure {edge:g}", self.ladder.plans[bucket]
            if bucket not in self.buckets:
                lines.append(
                    f"{where}: not tried, none of the {len(self.buckets)} updates has its exposure "
                    f"(their largest: {_listed(self.exposures)}); ask for more updates"
                )
                continue
            lines.append(f"{where}: " + verdict(made).replace("\n", "\n  "))
        if len(self.ladder.edges) - 1 in self.buckets:
            count = self.buckets.count(len(self.ladder.edges) - 1)
            lines.append(f"above: {count} of the updates, whose plan is exact")
        lines.append(
            "each microbatch under its own bucket's plan, as in training: "
            + ("not tried" if self.mix is None else str(self.mix))
        )
        return "\n".join(lines)


def accept_ladder(
    ladder: Ladder,
    gradients: Gradients,
    updates: Sequence[Any],
    *,
    mixed: Mixed | None = None,
    tokens: Tokens | None = None,
    save: Callable[[Ladder], None] | None = None,
    **options: Any,
) -> Tried:
    """Tries each finite bucket's plan, as `accept` does, and then the ladder as training uses it.

    An update is a bucket's whose plan its most exposed microbatch selects: the most compressed one
    that all of its microbatches may have. Then each microbatch has the plan of its own bucket, and
    the error of the whole update is held to the same limit; above it all plans that took part are
    rejected. The last plan compresses nothing and needs no trial. A bucket without an update keeps
    the verdict that it has, which is None where there was none.

    Args:
        ladder: the ladder.
        gradients: as for `accept`.
        updates: complete ones, held out.
        mixed: `mixed(policies, update) -> gradient` of a complete update with one policy tuple for
            each of its microbatches; None: the ladder is not tried as training uses it.
        tokens: optimized tokens of each microbatch of an update; None: each has the share that the
            ladder was planned for.
        save: called with the ladder after each bucket's verdict, and after the last.
        **options: others of `accept`.

    Returns:
        The ladder with its verdicts, and which update was whose.

    Raises:
        ValueError, FloatingPointError: as `accept`; an exposure that is negative or NaN; a ladder
            of which the updates would try nothing.

    Example:
        >>> import jax, jax.numpy as jnp, hilore_jax as hl
        >>> from hilore_jax.planning.accept_ladder import accept_ladder
        >>> def block(w, x):
        ...     return x + jnp.tanh(jax.ad_checkpoint.checkpoint_name(x @ w, "mlp_gate"))
        >>> def update(policies, w, x):
        ...     return w - jax.grad(lambda w: hl.scan_blocks(block, w, x, policies).sum())(w), {}
        >>> w, x = jnp.ones((4, 16, 16)), jnp.ones((512, 16))
        >>> how = {"blocks": hl.Blocks(block, (w[0], x), 4), "target": "cpu"}
        >>> plan = hl.plan(update, (w, x), budget=hl.Budget("2x gc", risk=0.0), **how)
        >>> ladder = hl.Ladder((1.0, 2.0, float("inf")), (plan, plan, plan))
        >>> def gradients(policies, x):
        ...     return w - update(policies, w, x)[0], jnp.array([1.5])  # and the exposures
        >>> found = accept_ladder(ladder, gradients, [x / 7])
        >>> found.buckets, [plan.accepted for plan in found.ladder.plans]
        ((1,), [None, True, None])
    """
    check_finite_bucket(ladder)
    exact = (Policy({}),) * len(ladder.plans[-1].policies)
    truth = [jax.device_get(gradients(exact, update)) for update in updates]
    chosen = [
        _buckets(ladder, exposures, None if tokens is None else tokens(update))
        for update, (_, exposures) in zip(updates, truth, strict=True)
    ]
    found = tuple(map(max, chosen))
    exposures = tuple(max(map(float, each)) for _, each in truth)
    used = set(found) if mixed is None else set(found).union(*chosen)
    _check_tried(ladder, used, exposures)

    def known(policies: tuple[Policy, ...], update: int) -> tuple[Any, Any]:
        """Exact gradients are not computed again for each plan."""
        return truth[update] if policies == exact else gradients(policies, updates[update])

    def each(policies: tuple[tuple[Policy, ...], ...], update: int) -> Any:
        """Where all microbatches share a plan, its own program is there already."""
        if len(set(policies)) == 1:
            return known(policies[0], update)[0]
        assert mixed is not None
        return mixed(policies, updates[update])

    for bucket in range(len(ladder.plans) - 1):
        own = [update for update, of in enumerate(found) if of == bucket]
        if own:
            made = _accepted(ladder, ladder.plans[bucket], known, own, options)
            plans = (*ladder.plans[:bucket], made, *ladder.plans[bucket + 1 :])
            ladder = _saved(dataclasses.replace(ladder, plans=plans), save)
    mix = None
    if mixed is not None:
        limit = options.get("limit", LIMIT)
        mix = try_mixed(ladder, each, range(len(updates)), truth, chosen, limit)
        ladder = _saved(with_verdict(ladder, mix), save)
    return Tried(ladder, found, exposures, mix)


def check_finite_bucket(ladder: Ladder) -> None:
    """Refuses a ladder with nothing to try.

    Raises:
        ValueError: its only plan is the exact one.
    """
    if len(ladder.plans) == 1:
        raise ValueError(
            "the ladder's only bucket is the one without an upper edge, whose plan is exact: there "
            "is nothing to try. Plan it for exposures above 0, hl.plan_ladder(exposures=...)."
        )


def _accepted(
    ladder: Ladder, plan: Plan, known: Gradients, own: Sequence[int], options: dict[str, Any]
) -> Plan:
    """A bucket's plan tried; what is left out of it may not take it above the ladder's share."""
    allowed = microbatch_risk(ladder.risk, ladder.share, paper=ladder.paper)
    within = dataclasses.replace(plan, risk_budget=min(plan.risk_budget, allowed))
    made = accept(within, known, own, **options)
    return dataclasses.replace(made, risk_budget=plan.risk_budget)


def _saved(ladder: Ladder, save: Callable[[Ladder], None] | None) -> Ladder:
    if save is not None:
        save(ladder)
    return ladder


def _check_tried(ladder: Ladder, used: set[int], exposures: tuple[float, ...]) -> None:
    """Refuses updates that would try nothing, before plans are compiled for them."""
    finite = set(range(len(ladder.plans) - 1))
    lossy = {b for b in finite if any(map(compresses, ladder.plans[b].policies))}
    if not used & (lossy or finite):
        edges = _listed(ladder.edges[b] for b in sorted(lossy or finite))
        raise ValueError(
            f"nothing of the ladder was tried: none of the {len(exposures)} updates has the "
            f"exposure of a bucket {'whose plan compresses' if lossy else 'with an upper edge'} "
            f"(up to {edges}; the largest of each update: {_listed(exposures)}). Ask for more "
            "updates, or plan the ladder for exposures such as theirs."
        )


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:.3g}" for number in numbers)


def _buckets(ladder: Ladder, exposures: Any, tokens: Any) -> tuple[int, ...]:
    """The bucket of each microbatch of an update."""
    if tokens is None:
        return tuple(ladder.select(float(exposure)) for exposure in exposures)
    counts = [int(count) for count in tokens]
    pairs = zip(exposures, counts, strict=True)
    return tuple(ladder.select(float(exposure), count, sum(counts)) for exposure, count in pairs)
