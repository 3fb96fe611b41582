"""`hilore plan`: a plan for a model's actor update by name, without weights or the device."""

from __future__ import annotations

import dataclasses
import re

import optax

from hilore_jax.models.config import DecoderConfig, LoraConfig
from hilore_jax.models.lookup import shape_of
from hilore_jax.planning.budget import Budget
from hilore_jax.planning.calibration import Calibration
from hilore_jax.planning.measure import Measurement, check_measurable
from hilore_jax.planning.measured import Measured
from hilore_jax.planning.plan import Plan
from hilore_jax.planning.solve import plan
from hilore_jax.planning.target import parse_target
from hilore_jax.training.abstract import AbstractUpdate


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
    lora: int = 0
    """Rank of LoRA adapters; 0 trains every parameter."""
    dtype: str = "bfloat16"
    """Compute and storage dtype of the base weights."""
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
    """A calibration's JSON file: measured risks, block by block."""
    exposure: float | None = None
    """Exposure of the microbatches to plan for; by default the calibration's median."""
    out: str = ""
    """JSON file to write the plan to."""
    plot: str = ""
    """PNG or SVG file to draw the Pareto curve into."""


def run_plan(config: PlanConfig) -> Plan:
    """Plans, prints the table, and writes what was asked for.

    Raises:
        ValueError: an option that cannot be read, or a budget that cannot be met.
    """
    if config.baseline not in ("chunked", "whole-logits"):
        raise ValueError(f"--baseline {config.baseline}: expected chunked or whole-logits")
    calibration = Calibration.load(config.calibration) if config.calibration else None
    if calibration is None and config.exposure is not None:
        raise ValueError("--exposure needs --calibration: default risks do not depend on it")
    cost = planning_cost(config)
    update = abstract_update(config)
    whole = dataclasses.replace(update, head="whole")
    # Calibrated risks are a microbatch's, default ones a whole update's.
    risk = config.risk if calibration is None else microbatch_risk(config, calibration)
    budget = Budget(
        config.memory, risk, baseline=whole if config.baseline == "whole-logits" else None
    )
    made = plan(
        update,
        update.random_arguments() if isinstance(cost, Measurement) else update.arguments,
        blocks=update.blocks(),
        budget=budget,
        target=config.target,
        offload=config.offload,
        cost=cost,
        calibration=calibration,
        exposure=config.exposure,
    )
    print(made)
    if config.out:
        made.save(config.out)
    if config.plot:
        made.plot(config.plot)
    return made


def planning_cost(config: PlanConfig) -> str | Measurement | Measured:
    """What `--cost` asks for.

    Raises:
        ValueError: an unknown word, a target that is not here, or a plan that was not measured.
    """
    if config.cost.endswith(".json"):
        measured = Plan.load(config.cost).measured
        if measured is None:
            raise ValueError(
                f"--cost {config.cost}: the seconds of that plan are modelled; expected a plan "
                "that was made with --cost measured"
            )
        return measured
    if config.cost == "modelled":
        return config.cost
    if config.cost != "measured":
        raise ValueError(
            f"--cost {config.cost}: expected modelled, measured, or a measured plan's JSON file"
        )
    check_measurable((), parse_target(config.target))  # before any weight is made
    return Measurement(turns=config.turns, microbatches=config.micro)


def microbatch_risk(config: PlanConfig, calibration: Calibration) -> float:
    """The risk budget of one of the update's equal microbatches: squares add up, or risks."""
    share = 1 / config.micro
    return config.risk * (share if calibration.form == "paper" else share**0.5)


def abstract_update(config: PlanConfig) -> AbstractUpdate:
    """The model's actor update by shapes.

    Raises:
        ValueError: a batch that is not ROWSxTOKENS, or an unknown model.
    """
    match = re.fullmatch(r"([1-9][0-9]*)\s*x\s*([1-9][0-9]*)", config.batch)
    if match is None:
        raise ValueError(
            f"--batch {config.batch}: expected sequences x tokens of a microbatch, such as 2x2048"
        )
    rows, seq = int(match[1]), int(match[2])
    completion = config.completion or seq - 1
    if not 0 < completion < seq:
        raise ValueError(f"--completion {completion}: expected 1 to {seq - 1} of {seq} tokens")
    return AbstractUpdate(
        model_shape(config, parse_target(config.target).platform),
        micro=config.micro,
        rows=rows,
        seq=seq,
        completion=completion,
        optimizer=optax.adamw(1e-6),
    )


def model_shape(config: PlanConfig, platform: str) -> DecoderConfig:
    """The model's config, with the attention that runs on the target's platform."""
    lora = LoraConfig(rank=config.lora) if config.lora else None
    fields = {"dtype": config.dtype, "param_dtype": config.dtype, "lora": lora}
    shape = shape_of(config.model, **fields)
    fits = shape.head_dim <= 128 and shape.head_dim % 8 == 0 and shape.dtype != "float32"
    kind = "cudnn" if platform == "cuda" and fits else "xla"
    return dataclasses.replace(shape, attention=kind)
