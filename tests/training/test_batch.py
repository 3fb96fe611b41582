"""What a batch must be: shapes, dtypes and padding, each fault named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hilore_jax.training.batch import check_batch, micro


def test_a_good_batch_passes_as_arrays_and_as_shapes(batch):
    for reference in (True, False):
        check_batch(batch(reference=reference))
        jax.eval_shape(check_batch, batch(reference=reference))


@pytest.mark.parametrize(
    ("field", "shape"),
    [
        ("logp_old", (2, 2, 3)),
        ("logp_ref", (2, 1, 4)),
        ("advantages", (2, 2, 1)),
        ("attention_mask", (2, 2, 8)),
        ("tokens", (4, 9)),
        ("completion_mask", (2, 2, 9)),
    ],
)
def test_shapes_that_do_not_fit_name_the_field(batch, field, shape):
    wrong = jnp.zeros(shape, getattr(batch(), field).dtype)
    # The width of the completion mask decides: another one makes the log-probs wrong.
    named = "logp_old" if field == "completion_mask" else field
    with pytest.raises(ValueError, match=rf"batch\.{named}"):
        check_batch(dataclasses.replace(batch(), **{field: wrong}))


@pytest.mark.parametrize(
    ("field", "dtype"),
    [("tokens", "float32"), ("completion_mask", "float32"), ("advantages", "int32")],
)
def test_dtypes_that_do_not_fit_name_the_field(batch, field, dtype):
    wrong = getattr(batch(), field).astype(dtype)
    with pytest.raises(ValueError, match=rf"batch\.{field} is {dtype}, expected"):
        check_batch(dataclasses.replace(batch(), **{field: wrong}))


def changed(batch, field, index, values):
    data = batch(micro=1)
    array = np.array(getattr(data, field))
    array[0][index] = values
    return dataclasses.replace(data, **{field: jnp.asarray(array)})


@pytest.mark.parametrize(
    ("field", "index", "values", "message"),
    [
        ("attention_mask", np.s_[1, :5], [1, 1, 1, 0, 0], "prompt row 1 is padded on the right"),
        ("attention_mask", np.s_[2, :5], 0, "prompt row 2 is empty"),
        ("attention_mask", np.s_[1, 5:], [0, 1, 1, 1], "completion of row 1 is padded on the left"),
        ("completion_mask", np.s_[3, 3], True, "row 3 optimizes padding"),
    ],
)
def test_padding_on_the_wrong_side_names_the_row(batch, field, index, values, message):
    with pytest.raises(ValueError, match=message):
        check_batch(changed(batch, field, index, values))


def test_rows_that_do_not_divide_into_microbatches():
    with pytest.raises(ValueError, match="5 rows do not divide into microbatches of 2"):
        micro(np.zeros((5, 3)), 2)


def test_jax_may_take_it_apart_and_put_it_together(batch):
    data = batch()
    sliced = jax.tree.map(lambda x: x[0], data)
    assert sliced.tokens.shape == (2, 9)
    assert jax.tree.map(lambda x: None, data).tokens is None
    doubled = jax.vmap(lambda b: b)(data)
    assert jax.tree.structure(doubled) == jax.tree.structure(data)
