"""Which prompts a calibration saw, so that acceptance is held to others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hilore_jax.training.facts import PROMPTS, TASK


def seen(config: Any, prompts: int) -> dict[str, str]:
    """What a calibration records of its prompts.

    Args:
        config: its settings: `task`, `task_args` and `seed`.
        prompts: how many it drew, from the beginning of the task's stream.

    Example:
        >>> import types
        >>> seen(types.SimpleNamespace(task="count", task_args="", seed=3), 8)
        {'task of the calibration': 'count, seed 3', 'prompts of the calibration': '8'}
    """
    return {TASK: _stream(config), PROMPTS: str(prompts)}


def carried(facts: Mapping[str, str]) -> dict[str, str]:
    """Of a calibration's fingerprint, what plans by it keep of its prompts."""
    return {name: facts[name] for name in (TASK, PROMPTS) if name in facts}


def check_held_out(facts: Mapping[str, str], config: Any, first: int) -> None:
    """Refuses updates with prompts of the plan's own calibration.

    Args:
        facts: the plan's fingerprint; one that says nothing of prompts is not checked.
        config: the settings by which updates are drawn.
        first: position in the task's stream at which they begin.

    Raises:
        ValueError: the same stream, from within what was calibrated on; says where that ends.
    """
    if not facts.get(PROMPTS, "").isdigit() or facts.get(TASK) != _stream(config):
        return
    end = int(facts[PROMPTS])
    if first < end:
        raise ValueError(
            f"--first {first}: the plan's risks were calibrated on prompts 0 to {end - 1} of the "
            f"same stream ({facts[TASK]}), which says little of others. Expected --first {end} or "
            "more, or another --seed."
        )


def _stream(config: Any) -> str:
    parts = (config.task, config.task_args, f"seed {config.seed}")
    return ", ".join(part for part in parts if part)
