"""What the settings of `hilore train --optimizer logra` mean, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optax

from hilore_jax.logra.sketches import Sketches
from hilore_jax.logra.transport import FileTransport
from hilore_jax.models.config import LINEARS, DecoderConfig
from hilore_jax.models.sketched import sketched_config
from hilore_jax.planning.bounds import RANK, Real, Whole, number_faults
from hilore_jax.planning.files import check_folder
from hilore_jax.training import checkpoint
from hilore_jax.training.logra_state import LograSettings

if TYPE_CHECKING:
    from hilore_jax.training.config import TrainConfig
    from hilore_jax.training.plan_config import PlanConfig

_LOG = logging.getLogger("hilore_jax")

# Settings that only LoGRA reads; in no fingerprint of a run without it.
NAMES = (
    *("optimizer", "rank", "targets", "projection", "update_ratio", "step_control", "kl_budget"),
    *("kl_updates", "realized_kl_every", "dense", "weights", "sync", "sync_full_every"),
)
_BOUNDS: dict[str, Whole | Real] = {
    "rank": Whole(1, RANK),
    "update_ratio": Real(positive=True),
    "kl_updates": Whole(),
    "realized_kl_every": Whole(0),
    "sync_full_every": Whole(0),
}


def sketches_of(config: TrainConfig) -> Sketches:
    """The run's projections; A has the compute dtype, as x has in `A x`."""
    return Sketches(rank=config.rank, seed=config.seed, kind=config.projection, dtype=config.dtype)


def targets_of(config: TrainConfig | PlanConfig) -> tuple[str, ...]:
    """The linear maps that the settings name.

    Raises:
        ValueError: an unknown one, or none.
    """
    if config.targets == "all":
        return LINEARS
    named = tuple(name.strip() for name in config.targets.split(",") if name.strip())
    unknown = [name for name in named if name not in LINEARS]
    if unknown or not named:
        raise ValueError(
            f"targets {', '.join(unknown) or 'none named'}: expected all, or some of "
            f"{', '.join(LINEARS)}, separated by commas"
        )
    return named


def kl_budget_of(text: str) -> tuple[float, float]:
    """The budget's beginning and end, nats a token.

    Raises:
        ValueError: not two numbers above 0.

    Example:
        >>> kl_budget_of("2e-4:2e-5")
        (0.0002, 2e-05)
    """
    first, _, last = text.partition(":")
    try:
        found = float(first), float(last)
    except ValueError:
        found = (math.nan, math.nan)
    if not all(0 < x < math.inf for x in found):
        raise ValueError(
            f"kl_budget {text!r}: expected the first and the last update's budget, nats a token "
            "above 0, such as 2e-4:2e-5"
        )
    return found


def settings_of(config: TrainConfig) -> LograSettings:
    """The size of the run's steps."""
    return LograSettings(
        update_ratio=config.update_ratio,
        step_control=config.step_control,
        kl_budget=kl_budget_of(config.kl_budget),
        kl_updates=config.kl_updates,
        realized_kl_every=config.realized_kl_every,
    )


def run_shape(config: TrainConfig, shape: DecoderConfig) -> DecoderConfig:
    """The shape of the model that an update differentiates: with sketches, where the run has them.

    Args:
        config: the run's settings.
        shape: of the model that is loaded.

    Raises:
        ValueError: no target is wide enough for the rank, or the model has adapters.
    """
    if config.optimizer != "logra" or shape.sketches is not None:
        return shape
    return sketched_config(shape, sketches_of(config), targets_of(config))


def say_narrow(shape: DecoderConfig, dense: str) -> None:
    """Warns of targets that have no sketch, being too narrow for the rank, and what they get.

    Args:
        shape: of the model; without sketches there is nothing to say.
        dense: "frozen" or "adamw".
    """
    if shape.sketches is None:
        return
    narrow = [name for name in shape.sketches.targets if name not in shape.sketched_linears]
    if narrow:
        _LOG.warning(
            "targets %s have a side of no more than rank %d and get no sketch: they are %s. Give "
            "a lower --rank to have them sketched",
            ", ".join(f"{name} {shape.linear_shape(name)}" for name in narrow),
            shape.sketches.sketches.rank,
            "trained by AdamW" if dense == "adamw" else "frozen",
        )


def dense_optimizer(
    config: TrainConfig, adamw: optax.GradientTransformation
) -> optax.GradientTransformation | None:
    """What trains the parameters without sketches; None: nothing."""
    return adamw if config.dense == "adamw" else None


