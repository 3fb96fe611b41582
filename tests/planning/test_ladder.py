"""`hl.plan_ladder` on a small update: more compression at lower exposure, in one layout."""

import dataclasses
import functools
import itertools
import json
import math
import operator

import jax
import jax.numpy as jnp
import pytest

import hilore_jax as hl
from blocks import inputs, mlp, params, temp_bytes
from hilore_jax.planning.ladder import Ladder, compresses, plan_ladder, refined_segments
from hilore_jax.planning.measured import Measured, Timing
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.target import parse_target
from plans import bare_plan

D, F, N = 32, 96, 6
X = jax.ShapeDtypeStruct((8, 128, D), jnp.float32)
ONE = jax.eval_shape(lambda: params(d=D, f=F))
BLOCKS = hl.Blocks(mlp, (ONE, X), N)
CPU = dataclasses.replace(parse_target("cpu"), flops=(("float32", 1e10),), bandwidth=2e10)
GC, INT8 = hl.Policy({}), hl.Policy({"gate": hl.Compress("int8"), "up": hl.Compress("int8")})

MEASURED = Measured((Timing(GC, 0.0, 0.0, 0.0, N),), 5, 1.0, (), {"blocks": "6"})


def arguments(policies):
    lengths = [len(list(run)) for _, run in itertools.groupby(policies)]
    stack = lambda n: jax.tree.map(lambda s: jax.ShapeDtypeStruct((n, *s.shape), s.dtype), ONE)  # noqa: E731
    return tuple(stack(n) for n in lengths), X


def update(policies, stack, x):
    def loss(stack):
        return jnp.sum(jnp.sin(hl.scan_blocks(mlp, stack, x, policies)))

    return jax.tree.map(lambda a, g: a - 0.1 * g, stack, jax.grad(loss)(stack)), {}


def planner(risk, memory="1.2x gc"):
    """Stands in for a calibration: risks in proportion to exposure."""

    def at(exposure):
        budget = hl.Budget(memory, 0.0 if exposure == math.inf else risk)
        made = hl.plan(
            update,
            arguments,
            blocks=BLOCKS,
            budget=budget,
            target=CPU,
            codecs=(hl.Compress("int8"),),
            risks=lambda name, compress: 0.004 * exposure,
        )
        return made if exposure == math.inf else dataclasses.replace(made, exposure=exposure)

    return at


@functools.cache
def made(risk=0.015, share=1.0):
    return plan_ladder(
        update,
        arguments,
        blocks=BLOCKS,
        budget=hl.Budget("1.2x gc", risk),
        target=CPU,
        exposures=(0.6, 3.5, 0.0),
        share=share,
        plan_at=planner(risk * math.sqrt(share)),
    )


def compressed(plan):
    return sum(len(policy.names(hl.Compress)) for policy in plan.policies)


def test_lower_exposure_compresses_more_and_the_top_is_exact():
    ladder = made()
    assert ladder.edges == (1.0, 2.0, 4.0, math.inf)
    counts = [compressed(plan) for plan in ladder.plans]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 0
    seconds = [plan.recompute_seconds for plan in ladder.plans]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]
    assert all(plan.risk <= 0.015 and plan.memory.peak <= plan.budget for plan in ladder.plans)
    for exposure, bucket in ((0.0, 0), (1.0, 0), (1.01, 1), (4.0, 2), (4.01, 3), (1e9, 3)):
        assert ladder.select(exposure) == bucket
    assert ladder.n_executables == len({plan.policies for plan in ladder.plans}) <= 4
    assert "exposure to" in str(ladder) and "inf" in str(ladder)


def test_an_exposure_that_is_no_size_has_no_plan_and_an_infinite_one_the_last():
    exact = bare_plan((GC,), [Entry(GC, 0, 0.0, 0, 0, 0.0)])
    ladder = Ladder((1.0, 2.0, 4.0, math.inf), (exact,) * 4)
    for how in ((), (10, 40), (0, 40)):
        for bad in (math.nan, -math.inf, -1e-30):
            with pytest.raises(ValueError, match=f"exposure is {bad}: expected a number >= 0"):
                ladder.select(bad, *how)
        assert ladder.select(math.inf, *how) == len(ladder.plans) - 1 == 3
    assert ladder.select(-0.0) == 0


def test_a_bucket_takes_the_next_ones_plan_where_that_is_faster():
    seconds = {0.5: 3.0, 1.0: 2.0, 2.0: 2.5, math.inf: 4.0}

    def at(exposure):
        low = exposure if exposure < 9 else 0.0
        menu = Entry(GC, 0, seconds[exposure], 1, 8, 0.0), Entry(INT8, 9, 9.0, 0, 0, low)
        return bare_plan((GC,) * N, menu, exposure=exposure)

    options = {"blocks": BLOCKS, "budget": hl.Budget("2x gc"), "exposures": (0.5, 2.0)}
    ladder = plan_ladder(update, arguments, plan_at=at, **options)
    assert ladder.edges == tuple(seconds)
    assert [plan.recompute_seconds for plan in ladder.plans] == [2.0 * N, 2.0 * N, 2.5 * N, 4.0 * N]
    assert [plan.exposure for plan in ladder.plans] == [1.0, 1.0, 2.0, math.inf]


