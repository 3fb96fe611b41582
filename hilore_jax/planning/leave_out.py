"""Leave-one-out: entries of a plan whose absence does not slow the measured update."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hilore_jax.actions import Policy
from hilore_jax.planning.plan import Plan

_LOG = logging.getLogger("hilore_jax")

# `planning.profile.profile_plan` with everything but the plans bound.
Profiler = Callable[[Mapping[str, Sequence[Policy]]], Mapping[str, Any]]

_WHOLE = "the plan"


def without_idle_entries(plan: Plan, profile: Profiler) -> tuple[Plan, tuple[str, ...]]:
    """The plan without entries that save no time, by measured complete updates.

    Each entry is given back in turn: its blocks recompute everything. All variants and the plan
    itself take turns, and the one whose updates are fastest goes if the median of its paired time
    ratios to the plan is at most 1; then the rest is measured anew, as entries share what they save
    (HiLoRe, arXiv 2609.33570, acceptance: units whose removal does not slow the joint schedule).

    Args:
        plan: the plan; its menu must hold `Policy({})`, which every block's menu does.
        profile: measures complete updates under policies by name, see
            `hilore_jax.planning.profile.profile_plan`; the first is the reference.

    Returns:
        The plan and what was left out, a sentence each.

    Example:
        >>> import types
        >>> from hilore_jax import Store
        >>> from hilore_jax.planning.memory import Memory
        >>> from hilore_jax.planning.menu import Entry
        >>> gc, idle = Policy({}), Policy({"q": Store()})
        >>> menu, memory = (Entry(gc, 0, 1.0, 1, 1, 0.0), Entry(idle, 8, 1.0, 1, 1, 0.0)), 6 * [0]
        >>> plan = Plan(
        ...     (idle, idle),
        ...     menu,
        ...     "cpu",
        ...     0.0,
        ...     9,
        ...     9,
        ...     Memory(*memory),
        ...     Memory(*memory),
        ...     9,
        ...     0.0,
        ...     "modelled",
        ...     {},
        ...     (),
        ... )
        >>> as_fast = lambda plans: {
        ...     name: types.SimpleNamespace(to_first=types.SimpleNamespace(median=1.0))
        ...     for name in plans
        ... }
        >>> without_idle_entries(plan, as_fast)[1]
        ('q=store of 2 blocks: the update takes 1.000 of the time without it',)
    """
    nothing, removed = Policy({}), []
    if all(entry.policy != nothing for entry in plan.menu):
        _LOG.warning("no entry is left out: the plan's menu has none that recomputes everything")
        return plan, ()
    while kept := [p for p in dict.fromkeys(plan.policies) if p != nothing]:
        variants = {
            str(policy): tuple(nothing if p == policy else p for p in plan.policies)
            for policy in kept
        }
        found = profile({_WHOLE: plan.policies, **variants})
        ratios = {name: found[name].to_first.median for name in variants}
        fastest = min(ratios, key=lambda name: ratios[name])
        if ratios[fastest] > 1:
            break
        count = sum(str(p) == fastest for p in plan.policies)
        removed.append(
            f"{fastest} of {count} block{'s' * (count > 1)}: the update takes "
            f"{ratios[fastest]:.3f} of the time without it"
        )
        plan = dataclasses.replace(plan, policies=variants[fastest])
    return plan, tuple(removed)
