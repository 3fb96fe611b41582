"""Measuring a menu: complete updates under its entries and under GC, in turns, on this device."""

import dataclasses
import functools
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from hilore_jax.actions import Policy
from hilore_jax.planning import expect
from hilore_jax.planning.allocate import allocate
from hilore_jax.planning.bar import LINES, Bar
from hilore_jax.planning.claims import PLAIN, claim_fault
from hilore_jax.planning.executed import Executed, executed_matmuls
from hilore_jax.planning.measured import Measured, Timing, paired
from hilore_jax.planning.memory import TargetMemoryError, compile_for, lower_for, memory_of
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.pareto import thinned
from hilore_jax.planning.placement import place
from hilore_jax.planning.profile import copies
from hilore_jax.planning.room import fitting, room
from hilore_jax.planning.target import Target
from hilore_jax.planning.timing import interleaved
from hilore_jax.work import Work

_LOG = logging.getLogger("hilore_jax")
_COSTS = (
    '"modelled" (a roofline), "measured" (updates timed on this device), a Measurement, or the '
    "`measured` of an earlier plan"
)
_LEVELS = 8  # of memory, at which the modelled allocation says what it would use

Policies = tuple[Policy, ...]
Timer = Callable[
    [Mapping[str, Callable[..., Any]], int, Mapping[str, Callable[[], Any]]],
    Mapping[str, Sequence[float]],
]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """How `hilore_jax.plan(cost=...)` measures.

    Attributes:
        turns: timed updates under each policy.
        most: policies that are measured beside GC; the others of a menu are left out.
        microbatches: that one update runs.
        timer: as `planning.timing.interleaved`: runs by name, turns, and what makes each run's
            arguments, to seconds by name and turn.
    """

    turns: int = 5
    most: int = 10
    microbatches: int = 1
    timer: Timer = interleaved

    def __post_init__(self) -> None:
        for name in ("turns", "most", "microbatches"):
            expect.whole(f"Measurement({name}=...)", getattr(self, name))
        expect.function("Measurement(timer=...)", self.timer, "as planning.timing.interleaved")


class _Program(NamedTuple):
    """A compiled update, whose first `count` blocks are under an entry."""

    entry: Entry
    count: int
    compiled: Any

    def run(self, args: tuple[Any, ...]) -> Any:
        return self.compiled(*args)


def parse_cost(cost: "str | Measurement | Measured") -> Measurement | Measured | None:
    """What `hilore_jax.plan`'s `cost` asks for; None is the roofline.

    Raises:
        TypeError, ValueError: something else, or another text.

    Example:
        >>> parse_cost("measured").turns, parse_cost("modelled")
        (5, None)
    """
    if isinstance(cost, Measurement | Measured):
        return cost
    if not isinstance(cost, str):
        expect.refuse("cost=...", cost, _COSTS)
    if cost == "measured":
        return Measurement()
    if cost == "modelled":
        return None
    raise ValueError(f"cost={cost!r}: expected {_COSTS}.")


def check_measurable(args: Any, target: Target) -> None:
    """Refuses to measure what is not here.

    Args:
        args: the update's arguments.
        target: what is planned for.

    Raises:
        ValueError: the target is another device than this process's, or an argument is a shape.
    """
    if target.description:
        here = jax.devices()[0]
        raise ValueError(
            f'cost="measured" times updates on the device that is here, {here.device_kind} '
            f"({here.platform}), but the target is {target.name}, which is only compiled for. Plan "
            'with target="device" there, or with cost="modelled".'
        )
    remedy = "Pass arrays (random ones do: times do not depend on them), or plan with "
    expect.values(args, "args", 'cost="measured" runs the update', f'{remedy}cost="modelled".')


