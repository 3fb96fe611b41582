"""Plans as JSON: what is written, and what is checked of a file that is read."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from hilore_jax.planning.fields import Field, Format, read_json
from hilore_jax.planning.measured import Measured, Timing
from hilore_jax.planning.memory import Memory
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.menus import BlockRisks
from hilore_jax.planning.plan import Plan, Trial, runs

FORMAT = Format("plan", (1, 2, 3, 4, 5), "plan again", ("menu", "trials"))
_LATER: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(("block_risks", "exposure", "accepted", "acceptance"), (2, None)),
    "paper": (2, False),
    "measured": (3, None),
    "share": (4, None),
    "norm": (4, None),
}
"""Fields that older files lack: the schema that brought each, and what they mean without it."""

_BLOCKS = 100_000  # more than any model has: a count that is damaged must not fill the memory


def plan_fields(plan: Plan) -> dict[str, Any]:
    """A plan as JSON values."""
    return {
        **{f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)},
        "schema": FORMAT.schemas[-1],
        "policies": [[n, json.loads(p.to_json())] for p, n in runs(plan.policies)],
        "menu": [
            {
                **dataclasses.asdict(e),
                "policy": json.loads(e.policy.to_json()),
                "risk": to_null(e.risk),
            }
            for e in plan.menu
        ],
        "gc": plan.gc.to_dict(),
        "memory": plan.memory.to_dict(),
        "trials": [dataclasses.asdict(trial) for trial in plan.trials],
        "block_risks": plan.block_risks and [[to_null(r) for r in row] for row in plan.block_risks],
        "acceptance": plan.acceptance and _acceptance_fields(plan.acceptance),
        "measured": None if plan.measured is None else plan.measured.to_dict(),
    }


def to_null(value: float) -> float | None:
    """What is not finite as null: JSON has no word for it."""
    return value if math.isfinite(value) else None


def _acceptance_fields(found: dict[str, Any]) -> dict[str, Any]:
    """A rejected plan's errors may be infinite, or no numbers."""
    numbers = {name: to_null(found[name]) for name in ("predicted", "error")}
    return {**found, **numbers, "errors": [to_null(error) for error in found["errors"]]}


def load_plan(path: str | Path, found: Mapping[str, str] | None = None) -> Plan:
    """A plan from its file; see `Plan.load`."""
    return read_plan(*read_json(path, FORMAT), found)


def read_plan(schema: int, file: Field, situation: Mapping[str, str] | None = None) -> Plan:
    """The plan of a file's object.

    Args:
        schema: of the file.
        file: the object without it (`fields.checked_schema`).
        situation: a `fingerprint` that must agree, beside jax's version.

    Raises:
        ValueError: names the file, the field, what was found and what was expected.
    """
    later = {name: default for name, (since, default) in _LATER.items() if since > schema}
    names = [f.name for f in dataclasses.fields(Plan) if f.name not in later]
    found = file.fields(names, tuple(later))
    for name, default in later.items():
        found.setdefault(name, file.at(default, name))
    policies = tuple(
        policy
        for run in found["policies"].items(1)
        for count, policy in [run.pair("[count, policy]")]
        for policy in [policy.policy()] * count.whole(1, _BLOCKS)
    )
    menu = tuple(_entry(each) for each in found["menu"].items(1))
    plan = Plan(
        policies=policies,
        menu=menu,
        target=found["target"].text(),
        risk_budget=found["risk_budget"].number_or_inf(),
        budget=found["budget"].whole(1),
        baseline=found["baseline"].maybe(lambda f: f.whole(1)),
        gc=_memory(found["gc"]),
        memory=_memory(found["memory"]),
        predicted=found["predicted"].whole(),
        bound_seconds=found["bound_seconds"].number(),
        cost=found["cost"].text(("modelled", "measured")),
        fingerprint=found["fingerprint"].texts(),
        trials=tuple(_trial(each) for each in found["trials"].items()),
        block_risks=found["block_risks"].maybe(lambda f: _risks(f, len(policies), len(menu))),
        exposure=found["exposure"].maybe(Field.number_or_inf),
        paper=found["paper"].flag(),
        accepted=found["accepted"].maybe(Field.flag),
        acceptance=found["acceptance"].maybe(functools.partial(_acceptance, schema)),
        measured=found["measured"].maybe(_measured),
        share=found["share"].maybe(lambda f: f.number(above=0.0, most=1.0)),
        norm=found["norm"].maybe(lambda f: f.number(above=0.0)),
    )
    _check_whole(plan, found)
    plan.check({"jax": jax.__version__, **(situation or {})})
    return plan


