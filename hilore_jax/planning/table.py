"""A plan as text: what each range of blocks keeps and saves, and which limits that meets."""

import textwrap
from collections.abc import Sequence
from operator import mul

from hilore_jax.explain import format_bytes
from hilore_jax.planning.cells import (
    BYTES,
    FLOPS,
    SECONDS,
    Units,
    aligned,
    column,
    format_seconds,
    legend,
    letter,
)
from hilore_jax.planning.measured import Measured
from hilore_jax.planning.memory import Memory
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.plan import Plan, runs
from hilore_jax.planning.target_data import GPUS, TPUS
from hilore_jax.planning.why_not import why_not_faster

WIDTH = 120


def plan_table(plan: Plan) -> str:
    """The text that `Plan.explain()` returns, at most 120 columns wide."""
    count = len(plan.policies)
    lines = [f"plan for {plan.target}, {count} block{'s' * (count > 1)}"]
    lines += _wrapped(_sources(plan))
    for part in (_actions(plan), _costs(plan), _memory(plan), _totals(plan)):
        lines += ["", *part]
    return "\n".join(lines)


def _sources(plan: Plan) -> str:
    """Which figures are compiled, modelled and measured."""
    time = "modelled (roofline)" if plan.measured is None else "measured"
    risk = "default table" if plan.block_risks is None else "calibrated"
    return (
        f"memory: compiled for the target; time: {time}; risk (gradient error): {risk}; "
        "GC: all recomputed"
    )


def _ranges(plan: Plan) -> list[range]:
    found, first = [], 0
    for _, count in runs(plan.policies):
        found.append(range(first, first + count))
        first += count
    return found


def _label(blocks: range) -> str:
    return f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else str(blocks[0])


def _actions(plan: Plan) -> list[str]:
    """Block ranges x names, in as many tables beside each other as the width needs."""
    ranges = _ranges(plan)
    used = sorted({name for policy in plan.policies for name in policy})
    rest = sorted({name for entry in plan.menu for name in entry.policy} - {*used})
    lines = ["What the backward pass has of each activation:"]
    while used:
        shown = len(used)
        while True:
            rows = [["blocks", *used[:shown]]]
            for blocks in ranges:
                policy = plan.policies[blocks[0]]
                rows.append([_label(blocks), *(letter(policy[name]) for name in used[:shown])])
            table = aligned(rows, left=range(shown + 1))
            if shown == 1 or max(map(len, table)) <= WIDTH - 2:
                break
            shown -= 1
        lines += ["  " + line for line in table]
        used = used[shown:]
    if rest or len(lines) == 1:
        lines += _wrapped(f"R in every block: {', '.join(rest) or 'all'}", "  ")
    return lines + _wrapped(", ".join(legend(plan.policies)), "  ")


def _costs(plan: Plan) -> list[str]:
    """What one block of each range keeps, recomputes, saves and risks, and all blocks below."""
    ranges, entries = _ranges(plan), plan.entries
    gc = max(entry.seconds for entry in plan.menu)
    firsts = [entries[blocks[0]] for blocks in ranges]
    counts = [len(blocks) for blocks in ranges]
    saved = [gc - entry.seconds for entry in firsts]

    def figures(head: str, values: Sequence[float | int], units: Units) -> list[str]:
        total = sum(n * value for n, value in zip(counts, values, strict=True))
        unit, cells = column(values, units, total)
        return [head, unit, *cells]

    unit, _ = column([gc], SECONDS, gc * len(entries))
    time = tuple(each for each in SECONDS if each[0] == unit)  # all times in one unit
    columns = [
        ["", "blocks", *map(_label, ranges), "all"],
        figures("keeps", [entry.nbytes for entry in firsts], BYTES),
        figures("recomputes", [entry.flops for entry in firsts], FLOPS),
    ]
    if plan.measured is None:
        columns.append(figures("taking", [entry.seconds for entry in firsts], time))
    columns.append(figures("saves", saved, time))
    if plan.measured is not None:
        columns.append(_quartiles(plan, firsts, unit))
    shares = [_share(plan, n * value) for n, value in zip(counts, saved, strict=True)]
    columns.append(["share of", "possible", *shares, _share(plan, sum(map(mul, counts, saved)))])
    risks = [[entries[i].risk for i in blocks] for blocks in ranges]
    columns.append(["", "risk", *map(_spread, risks), f"{plan.risk:.4f}"])
    table = aligned(list(zip(*columns, strict=True)))
    removed = f"{100 * plan.removed_flops:.1f} % of the matmul FLOPs that GC recomputes are gone"
    reasons = [["why not faster"], *(why_not_faster(plan, blocks) for blocks in ranges), [removed]]
    width = max(map(len, table))
    lines = ["What one block keeps, recomputes, saves against GC, and why its range is not faster:"]
    lines.append("  " + table[0])
    for line, words in zip(table[1:], reasons, strict=True):
        room = max(WIDTH - width - 4, 40)
        wrapped = [part for text in words for part in _wrapped(text, width=room)]
        lines += [
            f"  {left.ljust(width)}  {right}".rstrip()
            for left, right in zip([line, *[""] * (len(wrapped) - 1)], wrapped, strict=True)
        ]
    return lines