def shortlist(
    menus: Sequence[tuple[Entry, ...]], risk: float, paper: bool, most: int
) -> tuple[Entry, ...]:
    """The entries worth measuring: what modelled allocations use, then those farthest from these.

    Args:
        menus: a block's modelled menu, one a block.
        risk: the risk budget; an entry above it in every block can never be used.
        paper: risks add linearly.
        most: entries beside GC.

    Returns:
        Entries of the first menu, GC first, then by bytes.
    """
    usable = {e.policy for menu in dict.fromkeys(menus) for e in menu if e.risk <= risk}
    menu = [entry for entry in menus[0] if entry.policy in usable]
    top = len(menus) * max(entry.nbytes for entry in menu)
    levels = range(1, _LEVELS + 1)
    found = [allocate(menus, top * level // _LEVELS, risk, paper=paper) for level in levels]
    gc = [entry for entry in menu if entry.policy == Policy({})]
    used = {policy for allocation in found for policy in allocation.policies} | {Policy({})}

    def figures(entry: Entry) -> tuple[float | int, ...]:
        return entry.nbytes, entry.seconds, entry.risk

    wanted = thinned([entry for entry in menu if entry.policy in used], gc, most + 1, figures)
    kept = thinned(menu, wanted, most + 1, figures)
    return tuple(sorted(kept, key=lambda e: (e.policy != Policy({}), e.nbytes)))


def measure(
    update: Callable[..., Any],
    arguments: Callable[[Policies], tuple[Any, ...]],
    menu: Sequence[Entry],
    entries: Sequence[Entry],
    *,
    blocks: int,
    target: Target,
    donate: tuple[int, ...],
    how: Measurement,
    fingerprint: dict[str, str],
    progress: bool | None = None,
) -> Measured:
    """Times complete updates with all blocks under each entry, against GC.

        saved_p = median over turns of (t_GC - t_p) / (blocks * microbatches)

    (HiLoRe's measured utility, methods 1.4: paired, warmed, repeated, from equal states.) All
    programs are compiled first, for the target and as the planner compiles them. Every run starts
    from copies of the same parameters, optimizer state and keys, made before its clock starts. An
    entry that does not fit the device in all blocks is measured in as many as fit. An entry whose
    program still runs matmuls that it should spare is left out (`planning.claims`).

    Args:
        update: as for `hilore_jax.plan`.
        arguments: the update's arrays, in the layout of the given policies.
        menu: all entries, so that those not measured can be named.
        entries: to measure, GC first.
        blocks: how many.
        target: this process's device or devices.
        donate: positions of arguments whose buffers the update reuses.
        how: turns, microbatches and the timer.
        fingerprint: what the figures hold for.
        progress: show a bar, or lines off a terminal; default: a bar on a terminal.

    Returns:
        What was measured.

    Raises:
        ValueError: complete updates do not fit the device even under GC, or do not recompute under
            GC what its entry says.
    """
    gc = entries[0]
    free = room(arguments((gc.policy,) * blocks), target)
    timed: dict[str, _Program] = {}
    faults: dict[str, str] = {}
    with Bar(progress, len(entries) + 1) as bar:

        def compiled(policies: Policies) -> Any:
            bar.step(f"to measure: {policies[0]}")
            bound = functools.partial(update, policies)
            lowered = lower_for(bound, *arguments(policies), target=target, donate=donate)
            return compile_for(lowered, target)

        least = 0
        for entry in entries:
            found = fitting(compiled, entry.policy, blocks, free, least)
            if found is not None:
                timed[str(entry.policy)] = _Program(entry, *found)
                least = least or memory_of(found[1]).peak
            elif entry is gc:
                raise ValueError(
                    f"updates do not fit the {free} bytes that {target.name} has free, even with "
                    "every block recomputed. Make microbatches smaller, or plan with "
                    'cost="modelled".'
                )
            else:
                faults[str(entry.policy)] = "not one block of it fits the device"
        try:
            plain = executed_matmuls(compiled((PLAIN,) * blocks).as_text())
            faults |= _false_claims(timed, gc, plain, blocks, how.microbatches)
        except TargetMemoryError as error:
            _LOG.warning("what the programs recompute is not checked: %s", error)
    for policy, why in faults.items():
        _LOG.warning("policy %s is not measured and left out of the menu: %s", policy, why)
        timed.pop(policy, None)
    others = _not_listed(menu, entries)
    if others:
        _LOG.info("%d entries of the menu are left out: %s", len(others), others[0][1])
    with Bar(progress, len(timed) * (how.turns + 1), "update", every=LINES) as bar:

        def fresh(program: _Program) -> tuple[Any, ...]:
            policy, count = program.entry.policy, program.count
            bar.step(f"measuring {policy}")
            return copied(arguments((policy,) * count + (gc.policy,) * (blocks - count)), target)

        seconds = how.timer(
            {name: program.run for name, program in timed.items()},
            how.turns,
            {name: functools.partial(fresh, program) for name, program in timed.items()},
        )
    theirs = seconds[str(gc.policy)]
    timings = []
    for name, (entry, count, _) in timed.items():
        share = 1 / (count * how.microbatches)
        figures = (share * difference for difference in paired(theirs, seconds[name]))
        timings.append(Timing(entry.policy, *figures, blocks=count))
    return Measured(
        timings=tuple(timings),
        turns=how.turns,
        update_seconds=statistics.median(theirs),
        left_out=(*faults.items(), *others),
        fingerprint=fingerprint,
    )


def copied(args: tuple[Any, ...], target: Target) -> tuple[Any, ...]:
    """Copies of the arrays where the target's programs take them."""
    places, _ = place(args, target)
    return copies(args, jax.tree.map(lambda leaf: leaf.sharding, places))


def _not_listed(menu: Sequence[Entry], entries: Sequence[Entry]) -> list[tuple[str, str]]:
    listed = {entry.policy for entry in entries}
    why = f"{len(entries) - 1} other entries were measured"
    return [(str(entry.policy), why) for entry in menu if entry.policy not in listed]


def _false_claims(
    timed: Mapping[str, _Program], gc: Entry, plain: Executed, blocks: int, microbatches: int
) -> dict[str, str]:
    """Policies whose programs do not recompute what their entries say, in words.

    Raises:
        ValueError: GC is one of them.
    """
    wrong = {}
    for name, (entry, count, compiled) in timed.items():
        each = Work(entry.matmuls, entry.flops) * count
        rest = Work(gc.matmuls, gc.flops) * (blocks - count)
        executed = executed_matmuls(compiled.as_text())
        fault = claim_fault((each + rest) * microbatches, plain, executed, alone=count == 1)
        if fault and entry is gc:
            many = fault.ratio * microbatches
            hint = f" Is it Measurement(microbatches={many})?" if fault.ratio > 1 else ""
            raise ValueError(
                f"with every block recomputed, the update is not what was planned: {fault}.{hint} "
                "Does it hand its policies to hl.scan_blocks, and is it the same block?"
            )
        if fault:
            wrong[name] = str(fault)
    return wrong