def _check_whole(plan: Plan, found: dict[str, Field]) -> None:
    """Refuses fields that are right by themselves but not together."""
    known, blocks = {entry.policy for entry in plan.menu}, plan.fingerprint.get("blocks")
    for policy, _ in runs(plan.policies):
        if policy not in known:
            found["policies"].damaged(f"policies has '{policy}', which is not in the menu")
    if blocks is not None and blocks != str(len(plan.policies)):
        found["policies"].damaged(
            f"policies are for {len(plan.policies)} blocks, but fingerprint.blocks is {blocks}"
        )
    if plan.memory.peak > plan.budget:
        found["memory"].damaged(
            f"memory has a peak of {plan.memory.peak} bytes (arguments + outputs - aliased + "
            f"temporaries), above the budget of {plan.budget}"
        )
    if plan.block_risks is not None and plan.exposure is None:
        found["exposure"].damaged("exposure is null, but block_risks are for one")
    _together(found["measured"], plan.cost == "measured", f"cost is {plan.cost}")
    _together(found["acceptance"], plan.accepted is not None, f"accepted is {plan.accepted}")


def _together(field: Field, wanted: bool, why: str) -> None:
    there = field.value is not None
    if there != wanted:
        field.damaged(f"{field.where} is {'there' if there else 'null'}, but {why}")


def _entry(field: Field) -> Entry:
    found = field.fields([f.name for f in dataclasses.fields(Entry)])
    return Entry(
        policy=found["policy"].policy(),
        nbytes=found["nbytes"].whole(),
        seconds=found["seconds"].number(),
        matmuls=found["matmuls"].whole(),
        flops=found["flops"].whole(),
        risk=found["risk"].number_or_infinity(),
    )


def _memory(field: Field) -> Memory:
    found = field.fields([f.name for f in dataclasses.fields(Memory)])
    return Memory(**{name: each.whole() for name, each in found.items()})


def _trial(field: Field) -> Trial:
    found = field.fields([f.name for f in dataclasses.fields(Trial)])
    return Trial(
        policies=found["policies"].text(),
        predicted=found["predicted"].maybe(Field.whole),
        peak=found["peak"].maybe(Field.whole),
        fits=found["fits"].flag(),
    )


def _risks(field: Field, blocks: int, entries: int) -> BlockRisks:
    rows = field.items()
    if len(rows) != blocks:
        field.damaged(
            f"{field.where} has {len(rows)} rows, expected one for each of {blocks} blocks"
        )
    for row in rows:
        if len(row.items()) != entries:
            row.damaged(
                f"{row.where} has {len(row.items())} risks, expected one for each of the {entries} "
                "entries of the menu"
            )
    return tuple(tuple(risk.number_or_infinity() for risk in row.items()) for row in rows)


def _acceptance(schema: int, field: Field) -> dict[str, Any]:
    numbers = ("predicted", "error", "limit")
    later = ("measured",) if schema >= 5 else ()
    names = ("accepted", "reason", "peak", "errors", "removed", *numbers, *later)
    found = {"measured": field.at(None, "measured")} | field.fields(names)
    return {
        "accepted": found["accepted"].flag(),
        "reason": found["reason"].text(),
        "peak": found["peak"].whole(),
        "errors": tuple(each.number_or_infinity() for each in found["errors"].items(1)),
        "predicted": found["predicted"].number_or_infinity(),
        "removed": tuple(each.text() for each in found["removed"].items()),
        "measured": found["measured"].maybe(Field.whole),
        "error": found["error"].number_or_infinity(),
        "limit": found["limit"].number(),
    }


def _measured(field: Field) -> Measured:
    found = field.fields([f.name for f in dataclasses.fields(Measured)])
    left_out = [each.pair("[policy, why]") for each in found["left_out"].items()]
    return Measured(
        timings=tuple(_timing(each) for each in found["timings"].items(1)),
        turns=found["turns"].whole(1),
        update_seconds=found["update_seconds"].number(),
        left_out=tuple((policy.text(), why.text()) for policy, why in left_out),
        fingerprint=found["fingerprint"].texts(),
    )


def _timing(field: Field) -> Timing:
    found = field.fields([f.name for f in dataclasses.fields(Timing)])
    return Timing(
        policy=found["policy"].policy(),
        saved=found["saved"].number(least=-math.inf),
        low=found["low"].number(least=-math.inf),
        high=found["high"].number(least=-math.inf),
        blocks=found["blocks"].whole(1),
    )
