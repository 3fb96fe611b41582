"""Which way of updating the settings ask for."""

import dataclasses

import optax
import pytest
from flax import nnx

import hilore_jax as hl
from hilore_jax.training.config import TrainConfig
from hilore_jax.training.laddered import LadderedUpdate
from hilore_jax.training.strategy import (
    StaticUpdate,
    Strategy,
    make_strategy,
    plans,
    segment_lengths,
)

CONFIG = TrainConfig(policy="mlp_gate=int8", beta=0.0)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, StaticUpdate),
        ({"skip_rows": True}, LadderedUpdate),
        ({"pack_by_exposure": True}, LadderedUpdate),
    ],
)
def test_only_what_is_asked_for_leaves_the_one_program(tiny, changes, kind):
    model = tiny()
    config = dataclasses.replace(CONFIG, **changes)
    made = make_strategy(config, model.config, nnx.graphdef(model), optax.sgd(1.0))
    assert type(made) is kind and isinstance(made, Strategy)
    assert made.n_traces == 0 and made.about == {}
    if isinstance(made, LadderedUpdate):
        assert made.policies == ((hl.Policy({"mlp_gate": hl.Compress()}),) * 2,)
        assert made.skip_rows is config.skip_rows
        assert made.pack_by_exposure is config.pack_by_exposure


def test_static_policies_are_one_plan_in_one_stack(tiny):
    shape = tiny().config
    (policies,) = plans(CONFIG, shape)
    assert policies == (CONFIG.parsed_policy,) * 2 and segment_lengths(CONFIG, shape) == (2,)