def test_the_risk_of_a_plan_for_more_exposure_is_less_in_its_bucket():
    menu = Entry(GC, 0, 2.0, 1, 8, 0.0), Entry(INT8, 9, 1.0, 0, 0, 0.004)
    low, exact = bare_plan((INT8,), menu, exposure=2.0), bare_plan((GC,), menu)
    buckets = Ladder((0.5, 2.0, math.inf), (low, low, exact)).buckets
    assert buckets.risks == pytest.approx((0.001, 0.004, 0.0))
    # The same plan at the same exposure, in whichever bucket.
    assert buckets.risk(0, 0.5) == pytest.approx(buckets.risk(1, 0.5)) == pytest.approx(0.001)


def test_a_quarter_of_the_tokens_has_half_of_the_risk_budget():
    whole, part = made(), made(share=0.25)
    assert [plan.risk_budget for plan in part.plans[:-1]] == [0.0075] * 3
    assert sum(map(compressed, part.plans)) < sum(map(compressed, whole.plans))
    # The same microbatch as all of the update may have twice the exposure.
    assert part.select(2.0, 10, 10) == part.select(1.0) == part.select(1.0, 10, 40) == 0
    assert part.select(2.01, 10, 10) == 1


def test_no_risk_budget_compresses_nothing_at_any_exposure():
    assert [compressed(plan) for plan in made(0.0).plans] == [0] * 4
    assert made(0.0).n_executables == 1


def test_what_is_not_measured_or_not_a_share_is_refused_before_planning():
    def refused(message, **options):
        options = {"exposures": [1.0], "budget": hl.Budget("2x gc"), **options}
        with pytest.raises(ValueError, match=message):
            plan_ladder(update, arguments, blocks=BLOCKS, target=CPU, **options)

    refused("needs a calibration")
    refused("needs exposures", exposures=None)
    refused("exposures hold -1", exposures=[-1.0])
    refused("exposures hold nan", exposures=[math.nan])
    refused(r"share = 1\.5", share=1.5)
    refused("R is infinite", budget=hl.Budget("2x gc", math.inf))
    refused("must compress nothing", plan_at=lambda exposure: made().plans[0])
    with pytest.raises(ValueError, match=r"risk=-0\.1"):
        hl.Budget("2x gc", -0.1)


def test_a_plan_above_its_budget_and_a_wrong_count_are_refused():
    ladder = made()
    assert ladder.plans[0].risk > 0.001
    with pytest.raises(ValueError, match="R is infinite"):
        dataclasses.replace(ladder, risk=math.inf)
    with pytest.raises(ValueError, match="has risk"):
        dataclasses.replace(ladder, risk=0.001)
    with pytest.raises(ValueError, match="4 plans for 3 buckets"):
        dataclasses.replace(ladder, edges=(1.0, 2.0, math.inf))
    first = dataclasses.replace(ladder.plans[0], norm=0.5)
    with pytest.raises(ValueError, match=r"gradient norms \['0.5', 'None'\]: expected one"):
        dataclasses.replace(ladder, plans=(first, *ladder.plans[1:]))
    short = dataclasses.replace(ladder.plans[0], policies=ladder.plans[0].policies[1:])
    with pytest.raises(ValueError, match=r"plans are for \[5, 6\] blocks"):
        dataclasses.replace(ladder, plans=(short, *ladder.plans[1:]))


@pytest.mark.parametrize("exposure", [None, 0.0, 0.999, math.nan])
def test_a_plan_that_compresses_is_for_all_of_its_bucket(exposure, tmp_path):
    ladder = made()
    assert ladder.plans[0].risk > 0 and ladder.plans[0].exposure == ladder.edges[0] == 1.0
    low = dataclasses.replace(ladder.plans[0], exposure=exposure)
    message = "up to exposure 1 compresses, with risks that are for .*exposure=1\\)"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ladder, plans=(low, *ladder.plans[1:]))
    options = {"blocks": BLOCKS, "budget": hl.Budget("2x gc"), "exposures": [1.0]}
    by_edge = {1.0: low, math.inf: ladder.plans[-1]}
    with pytest.raises(ValueError, match=message):
        plan_ladder(update, arguments, plan_at=by_edge.__getitem__, **options)
    # What is exact is for any exposure, and more than the edge is no less safe.
    exact = dataclasses.replace(ladder.plans[-1], exposure=exposure)
    above = dataclasses.replace(ladder.plans[0], exposure=1.5)
    for one in (exact, above):
        dataclasses.replace(ladder, plans=(one, *ladder.plans[1:]))
    path = tmp_path / "ladder.json"
    ladder.save(path)
    fields = json.loads(path.read_text())
    fields["plans"][0]["exposure"] = exposure if exposure == exposure else None
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=f"damaged ladder file: .*{message}"):
        Ladder.load(path)


