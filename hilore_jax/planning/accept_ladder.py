"""`accept_ladder`: each plan of a ladder tried on complete updates of its bucket's exposure."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hilore_jax.actions import Policy
from hilore_jax.planning.accept import Gradients, accept, verdict
from hilore_jax.planning.ladder import Ladder

# Optimized tokens of each microbatch of an update; a sequence or an array.
Tokens = Callable[[Any], Sequence[int] | Any]


@dataclasses.dataclass(frozen=True)
class Tried:
    """A ladder whose plans were tried.

    Attributes:
        ladder: with the verdicts in its plans.
        buckets: of each update, the bucket whose plan was tried on it.
        exposures: of each update, its most exposed microbatch's.
    """

    ladder: Ladder
    buckets: tuple[int, ...]
    exposures: tuple[float, ...]

    def __str__(self) -> str:
        lines = []
        for bucket, edge in enumerate(self.ladder.edges[:-1]):
            where, made = f"bucket up to exposure {edge:g}", self.ladder.plans[bucket]
            if bucket not in self.buckets:
                found = ", ".join(f"{exposure:.3g}" for exposure in self.exposures)
                lines.append(
                    f"{where}: not tried, none of the {len(self.buckets)} updates has its exposure "
                    f"(their largest: {found}); ask for more updates"
                )
                continue
            lines.append(f"{where}: " + verdict(made).replace("\n", "\n  "))
        if len(self.ladder.edges) - 1 in self.buckets:
            count = self.buckets.count(len(self.ladder.edges) - 1)
            lines.append(f"above: {count} of the updates, whose plan is exact")
        return "\n".join(lines)


def accept_ladder(
    ladder: Ladder,
    gradients: Gradients,
    updates: Sequence[Any],
    *,
    tokens: Tokens | None = None,
    **options: Any,
) -> Tried:
    """Tries each finite bucket's plan, as `accept` does, on the updates that are its.

    An update is a bucket's whose plan its most exposed microbatch selects: the most compressed one
    that all of its microbatches may have. The last plan compresses nothing and needs no trial. A
    bucket without an update keeps the verdict that it has, which is None where there was none.

    Args:
        ladder: the ladder.
        gradients: as for `accept`.
        updates: complete ones, held out.
        tokens: optimized tokens of each microbatch of an update; None: each has the share that the
            ladder was planned for.
        **options: others of `accept`.

    Returns:
        The ladder with its verdicts, and which update was whose.

    Raises:
        ValueError, FloatingPointError: as `accept`; an exposure that is negative or NaN.

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
    exact = (Policy({}),) * len(ladder.plans[-1].policies)
    truth = [gradients(exact, update) for update in updates]
    found = [
        _bucket(ladder, exposures, None if tokens is None else tokens(update))
        for update, (_, exposures) in zip(updates, truth, strict=True)
    ]

    def known(policies: tuple[Policy, ...], update: int) -> tuple[Any, Any]:
        """Exact gradients are not computed again for each plan."""
        return truth[update] if policies == exact else gradients(policies, updates[update])

    plans = list(ladder.plans)
    for bucket in range(len(plans) - 1):
        own = [update for update, of in enumerate(found) if of == bucket]
        if own:
            plans[bucket] = accept(plans[bucket], known, own, **options)
    return Tried(
        dataclasses.replace(ladder, plans=tuple(plans)),
        tuple(found),
        tuple(max(map(float, exposures)) for _, exposures in truth),
    )


def _bucket(ladder: Ladder, exposures: Any, tokens: Any) -> int:
    """The first bucket whose plan every microbatch of an update may have."""
    if tokens is None:
        return max(ladder.select(float(exposure)) for exposure in exposures)
    counts = [int(count) for count in tokens]
    pairs = zip(exposures, counts, strict=True)
    return max(ladder.select(float(exposure), count, sum(counts)) for exposure, count in pairs)
