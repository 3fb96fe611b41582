"""Acceptance of a ladder: each plan on the updates that are its bucket's, the others left alone."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

import hilore_jax as hl
from hilore_jax.planning.accept_ladder import accept_ladder
from hilore_jax.planning.leave_names import BlockView
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
    assert text[4] == "each microbatch under its own bucket's plan, as in training: not tried"


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


class Mixed:
    """A gradient of norm 1 whose error is the root of the microbatches' summed squares."""

    def __init__(self, errors):
        self.errors, self.asked = errors, []

    def __call__(self, policies, update):
        self.asked.append(([each[0] for each in policies], update))
        error = math.hypot(*(self.errors.get(each[0], 0.0) for each in policies))
        return {"w": jnp.array([1.0, error])}


def test_each_microbatch_has_its_own_buckets_plan_in_the_trial_of_the_whole():
    gradients, mixed = Gradients({LOW: 0.012, HIGH: 0.001}), Mixed({LOW: 0.012, HIGH: 0.004})
    found = accept_ladder(LADDER, gradients, [MIDDLE, CALM, WILD, (5.0, 6.0)], mixed=mixed)
    # Each plan alone passes, and so do they together; what is all exact is no part of the mean.
    assert [made.accepted for made in found.ladder.plans] == [True, True, None, None]
    assert mixed.asked == [([LOW, HIGH], MIDDLE), ([LOW, GC], WILD)]
    assert found.mix is not None and found.mix.accepted and found.mix.buckets == (0, 1)
    expected = (math.hypot(0.012, 0.004), 0.012, 0.012)
    assert found.mix.errors == pytest.approx(expected)
    last = str(found).splitlines()[-1]
    assert last.startswith("each microbatch under its own bucket's plan, as in training: accepted")
    assert "mean gradient error 0.01222 of 0.015 over 3 updates" in last
    # Risks at each microbatch's own exposure: 0.004 of two blocks at 1, 0.002 at 2.
    low, high = 0.004 * 2**0.5, 0.002 * 2**0.5 / 2
    parts = [(0.25 * low, 1.5 * high), (0.5 * low, 0.75 * low), (0.1 * low,)]
    mean = sum(math.hypot(*part) for part in parts) / 3
    assert found.mix.predicted == pytest.approx(mean)


def test_a_mix_above_the_limit_rejects_the_plans_that_took_part(tmp_path):
    saved = []
    found = accept_ladder(
        LADDER,
        Gradients({HIGH: 0.001}),
        [MIDDLE, WILD],
        mixed=Mixed({LOW: 0.5}),
        save=saved.append,
        limit=0.1,
    )
    first, second, third, last = found.ladder.plans
    assert [made.accepted for made in (first, second, third, last)] == [False, False, None, None]
    for made in (first, second):
        assert made.acceptance is not None
        assert (
            "own bucket's plan: rejected: the mean gradient error of 0.5 exceeds 0.1"
            in (made.acceptance["reason"])
        )
    assert second.acceptance is not None and second.acceptance["errors"] == pytest.approx((0.001,))
    found.ladder.save(tmp_path / "ladder.json")
    assert hl.Ladder.load(tmp_path / "ladder.json") == found.ladder == saved[-1]
    # NaN is not within a limit either.
    unknown = accept_ladder(LADDER, Gradients({}), [WILD], mixed=Mixed({LOW: math.nan}))
    assert unknown.ladder.plans[0].accepted is False


def test_a_mix_without_room_is_rejected():
    def full(policies, update):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 bytes more")

    found = accept_ladder(LADDER, Gradients({}), [MIDDLE], mixed=full)
    assert [made.accepted for made in found.ladder.plans] == [False, False, None, None]
    assert (
        str(found)
        .splitlines()[-1]
        .endswith("rejected: out of memory: RESOURCE_EXHAUSTED: 9 bytes more")
    )


def test_updates_that_try_nothing_are_no_acceptance():
    message = r"nothing of the ladder was tried: none of the 1 updates .* \(up to 1, 2, 4; .*: 9\)"
    with pytest.raises(ValueError, match=message):
        accept_ladder(LADDER, Gradients({}), [WILD])
    # What compresses is not tried by an update of a bucket whose plan is exact.
    plans = (LADDER.plans[0], plan(GC, 2.0), *LADDER.plans[3:])
    partly = hl.Ladder((1.0, 2.0, math.inf), plans)
    with pytest.raises(ValueError, match=r"a bucket whose plan compresses \(up to 1; .*: 1\.5\)"):
        accept_ladder(partly, Gradients({}), [(1.5, 1.5)])
    accept_ladder(partly, Gradients({}), [MIDDLE], mixed=Mixed({}))  # its calm microbatch does
    single = hl.Ladder((math.inf,), (plan(GC, 4.0),))
    with pytest.raises(ValueError, match="there is nothing to try"):
        accept_ladder(single, Gradients({}), [CALM])


def test_each_verdict_is_saved_before_the_next_plan_is_tried():
    class Interrupted(Gradients):
        def __call__(self, policies, update):
            if policies[0] == HIGH:
                raise KeyboardInterrupt
            return super().__call__(policies, update)

    saved = []
    with pytest.raises(KeyboardInterrupt):
        accept_ladder(LADDER, Interrupted({}), [CALM, MIDDLE], save=saved.append)
    assert [[made.accepted for made in each.plans] for each in saved] == [[True, None, None, None]]


def test_what_is_left_out_keeps_a_plan_within_the_ladders_share():
    """A plan with a budget of its own, larger than the ladder's: R is 0.015 for all of it."""
    kept = hl.Policy({"up": hl.Compress("int8"), "act": hl.Store()})
    risks = ((0.0, 0.0, 0.02, 0.001),) * 2  # without `act` the risk is above R
    menu = (*MENU, Entry(kept, 8, 1.0, 1, 1, 0.0))
    made = bare_plan([kept] * 2, menu, budget=100, block_risks=risks, exposure=1.0, risk_budget=0.5)
    ladder = hl.Ladder((1.0, math.inf), (made, plan(GC, 4.0)))
    view = BlockView(
        lambda policy: Entry(policy, 8, 9.0 - len(policy.names(hl.Compress)), 0, 0, 0.0), str
    )
    options = {"block": view, "memory": lambda policies: Memory(1, 0, 0, 0, 0, 0)}
    found = accept_ladder(ladder, Gradients({}), [CALM], **options).ladder
    assert found.plans[0].policies == (kept,) * 2 and found.plans[0].accepted
    assert found.plans[0].risk_budget == 0.5
    loose = dataclasses.replace(ladder, risk=0.5)  # witness
    assert accept_ladder(loose, Gradients({}), [CALM], **options).ladder.plans[0].policies == (
        (HIGH,) * 2
    )
