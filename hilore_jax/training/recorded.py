"""Settings that a command takes from the plan, ladder or calibration that it is given."""

from __future__ import annotations

import dataclasses
from typing import Any

from hilore_jax.planning.files import kind_among, read
from hilore_jax.training.situation import plan_settings, run_settings


def taken(config: Any) -> tuple[str, dict[str, Any]]:
    """The settings that a file says, of those that a command has.

    Args:
        config: a command's settings, which may name a `plan`, a `ladder` or a `calibration`.

    Returns:
        The file, and the settings by name; empty where it was not made by `hilore`.

    Raises:
        FileNotFoundError, ValueError: no such file, or one of another kind.
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
    facts = _fingerprint(read(path, kind, f"--{named[0]}"))
    found = plan_settings(facts) if kind == "calibration" else run_settings(facts, config.group)
    names = {field.name for field in dataclasses.fields(config)}
    return path, {name: value for name, value in found.items() if name in names}


def _fingerprint(fields: Any) -> dict[str, str]:
    """Of a file's value; empty where it has none, which its own reader will say."""
    try:
        first = fields["plans"][0] if "plans" in fields else fields
        return {str(name): str(value) for name, value in first["fingerprint"].items()}
    except (KeyError, IndexError, TypeError, AttributeError):
        return {}
