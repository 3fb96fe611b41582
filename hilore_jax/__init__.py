"""Remat, compression and planning of what backward reads, for RL training of language models."""

from hilore_jax import grpo, logra
from hilore_jax.actions import Action, Compress, Offload, Policy, Recompute, Store
from hilore_jax.compiler import compiler_options
from hilore_jax.explain import Explanation, explain
from hilore_jax.gate import gated_blocks
from hilore_jax.planning.budget import Budget
from hilore_jax.planning.calibrate import calibrate
from hilore_jax.planning.calibration import Calibration
from hilore_jax.planning.ladder import Ladder, plan_ladder
from hilore_jax.planning.plan import Blocks, Plan
from hilore_jax.planning.solve import plan
from hilore_jax.remat import disabled, remat
from hilore_jax.segments import scan_blocks
from hilore_jax.spelling import parse_policy

__all__ = [
    "Action",
    "Blocks",
    "Budget",
    "Calibration",
    "Compress",
    "Explanation",
    "Ladder",
    "Offload",
    "Plan",
    "Policy",
    "Recompute",
    "Store",
    "calibrate",
    "compiler_options",
    "disabled",
    "explain",
    "gated_blocks",
    "grpo",
    "logra",
    "parse_policy",
    "plan",
    "plan_ladder",
    "remat",
    "scan_blocks",
]
