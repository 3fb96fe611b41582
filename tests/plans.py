"""Plans by hand: for tests of what reads a plan, without compiling one."""

import jax

import hilore_jax as hl
from hilore_jax.planning.memory import Memory

LEAST = Memory(0, 0, 0, 1, 0, 0)


def bare_plan(policies, menu, **changes):
    """A plan of these policies and entries; what is not given is as small as can be."""
    fields = {
        "target": "cpu",
        "risk_budget": 0.015,
        "budget": 1,
        "baseline": None,
        "gc": LEAST,
        "memory": LEAST,
        "predicted": 1,
        "bound_seconds": 0.0,
        "cost": "modelled",
        "fingerprint": {"jax": jax.__version__},
        "trials": (),
    }
    return hl.Plan(policies=tuple(policies), menu=tuple(menu), **{**fields, **changes})
