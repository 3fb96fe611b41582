"""Rows that cannot matter, and where the others lie."""

import hypothesis
import hypothesis.extra.numpy as hnp
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from hilore_jax.training.rows import lay_out, row_tokens, spread_rows, take_rows


@hypothesis.given(
    hnp.arrays(bool, st.integers(1, 9)), st.integers(1, 4), st.integers(0, 99), st.booleans()
)
def test_every_living_row_lies_in_one_place_and_none_else(dead, micro_rows, seed, by_exposure):
    exposures = np.random.default_rng(seed).random(len(dead)).astype(np.float32)
    made = lay_out(dead, exposures if by_exposure else None, micro_rows)
    placed = made.index[made.valid]
    assert sorted(placed.tolist()) == np.flatnonzero(~dead).tolist()
    assert made.skipped == dead.sum()
    assert len(made.index) == -(-len(placed) // micro_rows)
    assert (np.diff(exposures[placed] if by_exposure else placed) >= 0).all()
    assert not dead[made.index].any()  # a row that fills up is one that is evaluated anyway
    np.testing.assert_allclose(made.sums(exposures).sum(), exposures[~dead].sum(), rtol=1e-5)
    for row, micro in enumerate(made.places()):
        assert (micro == -1) == dead[row] and (dead[row] or row in made.index[micro])
    back = spread_rows(made, list(exposures[made.index]), np.zeros_like(exposures))
    np.testing.assert_array_equal(back, np.where(dead, 0, exposures))


def test_nan_counts_as_the_highest_exposure():
    made = lay_out(np.zeros(3, bool), np.array([np.nan, 2.0, 1.0]), 1)
    assert made.index.ravel().tolist() == [2, 1, 0]


def test_rows_are_taken_whole_and_filling_ones_optimize_nothing(batch):
    data = batch(micro=2)
    taken = take_rows(data, jnp.array([3, 0]), jnp.array([True, False]))
    np.testing.assert_array_equal(taken.tokens[0], data.tokens[1, 1])
    assert taken.logp_ref is not None and data.logp_ref is not None
    np.testing.assert_array_equal(taken.logp_ref[0], data.logp_ref[1, 1])
    np.testing.assert_array_equal(taken.completion_mask[0], data.completion_mask[1, 1])
    assert not taken.completion_mask[1].any() and data.completion_mask[0, 0].any()
    assert row_tokens(data).tolist() == [4, 1, 3, 2]
