"""An update's memory as a device counts it: the update runs once, under the policies asked for."""

import jax
import jax.numpy as jnp
import pytest

import hilore_jax as hl
from hilore_jax.planning.device_memory import DevicePeak
from hilore_jax.training.abstract import AbstractUpdate
from hilore_jax.training.update_memory import device_peak

POLICIES = (hl.Policy({}), hl.parse_policy("mlp_gate=int8"))


class Update(AbstractUpdate):
    """A tiny update in place of a model's, which says when it runs and makes its arguments."""

    def __init__(self):
        object.__setattr__(self, "seen", [])

    def __call__(self, policies, state, batch):
        assert policies == POLICIES
        jax.debug.callback(lambda: self.seen.append("ran"))
        return state + batch, {}

    def arguments(self, policies):
        assert policies == POLICIES
        return (jax.ShapeDtypeStruct((3,), jnp.float32),) * 2

    def random_arguments(self):
        self.seen.append("arguments")
        return lambda policies: (jnp.ones(3), jnp.ones(3))


def test_the_update_runs_once_between_two_looks_at_the_device():
    update = Update()

    class Device:
        def memory_stats(self):
            update.seen.append("asked")
            used = 90 if "ran" in update.seen else 20
            return {"bytes_in_use": 15, "peak_bytes_in_use": used}

    assert device_peak(update, POLICIES, Device()) == DevicePeak(75, reached=True)
    assert update.seen[-4:] == ["asked", "arguments", "ran", "asked"]
    assert update.seen.count("ran") == 1


def test_nothing_is_compiled_where_the_device_counts_nothing(monkeypatch):
    monkeypatch.setattr(jax, "jit", lambda *args, **how: pytest.fail("compiled"))
    assert device_peak(Update(), POLICIES) is None  # a CPU
