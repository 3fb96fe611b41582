"""A plan as text: block ranges x names, memory predicted and compiled, and why not the next."""

from hilore_jax.actions import Action, Offload, Recompute, Store
from hilore_jax.explain import format_bytes
from hilore_jax.planning.allocate import total_risk
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.plan import Plan, runs


def plan_table(plan: Plan) -> str:
    """The table that `Plan.explain()` prints."""
    names = sorted({name for entry in plan.menu for name in entry.policy})
    entries = plan.entries
    slowest = max(entry.seconds for entry in plan.menu)
    head = ["blocks", *names, "kept/block", "ms saved/block", "TFLOP recomputed", "risk/block"]
    rows = [head]
    first = 0
    for policy, count in runs(plan.policies):
        entry = entries[first]
        last = first + count - 1
        risk = max(e.risk for e in entries[first : last + 1])
        rows.append(
            [
                f"{first}-{last}" if last > first else str(first),
                *(letter(policy[name]) for name in names),
                format_bytes(entry.nbytes),
                _saved(plan, entry, slowest),
                f"{entry.flops / 1e12:.3f}",
                f"{risk:.4f}",
            ]
        )
        first += count
    lines = [f"plan for {plan.target}, {len(plan.policies)} blocks; seconds are {plan.cost}"]
    lines += _aligned(rows)
    lines.append(
        "H stored, R recomputed, O offloaded; L compressed: i8, i4, f8, then @axis/tile where they "
        "are not the default"
    )
    lines += _memory(plan)
    lines += _measured(plan)
    lines.append(
        f"recompute: {plan.recompute_seconds:.4f} s a microbatch ({_zero(plan)}), {_bound(plan)}; "
        f"{100 * plan.removed_flops:.1f} % of GC's recomputed matmul FLOPs removed"
    )
    lines.append(f"risk: {plan.risk:.4f} of {plan.risk_budget:g}{_calibrated(plan)}")
    lines.append(why_not_better(plan))
    return "\n".join(lines)


def _saved(plan: Plan, entry: Entry, slowest: float) -> str:
    """Milliseconds that an entry saves against GC, with their quartiles where they are measured."""
    text = f"{1e3 * (slowest - entry.seconds):.3f}"
    spread = None if plan.measured is None else plan.measured.spread(entry.policy)
    if spread is None or not entry.policy:
        return text
    return f"{text} ({1e3 * spread[0]:.3f} to {1e3 * spread[1]:.3f})"


def _measured(plan: Plan) -> list[str]:
    """How seconds were measured, where they were."""
    if (measured := plan.measured) is None:
        return []
    few = sorted({t.blocks for t in measured.timings if t.blocks < len(plan.policies)})
    return [
        f"measured: updates under {len(measured.timings)} policies in {measured.turns} turns, "
        f"{measured.update_seconds:.4f} s each under GC; milliseconds saved are medians of paired "
        "differences, with quartiles"
        + (f"; some in only {few[0]} blocks, as more did not fit" if few else "")
        + (f"; {len(left)} entries were not measured" if (left := measured.left_out) else "")
    ]


def _zero(plan: Plan) -> str:
    return plan.cost if plan.measured is None else "measured, beyond the fastest entry of the menu"


def letter(action: Action) -> str:
    """An action in a table's cell.

    Example:
        >>> from hilore_jax.actions import Compress
        >>> letter(Store()), letter(Recompute()), letter(Compress("int8", axis=1, tile=32))
        ('H', 'R', 'i8@1/32')
    """
    if isinstance(action, Store):
        return "H"
    if isinstance(action, Recompute):
        return "R"
    if isinstance(action, Offload):
        return "O"
    codec = action.codec if isinstance(action.codec, str) else action.codec.name
    short = {"int8": "i8", "int4": "i4", "fp8_e4m3": "f8", "fp8_e5m2": "f8e5"}.get(codec, codec)
    tile = "all" if action.tile is None else action.tile
    plain = (action.axis, action.tile) == (-1, 128)
    return short if plain else f"{short}@{action.axis}/{tile}"


