"""The settings of `hilore plan`, and what is wrong with those of LoGRA."""

from __future__ import annotations

import dataclasses
from typing import Literal

from hilore_jax.logra.projection import Kind
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


def check_logra(config: PlanConfig) -> None:
    """Refuses settings of LoGRA that cannot be, or that would do nothing.

    Raises:
        ValueError: names the options.
    """
    if config.optimizer != "logra":
        if ignored := left_over(config):
            raise ValueError(
                " ".join(f"--{name} {getattr(config, name)}" for name in ignored)
                + ": of LoGRA alone, add --optimizer logra or leave out"
            )
        return
    if config.rank < 1:
        raise ValueError(f"--rank {config.rank}: expected 1 or more")
    if config.lora_rank:
        raise ValueError(
            f"--optimizer logra and --lora-rank {config.lora_rank}: LoGRA moves the weights that "
            "adapters keep frozen; give one or the other"
        )
    if fault := tiny_steps_fault(config):
        raise ValueError(fault[0])
    targets_of(config)