def test_linear_risks_share_the_budget_linearly():
    linear = [dataclasses.replace(plan, paper=True) for plan in made().plans]
    risk = max(plan.risk for plan in linear)  # sums, above the roots
    ladder = dataclasses.replace(made(), plans=tuple(linear), risk=4 * risk, share=0.25)
    assert ladder.buckets.paper and ladder.select(1.0, 10, 40) == 0
    assert ladder.select(1.0, 10, 80) == 1  # half the tokens, half the exposure
    with pytest.raises(ValueError, match="has risk"):
        dataclasses.replace(ladder, risk=3.9 * risk)
    mixed = (*linear[:-1], made().plans[-1])
    with pytest.raises(ValueError, match="expected one form"):
        dataclasses.replace(ladder, plans=mixed)


def test_ladders_are_saved_and_loaded(tmp_path):
    path = tmp_path / "ladder.json"
    made().save(path)
    assert Ladder.load(path) == made()
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    with pytest.raises(ValueError, match="planned for cpu; found cuda"):
        Ladder.load(path, {"target": "cuda:h200"})
    fields = json.loads(path.read_text())
    for change, message in (
        ({"schema": 9}, "schema 9.*install a newer"),
        ({"schema": 0}, "schema 0.*plan again"),
        ({"edges": [1.0, 0.5, 4.0, None]}, "damaged.*ascending"),
        ({"risk": None}, "damaged"),
    ):
        path.write_text(json.dumps(fields | change))
        with pytest.raises(ValueError, match=message):
            Ladder.load(path)
    for text in ("[1]", "{", "{}"):
        path.write_text(text)
        with pytest.raises(ValueError, match="not a ladder file"):
            Ladder.load(path)
    made().plans[0].save(path)
    with pytest.raises(ValueError, match="not a ladder file"):
        Ladder.load(path)


def cut(stack, lengths):
    bounds = itertools.pairwise(itertools.accumulate(lengths, initial=0))
    return tuple(jax.tree.map(operator.itemgetter(slice(i, j)), stack) for i, j in bounds)


def test_refined_segments_hold_every_plan_without_a_copy():
    plans = [(INT8, INT8, INT8, GC), (INT8, GC, GC, GC)]
    lengths = refined_segments(plans)
    assert lengths == (1, 2, 1)
    stack = jax.tree.map(lambda *a: jnp.stack(a), *(params(i, 64, 192) for i in range(4)))
    x = inputs(shape=(4, 16, 64))
    fine = cut(stack, lengths)

    def gradients(policies, stack):
        loss = lambda stack: jnp.sum(jnp.sin(hl.scan_blocks(mlp, stack, x, policies)))  # noqa: E731
        return jax.grad(loss)(stack)

    def temporaries(policies, stack):
        jitted = jax.jit(
            functools.partial(gradients, policies), compiler_options=hl.compiler_options()
        )
        return temp_bytes(jitted.lower(stack).compile())

    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(stack))
    for policies in plans:
        own = cut(stack, refined_segments([policies]))
        assert temporaries(policies, fine) <= temporaries(policies, own) + 0.05 * weights
    # Witness: one stack that each plan cuts anew costs copies of the weights.
    assert temporaries(plans[0], (stack,)) > temporaries(plans[0], fine) + 0.2 * weights


def test_refined_segments_are_the_coarsest_that_serve():
    assert refined_segments([(GC, GC, GC)]) == (3,)
    assert refined_segments([(GC, INT8), (INT8, GC)]) == (1, 1)
    assert refined_segments(made().plans) == made().segments
    with pytest.raises(ValueError, match=r"plans for \[1, 2\] blocks"):
        refined_segments([(GC, GC), (GC,)])
    with pytest.raises(ValueError, match=r"plans for \[\] blocks"):
        refined_segments([])
    assert compresses(INT8) and not compresses(hl.Policy(default=hl.Store()))


def test_a_measured_ladder_is_measured_once(monkeypatch):
    asked = []
    first = dataclasses.replace(made().plans[0], measured=MEASURED, cost="measured")

    def fake(update, args, *, cost, exposure, **_):
        asked.append((cost, exposure))
        exact = dataclasses.replace(made().plans[-1], measured=MEASURED, cost="measured")
        return exact if len(asked) > 1 else first

    monkeypatch.setattr("hilore_jax.planning.rungs.plan", fake)
    plan_ladder(
        update,
        arguments,
        blocks=BLOCKS,
        budget=hl.Budget("1.2x gc"),
        target=CPU,
        exposures=[1.0, 4.0],
        calibration=hl.Calibration((), 1.0, 1.0, (1.0,), {}, 1, 1.0, 1, {}),
        cost="measured",
    )
    costs, exposures = zip(*asked, strict=True)
    assert costs[0] == "measured" and len(costs) > 2
    assert all(cost is MEASURED for cost in costs[1:])
    assert exposures == tuple(sorted(exposures))
