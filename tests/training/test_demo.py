"""The demonstration's figures: what is printed, and times from updates run in turns."""

from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx

from hilore_jax.training.config import TrainConfig
from hilore_jax.training.demo import Side, table, update_seconds
from hilore_jax.training.learner import Learner
from hilore_jax.training.step import TrainState


def fake_learner(name, calls, **about):
    """Notes its calls, and consumes its state as a donating update does."""

    def update(state, batch):
        calls.append(name)
        new = jax.tree.map(jnp.copy, state)
        jax.tree.map(lambda x: x.delete(), state)
        return new, {"loss": jnp.float32(0)}

    learner = mock.create_autospec(Learner, instance=True)
    learner.compile.return_value = update
    learner.about = about
    return learner


def test_updates_are_timed_in_turns_on_one_state_handed_on(batch):
    calls = []
    state = TrainState(
        nnx.State({"w": jnp.zeros(())}), nnx.State({}), (), jnp.int32(0), jax.random.key(0)
    )
    learners = {name: fake_learner(name, calls) for name in ("gc", "compressed")}
    seconds = update_seconds(learners, state, batch(), turns=3)
    assert {name: len(values) for name, values in seconds.items()} == {"gc": 3, "compressed": 3}
    assert calls[:2] == ["gc", "compressed"]  # the warm-up
    assert calls[2:] == "gc compressed compressed gc gc compressed".split()


METRICS = {"reward": 0.25, "exposure": 0.01, "grad_norm": 0.5}


def sides():
    kept = dict.fromkeys(("bytes_H", "bytes_L", "bytes_R", "bytes_O"), 0)
    gc = fake_learner("gc", [], **kept, update_temp_bytes=4 * 2**20)
    compressed = fake_learner("c", [], **kept | {"bytes_L": 2**20}, update_temp_bytes=None)
    return {"gc": Side([METRICS], gc, []), "compressed": Side([METRICS], compressed, [])}


def cells(text, label):
    (line,) = (line for line in text.splitlines() if line.startswith(label))
    return line[len(label) :].split()


def test_the_table_marks_every_number(parts):
    seconds = {"gc": [1.0, 2.0, 4.0], "compressed": [1.5, 2.0, 2.0]}
    text = table(sides(), 0.0125, seconds, TrainConfig(), parts())
    assert cells(text, "saved in all blocks: compress") == "0.0 MiB 1.0 MiB counted".split()
    assert cells(text, "update's temporaries") == "4.0 MiB unknown compiled".split()
    assert cells(text, "gradient's relative error") == "0 0.0125 measured".split()
    assert (
        "compressed to gc: 1.000 (0.500 to 1.500)  measured, median (low to high) of 3 pairs"
        in text
    )


def test_no_time_is_printed_unless_it_was_measured_in_turns(parts):
    text = table(sides(), 0.0125, None, TrainConfig(), parts())
    assert "time" not in text