def why_not_better(plan: Plan) -> str:
    """For each range of blocks, which budget keeps one of them from its next faster entry.

    The next is the faster entry that needs fewest more bytes; of those that need none, the fastest
    one, which then is forbidden by its risk.
    """
    fastest = min(entry.seconds for entry in plan.menu)
    if all(entry.seconds <= fastest for entry in plan.entries):
        return "no block can be faster with any entry of the menu"
    lines, first = ["why not the next better, in one block of a range:"], 0
    for _, count in runs(plan.policies):
        where = f"{first}-{first + count - 1}" if count > 1 else str(first)
        lines.append(f"  {where}: {_next(plan, range(first, first + count))}")
        first += count
    return "\n".join(lines)


def _next(plan: Plan, blocks: range) -> str:
    entry = plan.entries[blocks[0]]
    better = [other for other in plan.menu if other.seconds < entry.seconds]
    if not better:
        return "no entry of the menu is faster"
    step = min(better, key=lambda other: (max(0, other.nbytes - entry.nbytes), other.seconds))
    more, left = step.nbytes - entry.nbytes, plan.budget - plan.memory.peak
    risk = min(_risk_with(plan, block, plan.menu.index(step)) for block in blocks)
    reasons = []
    if more > left:
        reasons.append(f"{format_bytes(more)} more are needed, {format_bytes(left)} are left")
    if risk > plan.risk_budget:
        reasons.append(f"the risk would be {risk:.4f}")
    gain = 1e3 * (entry.seconds - step.seconds)
    small = (
        f"its {gain:.3f} ms for {format_bytes(max(more, 0))} are less than other blocks gain with "
        "them, or lie between two candidates"
    )
    return f"[{step.policy}]: {' and '.join(reasons) or small}"


def _risk_with(plan: Plan, block: int, choice: int) -> float:
    """The plan's risk, were a block under another entry of its own menu."""
    risks = [entry.risk for entry in plan.entries]
    risks[block] = plan.menus[block][choice].risk
    return total_risk(risks, paper=plan.paper)


def _memory(plan: Plan) -> list[str]:
    memory = plan.memory
    against = "" if plan.baseline is None else f", {plan.budget / plan.baseline:.3f} x baseline"
    error = 100 * (plan.predicted / memory.peak - 1)
    return [
        f"peak: compiled {format_bytes(memory.peak)}, predicted {format_bytes(plan.predicted)} "
        f"({error:+.2f} %), budget {format_bytes(plan.budget)}{against}, GC "
        f"{format_bytes(plan.gc.peak)}",
        f"  arguments {format_bytes(memory.arguments)}, temporaries "
        f"{format_bytes(memory.temporaries)}, outputs not donated "
        f"{format_bytes(memory.outputs - memory.aliased)}, host {format_bytes(memory.host)}; "
        f"the compiler's own peak {format_bytes(memory.xla_peak)}",
    ]


def _calibrated(plan: Plan) -> str:
    """Where the risks are from, where they are measured, and what acceptance found."""
    words = "" if plan.block_risks is None else f", calibrated, at exposure {plan.exposure:.4g}"
    if plan.paper:
        words += ", added linearly"
    if plan.acceptance is not None:
        words += f"; {'accepted' if plan.accepted else 'rejected'}: {plan.acceptance['reason']}"
    return words


def _bound(plan: Plan) -> str:
    """How near the plan comes to what no choice from the menu can exceed in its budget."""
    gc = len(plan.policies) * max(entry.seconds for entry in plan.menu)
    possible = gc - plan.bound_seconds
    if possible <= 0:
        return "as GC's, and nothing in this budget is less"
    share = 100 * (gc - plan.recompute_seconds) / possible
    return f"GC {gc:.4f} s; it saves {share:.1f} % of what this budget could at most"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
