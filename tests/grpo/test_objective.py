"""Loss and omega: literals, autodiff of an independent loss, microbatches, hostile input."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hilore_jax.grpo

# Any: the tests call with unpacked lists, whose lengths a type checker cannot know.
loss_and_coefficients: Any = hilore_jax.grpo.loss_and_coefficients
ratio_metrics: Any = hilore_jax.grpo.ratio_metrics

EDGE = math.exp(20.0)


def numpy_loss(*arrays: Any, clip=0.2, beta=1e-3) -> float:
    """The definition in float64 loops; no code shared with the library."""

    logp, old, ref, advantages, mask, tokens = arrays
    logp, old, advantages = (np.asarray(x, np.float64) for x in (logp, old, advantages))
    ref = None if ref is None else np.asarray(ref, np.float64)

    def e(x):
        return math.exp(x) if x <= 20 else EDGE * (1 + x - 20)

    total = 0.0
    for i, j in zip(*np.nonzero(mask), strict=True):
        a = advantages[i] if np.ndim(advantages) == 1 else advantages[i, j]
        rho = e(logp[i, j] - old[i, j])
        total -= min(rho * a, min(max(rho, 1 - clip), 1 + clip) * a)
        if ref is not None:
            total += beta * (e(ref[i, j] - logp[i, j]) - (ref[i, j] - logp[i, j]) - 1)
    return total / tokens


def plain_loss(logp, old, ref, advantages, mask, tokens, clip=0.2, beta=1e-3):
    """The textbook loss, differentiated by JAX itself."""
    rho = jnp.exp(logp - old)
    a = advantages[:, None]
    terms = -jnp.minimum(rho * a, jnp.clip(rho, 1 - clip, 1 + clip) * a)
    terms += beta * (jnp.exp(ref - logp) - (ref - logp) - 1)
    return jnp.sum(jnp.where(mask, terms, 0.0)) / tokens


def batch(seed, rows=4, seq=7) -> list[Any]:
    """Clipped, unclipped and masked tokens, none within 1e-3 of a clip boundary."""
    rng = np.random.default_rng(seed)
    old = rng.uniform(-5, -1, (rows, seq))
    ratio = rng.uniform(-0.6, 0.6, (rows, seq))
    for edge in (math.log(0.8), math.log(1.2)):
        ratio = np.where(abs(ratio - edge) < 1e-3, edge + 2e-3, ratio)
    ref = old + rng.normal(size=(rows, seq)) * 0.3
    advantages = rng.normal(size=rows)
    mask = rng.random((rows, seq)) < 0.7
    return [x.astype(np.float32) for x in (old + ratio, old, ref, advantages)] + [mask]


def loss_of(*args, **kw):
    return loss_and_coefficients(*args, **kw)[0]


def test_literals():
    # clip 0.25, beta 0.5, N 4. Row 0, A = 2: rho 1 (active), 1.5 (clipped), 0.5 (active).
    # Row 1, A = -1: rho 1.5 (active), 0.5 (clipped), masked NaN.
    logp = jnp.log(jnp.array([[1.0, 1.5, 0.5], [1.5, 0.5, 1.0]])).at[1, 2].set(jnp.nan)
    zeros = jnp.zeros((2, 3))
    mask = jnp.array([[1, 1, 1], [1, 1, 0]], bool)
    args = (logp, zeros, None, jnp.array([2.0, -1.0]), mask, 4)
    loss, omega = loss_and_coefficients(*args, clip=0.25)
    # -(2 + 2*1.25 + 2*0.5) + (1.5 + 0.75) = -3.25
    np.testing.assert_allclose(loss, -3.25 / 4, rtol=1e-6)
    np.testing.assert_allclose(omega, [[-0.5, 0, -0.25], [0.375, 0, 0]], rtol=1e-6)
    # Reference: logp_ref = 0 gives k3 = 1/p - 1 + log p and slope 1 - 1/p.
    _, with_ref = loss_and_coefficients(*args[:2], zeros, *args[3:], clip=0.25, beta=0.5)
    slope = 0.5 / 4 * (1 - 1 / np.array([[1, 1.5, 0.5], [1.5, 0.5, 1]])) * np.asarray(mask)
    np.testing.assert_allclose(with_ref - omega, slope, atol=1e-6)
    value = loss_of(*args[:2], zeros, *args[3:], clip=0.25, beta=0.5)
    k3 = sum(1 / p - 1 + math.log(p) for p in (1, 1.5, 0.5, 1.5, 0.5))
    np.testing.assert_allclose(value, (-3.25 + 0.5 * k3) / 4, rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_boundary_takes_the_active_side(jit):
    # clip 0: rho = exp(0) = 1 is exactly on both boundaries, for either sign of the advantage.
    zeros = jnp.zeros((3, 1))
    args = (zeros, None, jnp.array([1.0, -1.0, 0.0]), jnp.ones((3, 1), bool), 2)
    both = loss_and_coefficients(zeros, *args, clip=0.0)
    np.testing.assert_array_equal(both[1], [[-0.5], [0.5], [0]])
    grad = jax.grad(lambda x: loss_of(x, *args, clip=0.0))
    np.testing.assert_array_equal((jax.jit(grad) if jit else grad)(zeros), both[1])
    # Witness: automatic differentiation splits the tie.
    plain = jax.grad(lambda x: plain_loss(x, zeros, zeros, *args[2:], clip=0.0, beta=0.0))(zeros)
    assert not np.allclose(plain, both[1])


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("side", ["low", "high"])
def test_boundary_at_a_clip_that_rho_meets_exactly(sign, side):
    ratio = jnp.full((1, 1), 0.3125 if side == "high" else -0.3125)
    rho = jnp.exp(ratio)
    clip = rho - 1 if side == "high" else 1 - rho  # exact in float32 on either side of 1
    assert float(1 + clip[0, 0] if side == "high" else 1 - clip[0, 0]) == float(rho[0, 0])
    args = (jnp.zeros((1, 1)), None, jnp.array([sign]), jnp.ones((1, 1)), 1)
    _, omega = loss_and_coefficients(ratio, *args, clip=clip[0, 0])
    np.testing.assert_allclose(omega, -sign * rho, rtol=1e-6)
    beyond = ratio * 1.0001  # one step further is clipped, on the side where the sign clips
    _, omega = loss_and_coefficients(beyond, *args, clip=clip[0, 0])
    clipped = (side == "high") == (sign > 0)
    np.testing.assert_allclose(omega, 0 if clipped else -sign * jnp.exp(beyond), rtol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_omega_is_the_gradient(seed):
    logp, old, ref, advantages, mask = batch(seed)
    rest = (old, ref, advantages, mask, 40)
    loss, omega = loss_and_coefficients(logp, *rest, beta=0.3)
    rho = np.exp(logp - old)
    clipped = mask & np.where(advantages[:, None] >= 0, rho > 1.2, rho < 0.8)
    assert clipped.any() and (mask & ~clipped).any() and (~mask).any()
    # The loss is a sum whose terms, of up to 0.1, cancel: float32 rounds each of them.
    np.testing.assert_allclose(loss, numpy_loss(logp, *rest, beta=0.3), rtol=2e-6, atol=1e-7)
    value, own = jax.value_and_grad(lambda x: 3 * loss_of(x, *rest, beta=0.3))(logp)
    np.testing.assert_allclose(value, 3 * loss, rtol=1e-6)
    np.testing.assert_allclose(own, 3 * omega, rtol=1e-6)
    plain = jax.grad(lambda x: plain_loss(x, *rest, beta=0.3))(logp)
    np.testing.assert_allclose(omega, plain, atol=1e-6)
    # Central differences of the float64 definition.
    for i, j in [(0, 0), (1, 3), (3, 6)]:
        up, down = logp.astype(np.float64), logp.astype(np.float64)
        up[i, j] += 1e-6
        down[i, j] -= 1e-6
        slope = (numpy_loss(up, *rest, beta=0.3) - numpy_loss(down, *rest, beta=0.3)) / 2e-6
        np.testing.assert_allclose(omega[i, j], slope, atol=1e-6)


def test_forward_mode_and_other_arguments():
    logp, old, ref, advantages, mask = batch(9)
    _, omega = loss_and_coefficients(logp, old, ref, advantages, mask, 20)
    tangent = np.ones_like(logp)
    _, slope = jax.jvp(lambda x: loss_of(x, old, ref, advantages, mask, 20), (logp,), (tangent,))
    np.testing.assert_allclose(slope, omega.sum(), rtol=1e-5)
    grads = jax.grad(loss_of, argnums=(1, 2, 3))(logp, old, ref, advantages, mask, 20)
    assert all(not np.any(g) for g in grads)
    through = jax.grad(lambda x: loss_and_coefficients(x, old, ref, advantages, mask, 20)[1].sum())
    assert not np.any(through(logp))


def test_every_split_into_microbatches():
    logp, old, ref, advantages, mask = batch(3, rows=8)
    mask[5] = False  # an empty row, and counts that differ
    tokens = int(mask.sum())
    loss, omega = loss_and_coefficients(logp, old, ref, advantages, mask, tokens)
    value_and_grad = jax.jit(jax.value_and_grad(loss_of))
    measure = jax.jit(ratio_metrics)
    for cuts in ([4], [2, 4, 6], list(range(1, 8)), [1, 6]):
        losses, omegas, metrics = [], [], None
        for rows in np.split(np.arange(8), cuts):
            part = [x[rows] for x in (logp, old, ref, advantages, mask)]
            value, own = value_and_grad(*part, tokens)
            losses.append(float(value))
            omegas.append(np.asarray(own))
            more = measure(*part)
            metrics = more if metrics is None else metrics + more
        np.testing.assert_allclose(sum(losses), loss, rtol=1e-5)
        np.testing.assert_allclose(np.concatenate(omegas), omega, rtol=1e-6)
        whole = ratio_metrics(logp, old, ref, advantages, mask)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), metrics, whole)


def test_tokens_are_averaged_not_sequences():
    # Token counts (1, 3) and sums (1, 9): the token mean is 2.5, the mean of means 2.
    advantages = jnp.array([-1.0, -3.0])
    mask = jnp.array([[1, 0, 0], [1, 1, 1]])
    zeros = jnp.zeros((2, 3))
    assert float(loss_of(zeros, zeros, None, advantages, mask, 4)) == 2.5
    parts = [
        loss_of(zeros[i : i + 1], zeros[i : i + 1], None, advantages[i : i + 1], mask[i : i + 1], 4)
        for i in range(2)
    ]
    assert float(sum(parts)) == 2.5


@pytest.mark.parametrize("tokens", [0, jnp.int32(0), 5])
def test_nothing_to_optimize(tokens):
    bad = jnp.full((2, 3), jnp.nan)
    (loss, omega), grad = (
        loss_and_coefficients(bad, bad, bad, bad[:, 0], jnp.zeros((2, 3)), tokens),
        jax.grad(loss_of)(bad, bad, bad, bad[:, 0], jnp.zeros((2, 3)), tokens),
    )
    assert float(loss) == 0 and not np.any(omega) and not np.any(grad)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", range(4))
def test_masked_values_never_leak(value, which):
    arrays = batch(5)
    mask = arrays.pop()
    arrays[3] = np.repeat(arrays[3][:, None], mask.shape[1], 1)
    expected = jax.value_and_grad(loss_of)(*arrays, mask, 9)
    arrays[which] = np.where(mask, arrays[which], np.float32(value))
    found = jax.jit(jax.value_and_grad(loss_of))(*arrays, mask, 9)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


@pytest.mark.parametrize("which", range(4))
def test_active_non_finite_values(which):
    arrays = batch(5)
    mask = arrays.pop()
    mask[1, 2] = True
    arrays[3] = np.repeat(arrays[3][:, None], mask.shape[1], 1)
    arrays[which][1, 2] = np.nan
    name = ("logp", "logp_old", "logp_ref", "advantages")[which]
    with pytest.raises(ValueError, match=f"^{name} is nan at row 1, position 2"):
        loss_and_coefficients(*arrays, mask, 9)
    loss, omega = jax.jit(loss_and_coefficients)(*arrays, mask, 9)
    assert np.isnan(loss) and np.isnan(omega[1, 2]) and np.isnan(omega).sum() == 1


def test_minus_infinity_is_refused_and_a_row_of_advantages_may_be_masked():
    zeros, mask = jnp.zeros((2, 2)), jnp.array([[1, 1], [0, 0]])
    advantages = jnp.array([1.0, jnp.nan])
    assert float(loss_of(zeros, zeros, None, advantages, mask, 2)) == -1.0
    with pytest.raises(ValueError, match="logp is -inf at row 0, position 1"):
        loss_of(zeros.at[0, 1].set(-jnp.inf), zeros, None, advantages, mask, 2)


@pytest.mark.parametrize("ratio", [-1e5, -60.0, 19.9, 20.1, 60.0, 1e5])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_log_ratios(ratio, sign):
    logp, zeros = jnp.full((1, 1), ratio), jnp.zeros((1, 1))
    for ref in (zeros, zeros + 2 * ratio):
        args = (logp, zeros, ref, jnp.array([sign]), jnp.ones((1, 1)), 1)
        loss, omega = loss_and_coefficients(*args, beta=0.5)
        assert np.isfinite(loss) and np.isfinite(omega).all()
        exact = [np.asarray(x, np.float64) for x in args[:5]]
        np.testing.assert_allclose(loss, numpy_loss(*exact, 1, beta=0.5), rtol=1e-5)
        h = 1e-5 * max(1, abs(ratio))
        up, down = (numpy_loss(exact[0] + s, *exact[1:], 1, beta=0.5) for s in (h, -h))
        np.testing.assert_allclose(omega[0, 0], (up - down) / (2 * h), rtol=1e-3, atol=1e-6)


def test_small_divergences_keep_their_digits():
    gap = 2.0**-12
    zeros = jnp.zeros((1, 1))
    args = (zeros, zeros + gap, jnp.zeros(1), jnp.ones((1, 1)), 1)
    exact = math.expm1(gap) - gap
    np.testing.assert_allclose(loss_of(zeros, *args, beta=1.0), exact, rtol=1e-3)


def test_low_precision_inputs_and_one_trace():
    logp, old, ref, advantages, mask = batch(7)
    low = [jnp.asarray(x).astype(jnp.bfloat16) for x in (logp, old, ref, advantages)]
    loss, omega = loss_and_coefficients(*low, mask, 11)
    assert loss.dtype == omega.dtype == jnp.float32
    same = loss_and_coefficients(*(x.astype(jnp.float32) for x in low), mask, 11)
    np.testing.assert_array_equal(omega, same[1])
    assert jax.grad(loss_of)(*low, mask, 11).dtype == jnp.bfloat16
    traces = []

    @jax.jit
    def step(tokens, clip, beta):
        traces.append(1)
        return loss_of(logp, old, ref, advantages, mask, tokens, clip=clip, beta=beta)

    values = [float(step(n, c, b)) for n, c, b in ((11, 0.2, 0.0), (12, 0.3, 0.1))]
    assert len(traces) == 1
    plain = [(11, 0.2, 0.0), (12, 0.3, 0.1)]
    expected = [
        numpy_loss(logp, old, ref, advantages, mask, n, clip=c, beta=b) for n, c, b in plain
    ]
    np.testing.assert_allclose(values, expected, rtol=1e-5)


def test_clip_high():
    logp = jnp.log(jnp.array([[1.25, 0.7]]))
    zeros, ones = jnp.zeros((1, 2)), jnp.ones((1, 2))
    args = (logp, zeros, None, jnp.array([[1.0, -1.0]]), ones, 1)
    _, omega = loss_and_coefficients(*args, clip=0.2, clip_high=0.28)
    np.testing.assert_allclose(omega, [[-1.25, 0.0]], rtol=1e-6)
    np.testing.assert_array_equal(loss_and_coefficients(*args, clip=0.2)[1], zeros)


def test_refused_input():
    x, mask = jnp.zeros((2, 3)), jnp.ones((2, 3))
    good = {"logp": x, "logp_old": x, "logp_ref": x, "advantages": x[:, 0], "mask": mask}
    for name in ("logp_old", "logp_ref", "mask", "advantages"):
        with pytest.raises(ValueError, match=rf"{name} has shape \(3, 2\) but logp has shape \(2,"):
            loss_and_coefficients(**{**good, name: jnp.full((3, 2), jnp.nan)}, update_tokens=6)
    for name, value in (("clip", -0.1), ("beta", -1.0), ("clip_high", math.nan)):
        with pytest.raises(ValueError, match=f"^{name} is"):
            loss_and_coefficients(**good, update_tokens=6, **{name: value})
    with pytest.raises(ValueError, match="update_tokens is -1"):
        loss_and_coefficients(**good, update_tokens=-1)
    with pytest.raises(ValueError, match="update_tokens has shape"):
        loss_and_coefficients(**good, update_tokens=jnp.ones(3))
    with pytest.raises(ValueError, match=r"mask holds 0\.5"):
        loss_and_coefficients(**{**good, "mask": mask / 2}, update_tokens=6)
    with pytest.raises(ValueError, match=r"logp has shape \(3,\)"):
        loss_and_coefficients(x[0], x[0], None, x[0], mask[0], 1)


def test_under_vmap_and_scan():
    logp, old, ref, advantages, mask = batch(2)
    expected = loss_and_coefficients(logp, old, ref, advantages, mask, 9)
    stacked = [np.stack([x, x]) for x in (logp, old, ref, advantages, mask)]
    mapped = jax.vmap(lambda *a: loss_and_coefficients(*a, 9))(*stacked)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, rtol=1e-6), mapped, expected)

    def body(total, part):
        return total + ratio_metrics(*part), jax.grad(loss_of)(*part, 9)

    zero = jax.tree.map(jnp.zeros_like, ratio_metrics(logp, old, ref, advantages, mask))
    total, grads = jax.lax.scan(body, zero, tuple(map(jnp.asarray, stacked)))
    np.testing.assert_allclose(grads[0], expected[1], rtol=1e-6)
    assert int(total.tokens) == 2 * mask.sum()


def test_ratio_metrics_literals():
    logp = jnp.log(jnp.array([[1.5, 1.0, 0.5], [1.5, 0.5, 1.0]]))
    zeros, mask = jnp.zeros((2, 3)), jnp.array([[1, 1, 1], [1, 1, 0]])
    metrics = ratio_metrics(logp, zeros, zeros, jnp.array([1.0, -1.0]), mask, 0.2)
    found = metrics.means()
    k3 = sum(1 / p - 1 + math.log(p) for p in (1.5, 1, 0.5, 1.5, 0.5)) / 5
    expected = {
        "kl": k3,
        "clip_ratio/low_mean": 0.2,
        "clip_ratio/high_mean": 0.2,
        "clip_ratio/region_mean": 0.4,
        "is_ratio/mean": 1.0,
        "is_ratio/max": 1.5,
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)
    assert "kl" not in ratio_metrics(logp, zeros, None, jnp.ones(2), mask).means()
    empty = ratio_metrics(logp, zeros, zeros, jnp.ones(2), 0 * mask).means()
    assert all(float(value) == 0 for value in empty.values())
