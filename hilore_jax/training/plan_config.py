"""The settings of `hilore plan`, checked as a whole before the model is looked at."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import ClassVar, Literal

from hilore_jax.logra.projection import Kind
from hilore_jax.planning import expect
from hilore_jax.planning.bounds import RANK, WHOLE, Real, Whole, number_faults
from hilore_jax.planning.budget import Budget
from hilore_jax.training.config import Rank
from hilore_jax.training.logra_config import left_over, targets_of, tiny_steps_fault


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """The policies that recompute least within a memory and a risk budget, for a target device."""

    model: str = "qwen2.5-3b"
    """A family by name, such as `qwen2.5-3b`, or a folder with a config.json."""
    batch: str = "2x2048"
    """Sequences x tokens of a microbatch."""
    micro: int = 1
    """Microbatches of an update."""
    completion: int = 0
    """Scored tokens of a sequence; 0 for all but the first, the most that can be."""
    beta: float = 0.0
    """Weight of the K3 term; 0 leaves the reference's log-probs out."""
    lora_rank: Rank = 0
    """Rank of LoRA adapters; 0 trains every parameter."""
    optimizer: Literal["adamw", "logra"] = "adamw"
    """Of the update: LoGRA keeps sketches of gradients and one number a row of each weight."""
    rank: int = 256
    """LoGRA: rank of the sketches."""
    targets: str = "all"
    """LoGRA: linear maps to sketch, such as `q_proj,down_proj`."""
    projection: Kind = "rademacher"
    """LoGRA: entries of the random projections."""
    dense: Literal["frozen", "adamw"] = "frozen"
    """LoGRA: what is done with parameters that have no sketch."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """LoGRA: storage of the weights."""
    dtype: str = "bfloat16"
    """Compute dtype, and storage dtype of frozen weights; weights that train are in float32."""
    target: str = "device"
    """`cpu`, `device`, `cuda:h200`, `cuda:h100-80x8`, `tpu:v5e`, ..., or a target file."""
    memory: str = "1.10x-gc"
    """Peak memory: `46GiB`, or `1.10x-gc` times the peak with every block recomputed."""
    risk: float = 0.015
    """Bound on the relative error of the update's gradient; 0 for no compression."""
    baseline: str = "chunked"
    """Logits of the update that `1.10x-gc` refers to: `chunked`, or `whole-logits`."""
    offload: bool = False
    """Also consider keeping activations in pinned host memory."""
    cost: str = "modelled"
    """Seconds of recomputation: `modelled` by a roofline, `measured` by updates that are timed on
    this device with random weights, or the file of a plan that was measured."""
    turns: int = 5
    """Timed updates under each policy, for `--cost measured`."""
    calibration: str = ""
    """A calibration's JSON file: measured risks, block by block. Model, adapters, batch and dtype
    are taken from it where they are not given."""
    exposure: float | None = None
    """Exposure of the microbatches to plan for; by default the calibration's median, which is that
    of its own batch only."""
    out: str = ""
    """JSON file to write the plan to."""
    plot: str = ""
    """PNG, SVG or PDF file to draw the Pareto curve into."""
    ladder: str = ""
    """With a calibration, in place of one plan: JSON file to write a plan for every power of two
    of its exposures to, for `hilore train --ladder`."""

    BOUNDS: ClassVar[dict[str, Whole | Real]] = {
        **dict.fromkeys(("micro", "turns"), Whole()),
        "completion": Whole(0),
        "lora_rank": Whole(0, RANK),
        "beta": Real(),
        "risk": Real(infinite=True),
        "exposure": Real(infinite=True, optional=True),
    }


def batch_of(config: PlanConfig) -> tuple[int, int]:
    """Sequences of a microbatch, and tokens of each.

    Raises:
        ValueError: not ROWSxTOKENS, or more tokens than a device counts.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,9})\s*x\s*([1-9][0-9]{0,9})", config.batch)
    if match is None or int(match[1]) * int(match[2]) > WHOLE:
        raise ValueError(
            f"--batch {config.batch[:60]}: expected sequences x tokens of a "
            "microbatch, such as 2x2048"
        )
    return int(match[1]), int(match[2])


def plan_faults(config: PlanConfig) -> list[str]:
    """Everything that is wrong with the settings alone, one sentence each.

    Example:
        >>> plan_faults(PlanConfig(micro=0, baseline="none"))
        ['micro must be >= 1, found 0', '--baseline none: expected chunked or whole-logits']
    """
    wrong = number_faults(config)
    found = list(wrong.values())
    if config.baseline not in ("chunked", "whole-logits"):
        found.append(f"--baseline {config.baseline}: expected chunked or whole-logits")
    for check in (_check_batch, lambda _: Budget(config.memory)):
        try:
            check(config)
        except (ValueError, TypeError) as error:
            found.append(f"{error}".rstrip("."))
    if config.ladder and config.risk == math.inf:
        found.append("risk must be finite for a ladder, found inf: every bucket shares it out")
    return found + _logra_faults(config)


def _check_batch(config: PlanConfig) -> None:
    seq = batch_of(config)[1]
    if expect.is_whole(config.completion) and config.completion >= seq:
        raise ValueError(
            f"--completion {expect.shown(config.completion)}: expected 1 to {seq - 1} of {seq} "
            "tokens"
        )
    if seq < 2:
        raise ValueError(f"--batch {config.batch}: expected 2 tokens or more, one to score")


def _logra_faults(config: PlanConfig) -> list[str]:
    """Settings of LoGRA that cannot be, or that would do nothing."""
    if config.optimizer != "logra":
        ignored = [f"--{name} {expect.shown(getattr(config, name))}" for name in left_over(config)]
        return [" ".join(ignored) + ": of LoGRA alone, add --optimizer logra or leave out"] * bool(
            ignored
        )
    found = list(number_faults(config, {"rank": Whole(1, RANK)}).values())
    if config.lora_rank:
        found.append(
            f"--optimizer logra and --lora-rank {expect.shown(config.lora_rank)}: LoGRA moves the "
            "weights that adapters keep frozen; give one or the other"
        )
    try:
        targets_of(config)
    except ValueError as error:
        found.append(str(error))
    return found + tiny_steps_fault(config)
