"""Microbatches under the plans that their exposures allow: the limits, repeats, and no numbers."""

import math

import numpy as np
import pytest

import hilore_jax as hl
from hilore_jax.planning.buckets import Buckets
from hilore_jax.training.attempts import Attempts, _at_most

POLICIES = tuple((hl.Policy({f"n{i}": hl.Store()}),) for i in range(3))
LOW, HIGH, EXACT = range(3)


@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 0.7, 1e-30, 1e30, 2.0**-149 * 1.5])
def test_a_limit_is_the_largest_float32_that_is_not_above(value):
    found = _at_most(value)
    assert found.dtype == np.float32
    # In exact arithmetic: Python compares the numbers, not their rounded kinds.
    assert float(found) <= value < float(np.nextafter(found, np.float32(np.inf)))


def test_some_limits_would_be_rounded_up():
    above = [v for v in (0.1, 0.3, 0.7, 1e30) if float(np.float32(v)) > v]
    assert above and all(float(_at_most(v)) < float(np.float32(v)) for v in above)
    for exact in (0.0, 0.5, 3.0, math.inf):
        assert float(_at_most(exact)) == exact


class Device:
    """The programs: a microbatch counts where its exact exposure is within the limit."""

    def __init__(self, exposures):
        self.exposures, self.tried = exposures, []

    def attempt(self, policies, total, micro, limit):
        exposure = np.float32(self.exposures[micro])
        accepted = bool(exposure <= limit)
        self.tried.append((micro, POLICIES.index(policies)))
        seen = {"exposure": exposure, "accepted": accepted, "loss": np.float32(1.0)}
        return total + accepted, seen


def attempted(estimates, exposures, edges=(0.5, 1.0, math.inf)):
    device = Device(exposures)
    count = len(exposures)
    buckets = Buckets(edges, (0.01, 0.01, 0.0), share=1 / count)
    tried = Attempts(buckets, POLICIES, np.full(count, 6), 6 * count, device.attempt)
    return device, tried.all(0, np.asarray(estimates, np.float64))


def test_a_microbatch_above_its_limit_is_done_again_in_the_bucket_of_its_exposure():
    device, (total, chosen, _, redone) = attempted([0.1, 0.1, 0.1], [0.4, 0.9, 9.0])
    assert (total, chosen, redone) == (3, [LOW, HIGH, EXACT], 2)
    assert device.tried == [(0, LOW), (1, LOW), (2, LOW), (1, HIGH), (2, EXACT)]


def test_an_exposure_just_above_an_edge_is_not_allowed_by_rounding():
    above = np.nextafter(np.float32(0.1), np.float32(1))
    assert float(np.float32(0.1)) > 0.1  # witness: the float32 nearest to the edge is above it
    for exposure, bucket in ((np.float32(0.1), HIGH), (above, HIGH), (np.float32(0.0999), LOW)):
        _, (_, chosen, _, _) = attempted([0.01], [exposure], edges=(0.1, 1.0, math.inf))
        assert chosen == [bucket]


@pytest.mark.parametrize("estimate", [0.1, 0.9, math.nan, math.inf])
def test_an_exposure_that_is_no_number_never_counts_and_refuses_the_update(estimate):
    device, (total, chosen, seen, redone) = attempted([0.1, estimate], [0.4, math.nan])
    assert total == 1 and redone == 0  # not even under the exact plan
    assert [math.isnan(one["loss"]) for one in seen] == [False, True]
    if not estimate < math.inf:
        assert chosen[1] == EXACT and (1, LOW) not in device.tried


def test_an_estimate_that_is_no_number_is_given_the_exact_plan():
    device, (total, chosen, _, _) = attempted([math.nan, 0.1], [0.4, 0.4])
    assert (total, chosen) == (2, [EXACT, LOW]) and (0, LOW) not in device.tried
