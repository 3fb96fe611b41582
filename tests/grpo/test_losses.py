"""The loss family: literals, autodiff of independent formulas, bounds, splits, refusals."""

import math
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import hilore_jax.grpo
from hilore_jax.grpo import mismatch_weights
from hilore_jax.grpo.terms import check_choice

# Any: the tests call with unpacked lists, whose lengths a type checker cannot know.
loss_and_coefficients: Any = hilore_jax.grpo.loss_and_coefficients
estimate_exposure: Any = hilore_jax.grpo.estimate_exposure
exposure: Any = hilore_jax.grpo.exposure
loss_divisors: Any = hilore_jax.grpo.loss_divisors
ratio_metrics: Any = hilore_jax.grpo.ratio_metrics

FORMS = {
    "grpo, dual clip": {"clip_dual": 1.5},
    "gspo": {"ratio": "sequence"},
    "gspo, dual clip": {"ratio": "sequence", "clip_dual": 1.1, "clip": 0.05},
    "cispo": {"surrogate": "cispo", "clip_high": 0.3},
    "cispo of sequences": {"surrogate": "cispo", "ratio": "sequence"},
    "k1": {"reference": "k1"},
    "k2": {"reference": "k2"},
    "gspo, k2": {"ratio": "sequence", "reference": "k2"},
}


def batch(seed: int, rows: int = 5, seq: int = 6, drift: float = 0.5) -> list[Any]:
    """Rows of different lengths, one of them empty; float64."""
    rng = np.random.default_rng(seed)
    old = rng.uniform(-4, -1, (rows, seq))
    logp = old + rng.uniform(-drift, drift, old.shape)
    lengths = np.r_[0, rng.integers(1, seq + 1, rows - 1)]
    mask = np.arange(seq) < lengths[:, None]
    return [logp, old, old + rng.normal(0, 0.3, old.shape), rng.normal(0, 1, rows), mask]


def plain(logp, old, ref, advantages, mask, divisors, clip=0.2, beta=0.1, **options):
    """The formulas one after the other, for automatic differentiation; nothing is shared."""
    high = 1 + options.get("clip_high", clip)
    gaps = jnp.where(mask, logp - old, 0.0)
    if options.get("ratio") == "sequence":
        gaps = jnp.sum(gaps, 1, keepdims=True) / jnp.maximum(jnp.sum(mask, 1, keepdims=True), 1)
    rho, a = jnp.exp(gaps), advantages[:, None]
    if options.get("surrogate") == "cispo":
        terms = -jax.lax.stop_gradient(jnp.minimum(rho, high)) * a * logp
    else:
        terms = jnp.maximum(-rho * a, -jnp.clip(rho, 1 - clip, high) * a)
        if "clip_dual" in options:
            terms = jnp.where(a < 0, jnp.minimum(terms, -options["clip_dual"] * a), terms)
    gap = ref - logp
    distance = {"k1": -gap, "k2": gap**2 / 2, "k3": jnp.exp(gap) - gap - 1}
    terms = terms + beta * distance[options.get("reference", "k3")]
    weights = jnp.where(divisors > 0, 1 / jnp.where(divisors > 0, divisors, 1), 0)[:, None]
    return jnp.sum(jnp.where(mask, weights * terms, 0.0))


@pytest.mark.newest
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("mean", ["token", "sequence"])
def test_loss_and_omega_are_those_of_automatic_differentiation(options, mean):
    with jax.enable_x64(True):
        differ = 0
        for seed in range(6):
            *terms, mask = (jnp.asarray(x) for x in batch(seed))
            divisors = loss_divisors(jnp.sum(mask, 1), mean).astype(float)
            want, slope = jax.value_and_grad(plain)(*terms, mask, divisors, **options)
            loss, omega = loss_and_coefficients(*terms, mask, divisors, beta=0.1, **options)
            found = jax.grad(
                lambda x, r=(*terms[1:], mask, divisors): loss_and_coefficients(
                    x, *r, beta=0.1, **options
                )[0]
            )(terms[0])
            np.testing.assert_allclose(loss, want, rtol=1e-12)
            np.testing.assert_allclose(omega, slope, rtol=1e-10, atol=1e-14)
            np.testing.assert_array_equal(found, omega)
            base = loss_and_coefficients(*terms, mask, divisors, beta=0.1)[1]
            differ += not np.allclose(base, omega, rtol=1e-3)
        assert differ  # Witness: the options do something.


def test_sequence_ratios_by_hand():
    # Row 0: log-ratios 0.3 and -0.1, mean 0.1. Row 1: one token, 0.5, above 1.2 and out.
    logp = jnp.array([[0.3, -0.1], [0.5, 9.0]])
    mask = jnp.array([[1, 1], [1, 0]])
    loss, omega = loss_and_coefficients(
        logp, 0 * logp, None, jnp.array([2.0, 1.0]), mask, jnp.array([4.0, 2.0]), ratio="sequence"
    )
    s = math.exp(0.1)
    assert float(loss) == pytest.approx(-2 * s * 2 / 4 - 1.2 / 2, rel=1e-6)
    np.testing.assert_allclose(omega, [[-s / 2, -s / 2], [0, 0]], rtol=1e-6)
    tokenwise = loss_and_coefficients(logp, 0 * logp, None, jnp.array([2.0, 1.0]), mask, 4)[1]
    assert float(tokenwise[0, 0]) == 0  # Witness: alone, exp(0.3) is above 1.2.