def _quartiles(plan: Plan, entries: Sequence[Entry], unit: str) -> list[str]:
    """Between which quartiles the measured savings lie."""
    assert plan.measured is not None
    size, cells = dict(SECONDS)[unit], []
    for entry in entries:
        spread = plan.measured.spread(entry.policy) if entry.policy else None
        cells.append("" if spread is None else " to ".join(f"{s / size:.2f}" for s in spread))
    return ["quartiles", unit, *cells, ""]


def _possible(plan: Plan) -> float:
    """Seconds that no choice from the menu could exceed in saving, within this budget."""
    return len(plan.policies) * max(entry.seconds for entry in plan.menu) - plan.bound_seconds


def _share(plan: Plan, seconds: float) -> str:
    possible = _possible(plan)
    return f"{100 * seconds / possible:.1f} %" if possible > 0 else "-"


def _spread(risks: Sequence[float]) -> str:
    low, high = f"{min(risks):.4f}", f"{max(risks):.4f}"
    return low if low == high else f"{low}-{high}"


def _memory(plan: Plan) -> list[str]:
    """The peaks, each with what it is."""

    def row(name: str, memory: Memory, note: str = "") -> list[str]:
        new = memory.outputs - memory.aliased
        parts = (memory.peak, memory.arguments, memory.temporaries, new, memory.host)
        return [name, *map(format_bytes, parts), note]

    def only(name: str, peak: int, note: str) -> list[str]:
        return [name, format_bytes(peak), "", "", "", "", note]

    peak = plan.memory.peak
    used, xla = f"{100 * peak / plan.budget:.1f} % of the budget", plan.memory.xla_peak
    if xla and abs(xla - peak) > 0.001 * peak:
        used += f" (XLA's own: {format_bytes(xla)})"
    rows = [
        ["", "peak", "arguments", "temporaries", "outputs", "on host", ""],
        row("plan, compiled", plan.memory, used),
        only(
            "plan, predicted",
            plan.predicted,
            f"{100 * (plan.predicted / peak - 1):+.2f} % of compiled",
        ),
        row("GC, compiled", plan.gc),
    ]
    relative = ""
    if plan.baseline is not None and plan.baseline != plan.gc.peak:
        rows.append(only("baseline, compiled", plan.baseline, "GC of the update given as baseline"))
        relative = f"{plan.budget / plan.baseline:.3g} x baseline"
    elif plan.baseline is not None:
        relative = f"{plan.budget / plan.baseline:.3g} x GC"
    rows.append(only("budget", plan.budget, relative))
    if (device := _device(plan.target)) is not None:
        rows.append(only("device", device, "nominal; driver and context hold a part"))
    title = (
        "Memory of one device; peak = arguments + outputs that take no donated space + temporaries:"
    )
    return [title, *("  " + line for line in aligned(rows, left=(0, 6)))]


def _device(target: str) -> int | None:
    """Bytes of a device known by name."""
    platform, _, name = target.partition(":")
    known = {"cuda": GPUS, "tpu": TPUS}.get(platform, {})
    kind = name.partition(":")[0]
    kind = kind if kind in known else kind.rpartition("x")[0]
    return known[kind].facts.memory if kind in known else None


def _totals(plan: Plan) -> list[str]:
    """Time and risk of all blocks against their limits."""
    gc = len(plan.policies) * max(entry.seconds for entry in plan.menu)
    possible = _possible(plan)
    if possible <= 0:
        time = "nothing in this budget is faster than GC"
    else:
        saved = gc - plan.recompute_seconds
        time = (
            f"{format_seconds(saved)} saved a microbatch, {100 * saved / possible:.1f} % of the "
            f"possible {format_seconds(possible)}, a bound for this budget"
        )
        if plan.measured is None:
            time += f"; gradient checkpointing recomputes for {format_seconds(gc)}"
    risk = f"{plan.risk:.4f} of {plan.risk_budget:g}"
    risk += ", the blocks' " + ("sum" if plan.paper else "root of summed squares")
    if plan.block_risks is not None:
        risk += f", at exposure {plan.exposure:.4g}"
    lines = [f"time: {time}", f"risk: {risk}"]
    if (measured := plan.measured) is not None:
        lines.insert(1, _measured(plan, measured))
    if plan.acceptance is not None:
        lines.append(f"{'accepted' if plan.accepted else 'rejected'}: {plan.acceptance['reason']}")
    return [part for line in lines for part in _wrapped(line)]


def _measured(plan: Plan, measured: Measured) -> str:
    few = sorted({t.blocks for t in measured.timings if t.blocks < len(plan.policies)})
    return (
        f"measured: updates under {len(measured.timings)} policies in {measured.turns} turns, "
        f"{format_seconds(measured.update_seconds)} each under GC"
        + (f"; some in only {few[0]} blocks, as more did not fit" if few else "")
        + (f"; not measured: {len(left)} of the menu" if (left := measured.left_out) else "")
    )


def _wrapped(text: str, indent: str = "", width: int = WIDTH) -> list[str]:
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\xa0", " ") for line in lines]
