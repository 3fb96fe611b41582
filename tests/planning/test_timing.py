"""Interleaving and ratios."""

import pytest

from hilore_jax.planning.timing import interleaved, ratio


def test_turns_alternate_after_a_warm_up():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    seconds = interleaved(runs, repeats=3)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def test_ratio_is_of_pairs_not_of_medians():
    # Of medians it would be 2 / 3.
    assert ratio([1.0, 2.0, 8.0], [4.0, 3.0, 2.0]) == pytest.approx((2 / 3, 0.25, 4.0))
    assert ratio([1.0, 2.0, 9.0], [1.0, 4.0, 3.0]).median == 1.0