def test_cispo_and_dual_clip_by_hand():
    # Ratios 2, 1/2, 4; held at 1.25.
    logp = jnp.log(jnp.array([[2.0, 0.5, 4.0]]))
    args = (logp, 0 * logp, None)
    up, down, all_of = jnp.array([1.0]), jnp.array([-1.0]), jnp.ones((1, 3))
    for advantages, sign in ((up, -1), (down, 1)):
        loss, omega = loss_and_coefficients(
            *args, advantages, all_of, 1, clip=0.25, surrogate="cispo"
        )
        np.testing.assert_allclose(omega, sign * np.array([[1.25, 0.5, 1.25]]))
        want = sign * (1.25 * math.log(2) - 0.5 * math.log(2) + 1.25 * math.log(4))
        assert float(loss) == pytest.approx(want, rel=1e-6)
    loss, omega = loss_and_coefficients(*args, down, all_of, 1, clip=0.25, clip_dual=3.0)
    np.testing.assert_allclose(omega, [[2.0, 0.0, 0.0]])
    assert float(loss) == pytest.approx(2 + 0.75 + 3)
    found = ratio_metrics(*args, down, all_of, 0.25, clip_dual=3.0)
    assert (int(found.clip_low), int(found.clip_high), int(found.clip_dual)) == (1, 0, 1)
    means = (found + found).means()
    assert float(means["clip_ratio/dual_mean"]) == pytest.approx(1 / 3)
    assert float(means["clip_ratio/region_mean"]) == pytest.approx(2 / 3)
    held = ratio_metrics(*args, down, all_of, 0.25, surrogate="cispo")
    assert (int(held.clip_low), int(held.clip_high), held.clip_dual) == (0, 2, None)
    whole = ratio_metrics(*args, down, all_of, 0.25, ratio="sequence")
    assert float(whole.is_ratio_max) == pytest.approx(4 ** (1 / 3), rel=1e-6)


def test_reference_terms_by_hand():
    logp, ref = jnp.array([[-1.0]]), jnp.array([[-1.5]])
    for reference, loss, slope in (("k1", 0.5, 1), ("k2", 0.125, 0.5)):
        found = loss_and_coefficients(
            logp, logp, ref, jnp.zeros(1), jnp.ones((1, 1)), 1, beta=2.0, reference=reference
        )
        assert (float(found[0]), float(found[1][0, 0])) == (2 * loss, 2 * slope)


TABLE = [  # rows of 1 and 3 tokens, whose losses are 1 each and 3 each: sums 1 and 9
    ("token", {}, 10 / 4),
    ("sequence", {}, (1 + 3) / 2),
    ("constant", {"longest": 5}, 10 / 10),
    ("local", {"local_rows": 1}, (1 + 3) / 2),
    ("local", {"local_rows": 2}, 10 / 4),
]


@pytest.mark.parametrize(("mean", "options", "want"), TABLE)
def test_means_of_unequal_lengths(mean, options, want):
    mask = jnp.array([[1, 0, 0], [1, 1, 1]])
    logp, advantages = jnp.zeros((2, 3)), jnp.array([-1.0, -3.0])
    divisors = loss_divisors(jnp.array([1, 3]), mean, **options)
    loss, _ = loss_and_coefficients(logp, logp, None, advantages, mask, divisors)
    assert float(loss) == pytest.approx(want)
    rows = [
        loss_and_coefficients(
            logp[i : i + 1], logp[i : i + 1], None, advantages[i : i + 1], mask[i : i + 1], d
        )[0]
        for i, d in enumerate(divisors)
    ]
    assert float(sum(rows)) == pytest.approx(want)  # any split into microbatches


def test_rows_without_tokens_count_in_no_mean():
    lengths = jnp.array([2, 0, 4, 0])
    options = {"constant": {"longest": 4}, "local": {"local_rows": 2}}
    want = {"token": [6, 6], "sequence": [4, 8], "constant": [8, 8], "local": [4, 8]}
    for mean, (first, third) in want.items():
        found = loss_divisors(lengths, mean, **options.get(mean, {}))
        assert found.tolist() == [first, 0, third, 0]
        assert not loss_divisors(0 * lengths, mean, **options.get(mean, {})).any()
    nothing = loss_and_coefficients(
        *(jnp.full((1, 2), jnp.nan),) * 2, None, jnp.ones(1), jnp.zeros((1, 2)), jnp.zeros(1)
    )
    assert float(nothing[0]) == 0 and not nothing[1].any()


