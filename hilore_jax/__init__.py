"""Remat, compression and planning of what backward reads, for RL training of language models."""

from hilore_jax import grpo as grpo
from hilore_jax.actions import Action as Action
from hilore_jax.actions import Compress as Compress
from hilore_jax.actions import Offload as Offload
from hilore_jax.actions import Policy as Policy
from hilore_jax.actions import Recompute as Recompute
from hilore_jax.actions import Store as Store
from hilore_jax.compiler import compiler_options as compiler_options
from hilore_jax.explain import Explanation as Explanation
from hilore_jax.explain import explain as explain
from hilore_jax.planning.budget import Budget as Budget
from hilore_jax.planning.plan import Blocks as Blocks
from hilore_jax.planning.plan import Plan as Plan
from hilore_jax.planning.solve import plan as plan
from hilore_jax.remat import disabled as disabled
from hilore_jax.remat import remat as remat
from hilore_jax.segments import scan_blocks as scan_blocks
from hilore_jax.spelling import parse_policy as parse_policy
