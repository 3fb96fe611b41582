"""Why a range of blocks is not under a faster entry of the menu: bytes, risk, or the search."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from hilore_jax.explain import format_bytes
from hilore_jax.planning.allocate import total_risk
from hilore_jax.planning.cells import format_seconds, letter
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.plan import Plan


class Step(NamedTuple):
    """A range of blocks, or those of it that may, under a faster entry."""

    entry: Entry
    seconds: float  # saved
    more: int  # bytes kept beyond what is kept now
    large: bool  # they are more than the budget has left
    risk: float  # the plan's
    risky: bool  # it is above the risk budget


def why_not_faster(plan: Plan, blocks: Sequence[int]) -> list[str]:
    """What keeps a range of blocks from a faster entry, in words.

    Of the faster entries, those nearest to a budget: the one that needs fewest bytes within the
    risk budget, and the one of least risk within the memory budget. Figures are for all blocks of
    the range but those that may not have the entry, as its risk there is infinite.

    Args:
        plan: the plan.
        blocks: consecutive blocks under the same policy.

    Returns:
        One reason, or two; what should not be broken into lines has spaces that do not break.
    """
    now = plan.entries[blocks[0]]
    left = plan.budget - plan.memory.peak
    faster = [i for i, entry in enumerate(plan.menu) if entry.seconds < now.seconds]
    if not faster:
        return ["nothing in the menu is faster"]
    steps = [step for i in faster if (step := _step(plan, blocks, i, left)) is not None]
    if not steps:
        return ["nothing faster was measured by the calibration"]
    fitting = [step for step in steps if not step.large and not step.risky]
    if fitting:
        best = max(fitting, key=lambda step: step.seconds)
        return [f"{_change(now, best)} fits by these figures, but no trial with it did"]
    large = sorted((s for s in steps if not s.risky), key=lambda s: (s.more, -s.seconds))
    risky = sorted((s for s in steps if not s.large), key=lambda s: (s.risk, -s.seconds))
    nearest = large[:1] + risky[:1] or [min(steps, key=lambda s: (s.more, s.risk))]
    return [f"{_change(now, step)} {_needs(plan, step, left)}" for step in nearest]


def _step(plan: Plan, blocks: Sequence[int], place: int, left: int) -> Step | None:
    old, new = plan.entries[blocks[0]], plan.menu[place]
    risks = [entry.risk for entry in plan.entries]
    able = [block for block in blocks if math.isfinite(plan.menus[block][place].risk)]
    if not able:
        return None
    for block in able:
        risks[block] = plan.menus[block][place].risk
    risk, more = total_risk(risks, paper=plan.paper), len(able) * (new.nbytes - old.nbytes)
    saved = len(able) * (old.seconds - new.seconds)
    return Step(new, saved, more, more > max(left, 0), risk, risk > plan.risk_budget)


def _change(now: Entry, step: Step) -> str:
    """What would be done otherwise, and the time that it would save."""
    old, new = now.policy, step.entry.policy
    names = [name for name in sorted({*old, *new}) if old[name] != new[name]]
    changed = [f"{name} {letter(old[name])}->{letter(new[name])}" for name in names]
    parts = [text.replace(" ", "\xa0") for text in (*changed, format_seconds(step.seconds))]
    return f"{', '.join(parts[:-1])}: {parts[-1]} less,"


def _needs(plan: Plan, step: Step, left: int) -> str:
    reasons = []
    if step.large:
        more, rest = (format_bytes(n).replace(" ", "\xa0") for n in (step.more, left))
        reasons.append(f"needs {more} more, {rest} left")
    if step.risky:
        digits = next((d for d in range(4, 9) if float(f"{step.risk:.{d}f}") > plan.risk_budget), 9)
        reasons.append(f"risk {step.risk:.{digits}f} > {plan.risk_budget:g}")
    return " and ".join(reasons)