@hypothesis.given(st.integers(0, 10**6), st.sampled_from([*FORMS]), st.booleans())
def test_estimates_hold_and_bounds_are_bounds(seed, form, reference):
    options = {"clip": 0.2, "beta": 0.3, **FORMS[form]}
    *terms, mask = (x if x.dtype == bool else x.astype("f") for x in batch(seed, drift=0.18))
    logp, old, ref, advantages = terms
    ref = ref if reference else None
    divisors = loss_divisors(mask.sum(1), "sequence")
    _, omega = loss_and_coefficients(logp, old, ref, advantages, mask, divisors, **options)
    rows = np.asarray(exposure(omega, mask, per_row=True))
    # A margin of 0.2 holds every ratio here: exp(0.18) < 1.2, and a mean's exponent is no larger.
    options["margin"] = 0.2
    found = estimate_exposure(old, ref, advantages, mask, divisors, per_row=True, **options)
    assert (rows <= np.asarray(found.value)).all()
    del options["margin"]
    # Where a bound is claimed no policy exceeds it.
    far = (old + np.random.default_rng(seed).normal(0, 4, old.shape)).astype("f")
    _, omega = loss_and_coefficients(far, old, ref, advantages, mask, divisors, **options)
    rows = np.asarray(exposure(omega, mask, per_row=True))
    assert (rows <= np.asarray(found.value))[np.asarray(found.is_bound)].all()
    exact = ref is None or options.get("reference") == "k1"
    sure = exact & ((advantages >= 0) | (options.get("surrogate") == "cispo") | ~mask.any(1))
    np.testing.assert_array_equal(found.is_bound, sure)


def test_mismatch_weights_by_hand():
    old, rollout = np.log([[0.5, 0.8, 0.1, 0.3]]), np.log([[0.25, 0.1, 0.2, 1e-30]])
    mask = np.array([[1, 1, 1, 0]])
    options: Any = {"cap": 3.0}
    found = mismatch_weights(old, rollout, mask, **options)
    np.testing.assert_allclose(found, [[2, 3, 0.5, 1]], rtol=1e-6)
    found = mismatch_weights(old, rollout, mask, beyond="mask", **options)
    np.testing.assert_allclose(found, [[2, 0, 0.5, 1]], rtol=1e-6)
    found = mismatch_weights(old, rollout, mask, level="sequence", cap=9.0)
    np.testing.assert_allclose(found, [8], rtol=1e-6)
    assert mismatch_weights(old, rollout, mask, level="sequence", beyond="mask").tolist() == [0]
    # A weight times the advantage is the weight times the loss and its omega.
    logp = np.float32(old + 0.1)
    args = (logp, np.float32(old), None)
    loss, omega = loss_and_coefficients(*args, found * 1.5, mask, 3)
    plain_loss, plain_omega = loss_and_coefficients(*args, jnp.array([1.5]), mask, 3)
    np.testing.assert_allclose(loss, 8 * plain_loss, rtol=1e-6)
    np.testing.assert_allclose(omega, 8 * plain_omega, rtol=1e-6)


def test_refused():
    x, a = jnp.zeros((2, 3)), jnp.ones(2)
    args = (x, x, None, a, jnp.ones((2, 3)), 6)
    # The tests' type checks would refuse a wrong word before the functions do.
    with pytest.raises(ValueError, match=r"^ratio is 'row'; expected one of token, sequence\."):
        check_choice("ratio", "row", ("token", "sequence"))
    with pytest.raises(ValueError, match=r"clip_dual is 1\.0; expected a finite number > 1"):
        loss_and_coefficients(*args, clip_dual=1.0)
    with pytest.raises(ValueError, match=r"clip_dual is 3\.0 and surrogate is 'cispo'"):
        loss_and_coefficients(*args, clip_dual=3.0, surrogate="cispo")
    tokenwise: Any = (x, x, None, jnp.ones((2, 3)), jnp.ones((2, 3)), 6)
    for function, given in (
        (loss_and_coefficients, tokenwise),
        (estimate_exposure, tokenwise[1:]),
        (ratio_metrics, tokenwise[:-1]),
    ):
        function: Any
        with pytest.raises(ValueError, match=r"shape \(2, 3\) and ratio is 'sequence'; expected"):
            function(*given, ratio="sequence")
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"update_tokens is {bad} at row 1"):
            loss_and_coefficients(*args[:-1], jnp.array([1.0, bad]))
    lengths = np.array([2, 7])
    with pytest.raises(ValueError, match="longest is None and mean is 'constant'"):
        loss_divisors(lengths, "constant")
    with pytest.raises(ValueError, match="local_rows is 2 and mean is 'token'"):
        loss_divisors(lengths, local_rows=2)
    with pytest.raises(ValueError, match="row 1 has 7 optimized tokens, more than longest = 4"):
        loss_divisors(lengths, "constant", longest=4)
    with pytest.raises(ValueError, match="2 rows do not divide into means of 3"):
        loss_divisors(lengths, "local", local_rows=3)
    with pytest.raises(ValueError, match="longest is 0"):
        loss_divisors(lengths, "constant", longest=0)
    with pytest.raises(ValueError, match=r"cap is 0\.0"):
        mismatch_weights(x, x, jnp.ones((2, 3)), cap=0.0)
    with pytest.raises(ValueError, match="logp_rollout is nan at row 1, position 0"):
        mismatch_weights(x, x.at[1, 0].set(jnp.nan), jnp.ones((2, 3)))
