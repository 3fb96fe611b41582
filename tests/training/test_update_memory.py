"""An update's memory as a device counts it: the update runs once, under the policies asked for."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import hilore_jax as hl
from hilore_jax.planning.device_memory import DevicePeak
from hilore_jax.training.abstract import AbstractUpdate
from hilore_jax.training.update_memory import device_peak

POLICIES = (hl.Policy({}), hl.parse_policy("mlp_gate=int8"))
SEEN = []


class Update(AbstractUpdate):
    """A tiny update in place of a model's, which says when it runs and makes its arguments."""

    def __call__(self, policies, state: Any, batch: Any):
        assert policies == POLICIES
        jax.debug.callback(lambda: SEEN.append("ran"))
        return state + batch, {}

    def arguments(self, policies) -> Any:
        assert policies == POLICIES
        return (jax.ShapeDtypeStruct((3,), jnp.float32),) * 2

    def random_arguments(self) -> Any:
        SEEN.append("arguments")
        return lambda policies: (jnp.ones(3), jnp.ones(3))


@pytest.fixture
def update(tiny):
    SEEN.clear()
    sizes: Any = {"micro": 1, "rows": 1, "seq": 2, "completion": 1}
    return Update(tiny().config, optimizer=optax.identity(), **sizes)


def test_the_update_runs_once_between_two_looks_at_the_device(update):
    class Device:
        def memory_stats(self):
            SEEN.append("asked")
            return {"bytes_in_use": 15, "peak_bytes_in_use": 90 if "ran" in SEEN else 20}

    assert device_peak(update, POLICIES, Device()) == DevicePeak(75, reached=True)
    assert SEEN[-4:] == ["asked", "arguments", "ran", "asked"] and SEEN.count("ran") == 1


def test_nothing_is_compiled_where_the_device_counts_nothing(update, monkeypatch):
    monkeypatch.setattr(jax, "jit", lambda *args, **how: pytest.fail("compiled"))
    assert device_peak(update, POLICIES) is None and SEEN == []  # a CPU
