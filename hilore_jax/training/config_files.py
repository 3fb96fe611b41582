"""Files and folders that a run's settings name: what counts of them, and what is wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from hilore_jax.actions import Policy
from hilore_jax.planning.files import check_folder, read
from hilore_jax.planning.ladder import Ladder
from hilore_jax.planning.plan import Plan
from hilore_jax.planning.plan_file import to_null
from hilore_jax.spelling import parse_policy
from hilore_jax.training import checkpoint
from hilore_jax.training.load import load_file


def plan_facts(path: str, gate: bool) -> dict[str, Any]:
    """What of a plan decides on a run's updates: policies, and all that a gate reads of them."""
    fields = {"plan": json.loads(Path(path).read_text())["policies"]}
    if not gate:
        return fields
    made = Plan.load(path)
    gc, risks = max(entry.seconds for entry in made.menu), made.block_risks is not None
    return fields | {
        "gate block_risks": [to_null(entry.risk) for entry in made.entries] if risks else None,
        "gate seconds": [gc - entry.seconds for entry in made.entries],  # that decoding saves
        "gate exposure": made.exposure,
        "gate norm": made.norm,
        "gate form": "paper" if made.paper else "squared",
    }


def ladder_digest(path: str) -> str:
    """Of what of a ladder decides on a run's updates."""
    made = Ladder.load(path)
    policies = [[policy.to_json() for policy in each.policies] for each in made.plans]
    text = json.dumps([dataclasses.asdict(made.buckets), policies])
    return hashlib.sha256(text.encode()).hexdigest()


def file_faults(path: str, kind: str) -> list[str]:
    """What is wrong with a plan's or a ladder's file, which the option of its name takes."""
    try:
        load_file(path, kind, f"--{kind}")
    except (ValueError, OSError) as error:
        return [str(error).rstrip(".")]
    return []


def read_policy(text: str, option: str = "") -> Policy:
    """A policy as commands take it; of a file of another kind it says what takes that.

    Raises:
        ValueError, FileNotFoundError: not a policy; names the part or the file at fault.
    """
    if text.strip().endswith(".json"):
        read(text.strip(), "policy", option)
    return parse_policy(text)


def folder_faults(run_dir: Path, resume: bool) -> list[str]:
    """What stands against writing to a run folder; one that a failed start left is free."""
    if run_dir.exists() and not run_dir.is_dir():
        return [f"run_dir '{run_dir}' is a file, expected a folder"]
    try:
        check_folder(run_dir, f"run_dir '{run_dir}'")
    except ValueError as error:
        return [str(error).rstrip(".")]
    metrics = run_dir / "metrics.jsonl"
    used = metrics.exists() and metrics.stat().st_size > 0
    saved = bool(checkpoint.steps(run_dir / "checkpoints"))
    if resume and not saved:
        instead = "name another run folder, or remove this one" if used else "leave --resume out"
        where = "holds no checkpoint" if run_dir.is_dir() else "does not exist"
        return [f"nothing to resume: run_dir '{run_dir}' {where}; {instead} to start anew"]
    if not resume and saved:
        return [
            f"run_dir '{run_dir}' already holds a run; pass --resume to continue it, or name "
            "another folder"
        ]
    if not resume and used:
        return [
            f"run_dir '{run_dir}' holds the metrics of a run that left no checkpoint; name another "
            "folder, or remove this one"
        ]
    return []
