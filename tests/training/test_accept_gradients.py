"""Gradients of held-out updates: the same sum, whole and microbatch by microbatch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hilore_jax as hl
from hilore_jax.models.restack import restack
from hilore_jax.planning.realized import gradient_distance, gradient_norm
from hilore_jax.training import accept_command, accept_gradients
from hilore_jax.training.abstract import training_update
from hilore_jax.training.accept_command import AcceptOptions, block_view
from hilore_jax.training.accept_gradients import mixed_gradients, update_gradients
from hilore_jax.training.gradients import make_gradients
from hilore_jax.training.rollouts import Measured
from hilore_jax.training.step import init_state

GC = (hl.Policy({}),) * 2
INT8 = (hl.parse_policy("mlp_gate=int8,mlp_up=int8"),) * 2
CONFIG = dataclasses.replace(AcceptOptions(plan="").training(), temperature=0.7)


@pytest.fixture(scope="module", autouse=True)
def compiled_sooner():
    """LLVM's optimizer off, as in `quick`; what is rematerialized stays so."""
    quick = hl.compiler_options() | {"xla_backend_optimization_level": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accept_gradients, "compiler_options", lambda: quick)
        yield


@pytest.fixture(scope="module")
def data(tiny, batch):
    """Two microbatches of unlike counts of tokens, and the model's state."""
    made = batch(micro=2, reference=False)
    mask = np.asarray(made.completion_mask).copy()
    mask[0, :, 1:] = False
    made = dataclasses.replace(made, completion_mask=jnp.asarray(mask))
    counts = mask.sum(axis=(1, 2))
    assert 0 < counts[0] < counts[1]
    graphdef, state = init_state(restack(tiny(), (1, 1)), optax.identity(), jax.random.key(0))
    return Measured(graphdef, state.params, state.frozen, (made,)), state


@pytest.fixture(scope="module")
def whole(data):
    return update_gradients(data[0], CONFIG)


def distance(found, expected):
    return gradient_distance(found, expected) / gradient_norm(expected)


def test_the_whole_updates_gradient_is_that_of_training(data, whole, quick):
    measured, state = data
    options = {"clip": CONFIG.clip, "beta": CONFIG.beta, "temperature": CONFIG.temperature}
    train = quick(make_gradients(measured.graphdef, **options), static_argnums=0)
    expected, metrics = train(GC, state, measured.updates[0])
    found, exposures = whole(GC, measured.updates[0])
    assert distance(found, expected) < 1e-5
    np.testing.assert_allclose(exposures, metrics["micro_exposure"], rtol=1e-5)


def test_each_microbatch_may_have_its_own_policies(data, whole):
    measured, update = data[0], data[0].updates[0]
    mixed = mixed_gradients(measured, CONFIG)
    exact, lossy = (whole(policies, update)[0] for policies in (GC, INT8))
    assert distance(mixed((GC, GC), update), exact) < 1e-5
    assert distance(mixed((INT8, INT8), update), lossy) < 1e-5
    # The errors of one microbatch and of the other add up to those of both.
    first, second = (mixed(each, update) for each in ((INT8, GC), (GC, INT8)))
    assert distance(first, exact) > 1e-4 and distance(second, exact) > 1e-4
    both = jax.tree.map(lambda a, b, c: a + b - c, first, second, exact)
    assert distance(both, lossy) < 1e-5
    with pytest.raises(ValueError, match="1 policy tuples for 2 microbatches"):
        mixed((GC,), update)


def test_the_block_view_has_the_rooflines_seconds(tiny, monkeypatch):
    update = training_update(tiny().config, CONFIG)
    view = block_view(update, "cuda:h200")
    gc, kept = hl.Policy({}), hl.parse_policy("mlp_up=store")
    assert view.entry(kept).seconds < view.entry(gc).seconds
    assert view.entry(kept).nbytes > view.entry(gc).nbytes
    assert view.distortion(kept) == view.distortion(gc) != view.distortion(INT8[0])
    # The seconds of the plan's own device, and all that backward spends.
    block = update.blocks()
    program = accept_command.block_program(block.fn, *block.args, argnums=block.argnums)
    line = accept_command.Roofline(accept_command.parse_target("cuda:h200"))
    assert view.entry(kept).seconds == line.backward(program, kept, program.figures(kept))
