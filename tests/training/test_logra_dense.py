"""LoGRA beside a dense optimizer, and that each of a run's settings reaches the update."""

import dataclasses
import types
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hilore_jax as hl
from hilore_jax.logra import Sketches
from hilore_jax.models.sketched import sketched_config, stacked
from hilore_jax.training import abstract, strategy
from hilore_jax.training.abstract import training_update
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.learner import make_optimizer
from hilore_jax.training.logra_config import run_shape
from hilore_jax.training.logra_state import LograSettings, dense_part, init_logra_state
from hilore_jax.training.logra_strategy import SketchedUpdate
from hilore_jax.training.logra_update import make_logra_update, make_sketch_gradients

GC = (hl.Policy({}),) * 2
RATE, MAX_NORM, B2, ALPHA = 0.1, 0.05, 0.5, 1.7
NAMES = ("0.q_proj",)
# A budget that no step uses up: alpha is at its bound.
SETTINGS = LograSettings(update_ratio=1e-3, b2=B2, alpha_max=ALPHA, kl_budget=(1e9, 1e9))
RUN = TrainConfig(
    optimizer="logra", rank=3, targets="q_proj", max_grad_norm=0.7, policy="gc", quiet=True
)


@pytest.fixture(scope="module")
def one(tiny, batch, quick):
    """An update under clipping with SGD for the dense part, and what it was made of."""
    model, data = tiny(), batch(micro=2, reference=False)
    config = sketched_config(model.config, Sketches(rank=3, seed=11), ("q_proj",))
    sgd = optax.sgd(RATE)
    _, state = init_logra_state(model, config, jax.random.key(0), dense=sgd)
    options: dict[str, Any] = {"beta": 0.0}
    update = make_logra_update(config, (2,), SETTINGS, dense=sgd, max_grad_norm=MAX_NORM, **options)
    gradients = make_sketch_gradients(config, (2,), **options)
    both = quick(lambda state, batch: (update(GC, state, batch), gradients(GC, state, batch)[0]))
    (after, metrics), grads = both(state, data)
    return types.SimpleNamespace(state=state, after=after, metrics=metrics, grads=grads)


def square(tree):
    return sum(np.sum(np.asarray(x, np.float64) ** 2) for x in jax.tree.leaves(tree))


def clip_of(one):
    dense = square(dense_part(one.grads, NAMES))
    sketched = float(one.metrics["sketch_norm"]) ** 2
    assert min(dense, sketched) > 0.05 * max(dense, sketched)  # both count
    return MAX_NORM / np.sqrt(dense + sketched)


def test_sketches_and_dense_gradients_are_clipped_together(one):
    clip = clip_of(one)
    assert clip < 0.5
    sketch = np.asarray(stacked(one.grads, "slot")["0.q_proj"])
    mean = np.mean((clip * sketch) ** 2, axis=2)
    np.testing.assert_allclose(
        one.after.opt_state.v["0.q_proj"], np.sqrt((1 - B2) * mean), rtol=1e-4
    )
    grads, before, after = (
        dense_part(x, NAMES) for x in (one.grads, one.state.params, one.after.params)
    )
    for g, old, new in zip(*map(jax.tree.leaves, (grads, before, after)), strict=True):
        np.testing.assert_allclose(new - old, -RATE * clip * g, rtol=1e-3, atol=2e-7)
    assert len(jax.tree.leaves(grads)) == 10


def test_alpha_is_at_most_its_bound(one):
    assert float(one.metrics["alpha"]) == pytest.approx(ALPHA)
    # F is rounded to bfloat16.
    ratio = ALPHA * SETTINGS.update_ratio
    assert float(one.metrics["update_ratio"]) == pytest.approx(ratio, rel=2e-3)


@pytest.fixture
def asked(monkeypatch):
    """What `make_strategy` and `AbstractUpdate` ask for, instead of it."""
    found: dict[str, Any] = {}

    class Recorded(SketchedUpdate):
        def __init__(self, *args, **options):
            found.update(options, args=args)
            self.n_traces, self.about = 0, {}

    def record(*args, **options):
        found.update(options, args=args)
        return lambda *_: None

    monkeypatch.setattr(strategy, "SketchedUpdate", Recorded)
    monkeypatch.setattr(abstract, "make_logra_update", record)
    return found


@pytest.mark.parametrize("dense", ["frozen", "adamw"])
def test_a_runs_settings_reach_its_update(tiny, asked, dense):
    model, config = tiny(), dataclasses.replace(RUN, dense=dense, update_ratio=1e-4)
    optimizer = make_optimizer(config)
    shape = run_shape(config, model.config)
    strategy.make_strategy(config, shape, nnx.graphdef(model), optimizer)
    assert asked["dense"] is (optimizer if dense == "adamw" else None)
    assert asked["max_grad_norm"] == 0.7 and asked["factors"] is False
    assert asked["args"][3].update_ratio == 1e-4


@pytest.mark.parametrize("dense", ["frozen", "adamw"])
def test_the_planner_compiles_the_runs_update(tiny, asked, dense):
    config = dataclasses.replace(RUN, dense=dense, update_ratio=1e-4)
    update = training_update(run_shape(config, tiny().config), config)
    state, batch = update.arguments(GC)
    update(GC, state, batch)
    assert asked["dense"] is (update.optimizer if dense == "adamw" else None)
    assert asked["args"][2].update_ratio == 1e-4
    assert (state.opt_state.dense is None) == (dense == "frozen")
    trained = jax.tree.leaves(update.blocks().args[0])
    assert len(trained) == (1 if dense == "frozen" else 9)  # the slot; all but q_proj's kernel
