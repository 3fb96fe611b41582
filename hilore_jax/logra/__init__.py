"""LoGRA: gradients kept as random low-rank sketches, steps of a predicted KL, packets."""

from hilore_jax.logra.kl import predicted_kl as predicted_kl
from hilore_jax.logra.kl import realized_kl as realized_kl
from hilore_jax.logra.merge import merge_factor as merge_factor
from hilore_jax.logra.optimizer import logra as logra
from hilore_jax.logra.projection import projection as projection
from hilore_jax.logra.row_adam import row_adam as row_adam
from hilore_jax.logra.scale_by_logra import scale_by_logra as scale_by_logra
from hilore_jax.logra.sketch import sketched_dense as sketched_dense
from hilore_jax.logra.sketches import Sketches as Sketches
from hilore_jax.logra.step_control import kl_budget as kl_budget
from hilore_jax.logra.step_control import step_control as step_control

__all__ = [
    "Sketches",
    "kl_budget",
    "logra",
    "merge_factor",
    "predicted_kl",
    "projection",
    "realized_kl",
    "row_adam",
    "scale_by_logra",
    "sketched_dense",
    "step_control",
]
