"""Settings that a command takes from the plan, ladder or calibration that it is given."""

from __future__ import annotations

import dataclasses
from typing import Any

from hilore_jax.planning.bounds import number_faults, refuse_faults
from hilore_jax.planning.files import kind_among
from hilore_jax.planning.ladder import Ladder
from hilore_jax.training.load import load_file
from hilore_jax.training.situation import plan_settings, run_settings


def taken(config: Any) -> tuple[str, dict[str, Any]]:
    """The settings that a file says, of those that a command has.

    Args:
        config: a command's settings, which may name a `plan`, a `ladder` or a `calibration`.

    Returns:
        The file, and the settings by name; empty where it was not made by `hilore`.

    Raises:
        FileNotFoundError, OSError: no such file, or it cannot be read.
        ValueError: a damaged file, or one of another kind; with it, numbers of the settings that
            are out of their bounds.
    """
    # The ladder of `hilore plan` is what it writes.
    kinds = ("calibration",) if hasattr(config, "calibration") else ("plan", "ladder")
    named = [kind for kind in kinds if getattr(config, kind, "")]
    if not named:
        return "", {}
    kind = named[0]
    path = getattr(config, kind)
    if kind == "plan" and not hasattr(config, "ladder"):  # `hilore accept` takes both in one place
        kind = kind_among(path, ("plan", "ladder"))
    try:
        made = load_file(path, kind, f"--{named[0]}")
    except (OSError, ValueError) as error:
        if wrong := number_faults(config):
            refuse_faults([str(error).rstrip("."), *wrong.values()])
        raise
    facts = made.plans[0].fingerprint if isinstance(made, Ladder) else made.fingerprint
    found = plan_settings(facts) if kind == "calibration" else run_settings(facts, config.group)
    names = {field.name for field in dataclasses.fields(config)}
    return path, {name: value for name, value in found.items() if name in names}
