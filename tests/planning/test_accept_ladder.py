"""Acceptance of a ladder: each plan on the updates that are its bucket's, the others left alone."""

import dataclasses
import math

import jax.numpy as jnp
import pytest

import hilore_jax as hl
from hilore_jax.planning.accept_ladder import accept_ladder
from hilore_jax.planning.memory import Memory
from hilore_jax.planning.menu import Entry
from plans import bare_plan

GC, LOW, HIGH = (
    hl.Policy({}),
    hl.Policy({"up": hl.Compress("int8"), "gate": hl.Compress("int8")}),
    hl.Policy({"up": hl.Compress("int8")}),
)
MENU = tuple(Entry(policy, 8, 1.0, 1, 1, 0.0) for policy in (GC, LOW, HIGH))


def plan(policy, exposure):
    risks = ((0.0, 0.004, 0.002),) * 2
    return bare_plan([policy] * 2, MENU, budget=100, block_risks=risks, exposure=exposure)


LADDER = hl.Ladder(
    (1.0, 2.0, 4.0, math.inf), (plan(LOW, 1.0), plan(HIGH, 2.0), plan(HIGH, 4.0), plan(GC, 4.0))
)


class Gradients:
    """A gradient of norm 1, an error for each policy, and the exposures that are the update."""

    def __init__(self, errors):
        self.errors, self.asked = errors, []

    def __call__(self, policies, update):
        self.asked.append((policies[0], update))
        error = self.errors.get(policies[0], 0.0)
        return {"w": jnp.array([1.0, error])}, list(update)


CALM, MIDDLE, WILD = (0.5, 0.75), (0.25, 1.5), (0.1, 9.0)


def test_each_plan_is_tried_on_the_updates_of_its_bucket_alone():
    gradients = Gradients({LOW: 0.01, HIGH: 0.5})
    found = accept_ladder(LADDER, gradients, [MIDDLE, CALM, WILD, CALM])
    assert found.buckets == (1, 0, 3, 0) and found.exposures == (1.5, 0.75, 9.0, 0.75)
    first, second, third, last = found.ladder.plans
    assert (first.accepted, second.accepted) == (True, False)
    assert first.acceptance is not None and second.acceptance is not None
    assert first.acceptance["errors"] == pytest.approx((0.01, 0.01))
    assert second.acceptance["errors"] == pytest.approx((0.5,))
    # No update is of the third bucket: no verdict, though its policy is the second's.
    assert third == LADDER.plans[2] and third.accepted is None and last == LADDER.plans[3]
    kept = dataclasses.replace(found.ladder, plans=LADDER.plans)
    assert kept == LADDER
    # Each exact gradient once, and each plan's on its own updates.
    exact = [(GC, update) for update in (MIDDLE, CALM, WILD, CALM)]
    assert gradients.asked == [*exact, (LOW, CALM), (LOW, CALM), (HIGH, MIDDLE)]
    text = str(found).splitlines()
    assert text[0].startswith("bucket up to exposure 1: accepted: peak 1 of 100 bytes")
    assert text[1].startswith("bucket up to exposure 2: rejected: its mean gradient error of 0.5")
    none = "bucket up to exposure 4: not tried, none of the 4 updates has its exposure"
    assert text[2].startswith(f"{none} (their largest: 1.5, 0.75, 9, 0.75); ask for more updates")
    assert text[3] == "above: 1 of the updates, whose plan is exact"


def test_a_verdict_of_before_stays_where_no_update_tries_the_plan_again():
    rejected = accept_ladder(LADDER, Gradients({LOW: 0.5}), [CALM]).ladder
    assert rejected.plans[0].accepted is False
    again = accept_ladder(rejected, Gradients({}), [MIDDLE]).ladder
    assert [made.accepted for made in again.plans] == [False, True, None, None]
    assert accept_ladder(again, Gradients({}), [CALM]).ladder.plans[0].accepted is True


def test_the_share_of_tokens_moves_an_update_to_another_bucket():
    # A microbatch with a quarter of the tokens may have half of the exposure.
    for tokens, buckets in ((None, (0,)), (lambda update: [10, 30], (1,))):
        found = accept_ladder(LADDER, Gradients({}), [(0.75, 0.75)], tokens=tokens)
        assert found.buckets == buckets


def test_options_reach_every_plan():
    over = lambda policies: Memory(100 + (policies[0] == LOW), 0, 0, 0, 0, 0)  # noqa: E731
    made = accept_ladder(LADDER, Gradients({}), [CALM, MIDDLE], memory=over).ladder
    assert [each.accepted for each in made.plans] == [False, True, None, None]


def test_an_exposure_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="exposure is nan: expected a number >= 0"):
        accept_ladder(LADDER, Gradients({}), [(0.5, math.nan)])
