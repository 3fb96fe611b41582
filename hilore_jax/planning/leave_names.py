"""Leave-one-out by name: names of a plan's policies whose absence does not slow backward."""

import dataclasses
from collections.abc import Callable, Hashable

from hilore_jax.actions import Compress, Policy
from hilore_jax.planning.allocate import total_risk
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.plan import Plan

_SAME = 1 + 1e-9  # of seconds, which are sums in another order

Risks = tuple[float, ...]  # of one entry, one a block


@dataclasses.dataclass(frozen=True)
class BlockView:
    """What leaving a name out changes in one block.

    Attributes:
        entry: figures of a policy; its `risk` is not read.
        distortion: what a policy changes in the gradient, see
            `hilore_jax.planning.frontier.distortion`.
    """

    entry: Callable[[Policy], Entry]
    distortion: Callable[[Policy], Hashable]


def without_idle_names(plan: Plan, block: BlockView) -> tuple[Plan, tuple[str, ...]]:
    """The plan without names whose absence does not slow backward, and what was taken out.

    A name goes only where the risk of what is left is known: it compresses nothing, changes the
    gradient as before, or changes it as a calibrated entry of the menu does, with which the plan is
    still within its risk budget. A stored name beside a decoded one may have kept it from reaching
    others: what is recomputed from decoded values has an error too.

    Args:
        plan: the plan.
        block: figures and distortions of its block's policies.

    Returns:
        The plan, its menu longer where that lacked what is left, and what was left out, a phrase
        each. Memory is still the longer plan's.

    Example:
        >>> from hilore_jax import Store
        >>> from hilore_jax.planning.memory import Memory
        >>> q, none = Policy({"q": Store()}), Memory(0, 0, 0, 1, 0, 0)
        >>> entries = [Entry(policy, 8, 1.0, 0, 0, 0.0) for policy in (q, Policy({}))]
        >>> how = ("cpu", 0.0, 9, 9, none, none, 9, 0.0, "modelled", {}, ())
        >>> plan = Plan((q, q), (entries[0],), *how)
        >>> view = BlockView({e.policy: e for e in entries}.__getitem__, lambda policy: ())
        >>> without_idle_names(plan, view)[1]
        ('q of [q=store]',)
    """
    known = {entry.policy: entry for entry in plan.menu}
    risks = _columns(plan)
    replaced: dict[Policy, Policy] = {}
    removed: list[str] = []
    for policy in dict.fromkeys(plan.policies):
        current = policy
        for name in policy:
            kept = {n: a for n, a in current.actions if n != name}
            less = Policy(kept, tainted_matmuls=current.tainted_matmuls)
            found = _risks(plan, risks, current, less, block)
            if found is None or not _within(plan, risks, {**replaced, policy: less}, less, found):
                continue
            # Both anew: the menu's seconds may be by another measurement of the target's speed.
            figures, before = block.entry(less), block.entry(current).seconds
            if figures.seconds <= before * _SAME:
                risks.setdefault(less, found)
                # In the menu's own measure, with whose other seconds they are added.
                scale = known[current].seconds / before if before else 1.0
                seconds = figures.seconds * scale
                known[less] = dataclasses.replace(figures, seconds=seconds, risk=max(found))
                removed.append(f"{name} of [{policy}]")
                current = less
        replaced[policy] = current
    if not removed:
        return plan, ()
    order = {entry.policy for entry in plan.menu}
    added = [p for p in dict.fromkeys(replaced.values()) if p not in order]
    rows = plan.block_risks
    if rows is not None:
        rows = tuple((*row, *(risks[p][b] for p in added)) for b, row in enumerate(rows))
    return (
        dataclasses.replace(
            plan,
            policies=tuple(replaced[p] for p in plan.policies),
            menu=(*plan.menu, *(known[p] for p in added)),
            block_risks=rows,
        ),
        tuple(removed),
    )


def _columns(plan: Plan) -> dict[Policy, Risks]:
    """Of each entry of the menu its risk in each block."""
    entries = range(len(plan.menu))
    return {plan.menu[i].policy: tuple(menu[i].risk for menu in plan.menus) for i in entries}


def _risks(
    plan: Plan, risks: dict[Policy, Risks], before: Policy, less: Policy, block: BlockView
) -> Risks | None:
    """Risks of what is left of a policy; None: not known."""
    if not less.names(Compress):
        return (0.0,) * len(plan.policies)
    found = block.distortion(less)
    if found == block.distortion(before):
        return risks[before]
    calibrated = () if plan.block_risks is None else plan.menu
    same = (e.policy for e in calibrated if e.policy.names(Compress))
    return next((risks[policy] for policy in same if block.distortion(policy) == found), None)


def _within(
    plan: Plan,
    risks: dict[Policy, Risks],
    replaced: dict[Policy, Policy],
    less: Policy,
    found: Risks,
) -> bool:
    """Whether the plan is within its risk budget, or no riskier than it was, with what is left."""
    columns = {**risks, less: found}
    new = [columns[replaced.get(p, p)][b] for b, p in enumerate(plan.policies)]
    return total_risk(new, paper=plan.paper) <= max(plan.risk_budget, plan.risk)