def logra_faults(config: TrainConfig) -> list[str]:
    """Everything that is wrong with the settings of LoGRA, one sentence each."""
    if config.optimizer != "logra":
        given = left_over(config)
        return [f"{', '.join(given)}: of LoGRA alone, add --optimizer logra or leave out"] * bool(
            given
        )
    found = []
    if config.lora_rank:
        found.append(
            f"optimizer logra and lora_rank {config.lora_rank}: LoGRA moves the weights that "
            "adapters keep frozen; leave --lora out, or take --optimizer adamw"
        )
    found += number_faults(config, _BOUNDS).values()
    checks: dict[str, Any] = {"kl_budget": kl_budget_of, "targets": lambda _: targets_of(config)}
    for name, check in checks.items():
        try:
            check(getattr(config, name))
        except ValueError as error:
            found.append(str(error))
    if config.realized_kl_every and not config.step_control:
        found.append("realized_kl_every needs step control, on whose probes the KL is measured")
    chosen = ("ladder", "gate", "skip_rows", "pack_by_exposure")
    if others := [name for name in chosen if getattr(config, name)]:
        found.append(
            f"optimizer logra with {' and '.join(others)}: its updates are one program under one "
            "policy or plan for all microbatches; leave it out, or take --optimizer adamw"
        )
    return found + _idle(config) + tiny_steps_fault(config) + _sync_faults(config)


def tiny_steps_fault(config: TrainConfig | PlanConfig) -> list[str]:
    """What is wrong with AdamW beside bfloat16 weights, in a sentence."""
    if config.dense != "adamw" or config.weights != "bfloat16":
        return []
    return [
        "dense adamw with weights bfloat16: AdamW's small steps would be lost in bfloat16; "
        "take float32 weights, or --dense frozen"
    ]


def _idle(config: TrainConfig) -> list[str]:
    """Settings that a LoGRA run as it is would not read."""
    unread = {"lora_alpha": ("there are no adapters", "leave it out")}
    if config.dense == "frozen":
        why = "LoGRA's steps are sized by update_ratio and kl_budget, and no weight decays"
        unread |= dict.fromkeys(
            ("learning_rate", "weight_decay"),
            (why, "leave it out, or add --dense adamw, whose parameters alone it is for"),
        )
    if not config.step_control:
        unread |= dict.fromkeys(
            ("kl_budget", "kl_updates"),
            ("without step control there is no budget", "leave it or --no-step-control out"),
        )
    found = _changed(config, unread)
    return [
        f"{name} {getattr(config, name)} would do nothing with optimizer logra: "
        f"{unread[name][0]}; {unread[name][1]}"
        for name in found
    ]


def _sync_faults(config: TrainConfig) -> list[str]:
    if not config.sync:
        return ["sync_full_every without sync: name a folder"] if config.sync_full_every else []
    folder = Path(config.sync)
    if folder.exists() and not folder.is_dir():
        return [f"sync '{folder}' is a file, expected a folder"]
    try:
        check_folder(folder, f"sync '{folder}'")
    except ValueError as error:
        return [str(error).rstrip(".")]
    if folder.is_dir() and (fault := _other_run(config, FileTransport(folder))):
        return [f"sync '{folder}' {fault}; name a new folder"]
    if config.dense != "frozen":
        return [
            f"sync with dense {config.dense}: packets carry the factors of sketched weights alone, "
            "and followers would keep the others' first values; take --dense frozen"
        ]
    return []


def _other_run(config: TrainConfig, sync: FileTransport) -> str:
    """What in a folder is not of the run that the settings begin or resume; empty: nothing."""
    if not config.resume:
        used = sync.owner() is not None or sync.holds_messages()
        return "holds the messages of another run" if used else ""
    own = checkpoint.newest_meta(Path(config.run_dir) / "checkpoints").get("run")
    if sync.owner() in (None, own):
        return ""
    return f"is of the run {sync.owner()!r}, run_dir '{config.run_dir}' of {own!r}"


def left_over(config: TrainConfig | PlanConfig) -> list[str]:
    """Names of LoGRA's settings that are not as by default: they would do nothing without it."""
    return _changed(config, NAMES)


def _changed(config: TrainConfig | PlanConfig, names: Iterable[str]) -> list[str]:
    """Those of the settings that are not as by default."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return [n for n in names if n in defaults and getattr(config, n) != defaults[n]]
