"""LoGRA for dense gradients: its equations, and the laws that optax has for its own optimizers."""

import contextlib
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from flax import nnx

from hilore_jax.logra import logra, projection, scale_by_logra
from hilore_jax.logra.optimizer import DENSE_SHARE
from hilore_jax.logra.projection import layer_key, update_key

RANK, RATE = 4, 1e-2


@contextlib.contextmanager
def annotations_off():
    """The errors that users meet, who run without checked annotations."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def random(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def tree(seed=0, dtype=jnp.float32, more=False):
    """One of everything: a matrix, a stack, what is too small, scalars, what is empty."""
    shapes = {
        "wide": (12, 9), "narrow": (20, RANK), "bias": (9,), "scale": (), "empty": (3, 0, 9),
    }  # fmt: skip
    if more:
        shapes |= {"tall": (7, 15), "stack": (3, 8, 6), "deep": (2, 2, 6, 5)}
    return {name: random(*shape, seed=seed, dtype=dtype) for name, shape in shapes.items()}


SKETCHED = ("wide",)
MORE = ("wide", "tall", "stack", "deep")


@functools.cache  # so that an optimizer is compiled once for one kind of tree
def plain_update(optimizer):
    return jax.jit(lambda g, s, p: optimizer.update(g, s, p))


PLAIN = logra(RATE, RANK)


def run(optimizer, updates=3):
    """Steps and parameters of some updates, with a new gradient each."""
    params = tree()
    state, update, steps = optimizer.init(params), plain_update(optimizer), []
    for number in range(updates):
        step, state = update(tree(seed=10 + number), state, params)
        steps.append(step)
        params = optax.apply_updates(params, step)
    return steps, params, state


def sizes(names, *trees):
    return [np.sqrt(sum(np.sum(np.square(np.float64(t[n]))) for n in names)) for t in trees]


class Reference:
    """Methods 2.1 and 2.2 in float64, for a dict of matrices named by path and number."""

    def __init__(self, weights, seed=0, kind="rademacher", axis=-2):
        self.weights = {n: np.float64(w) for n, w in weights.items()}
        self.v = dict.fromkeys(weights, 0.0)
        self.step, self.seed, self.kind, self.axis = 0, seed, kind, axis

    def update(self, gradients, b2=0.95, eps=1e-8):
        """Moves of the weights' size, all weights together."""
        moves = {}
        for name, gradient in gradients.items():
            g = np.asarray(gradient.T if self.axis == -2 else gradient, np.float64)
            key = update_key(layer_key(self.seed, name), self.step)
            a = np.asarray(draw(key, RANK, g.shape[1], self.kind), np.float64)
            s = g @ a.T
            self.v[name] = b2 * self.v[name] + (1 - b2) * np.mean(s**2, axis=1)
            h = np.sqrt(self.v[name] / (1 - b2 ** (self.step + 1)))
            scaled = s / (h + eps * h.mean())[:, None]
            d = scaled * np.linalg.norm(s) / np.linalg.norm(scaled)
            moves[name] = (d @ a).T if self.axis == -2 else d @ a
        self.step += 1
        weights, moved = (sum(np.sum(x**2) for x in t.values()) for t in (self.weights, moves))
        return {n: m * np.sqrt(weights / moved) for n, m in moves.items()}


draw = jax.jit(projection, static_argnums=(1, 2, 3))


def matrices(leaves):
    """Matrices of a tree's sketched leaves, by the names that their projections have."""
    return {
        f"{name}[{number}]": matrix
        for name in MORE
        if name in leaves
        for number, matrix in enumerate(
            np.asarray(leaves[name]).reshape(-1, *leaves[name].shape[-2:])
        )
    }


@pytest.mark.parametrize(
    "settings", [{}, {"kind": "gaussian", "seed": 5, "axis": -1}], ids=["default", "other"]
)
def test_the_equations(settings):
    """Over several updates: sketched leaves move by methods 2.2, others by the dense part."""
    optimizer = logra(RATE, RANK, weight_decay=0.3, dense=optax.sgd(0.5), **settings)
    params = tree(more=True)
    state, update = optimizer.init(params), plain_update(optimizer)
    reference = Reference(matrices(params), **settings)
    for number in range(3):
        gradients = tree(seed=10 + number, more=True)
        step, state = update(gradients, state, params)
        moves, got = reference.update(matrices(gradients)), matrices(step)
        for name, weight in matrices(params).items():
            expected = -RATE * (moves[name] + 0.3 * np.float64(weight))
            np.testing.assert_allclose(got[name], expected, rtol=1e-4, atol=1e-6)
        for name in tree().keys() - set(MORE):
            np.testing.assert_allclose(step[name], -0.5 * gradients[name], rtol=1e-6)
        params = optax.apply_updates(params, step)
        reference.weights = {n: np.float64(w) for n, w in matrices(params).items()}


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e20])
def test_the_learning_rate_is_the_steps_share_of_the_weights(scale):
    params = tree(more=True)
    optimizer = PLAIN
    gradients = jax.tree.map(lambda g: g * scale, tree(seed=1, more=True))
    step, _ = plain_update(optimizer)(gradients, optimizer.init(params), params)
    moved, weights = sizes(MORE, step, params)
    assert moved / weights == pytest.approx(RATE, rel=1e-5)
    assert np.sum(np.float64(step["wide"]) * np.float64(gradients["wide"])) < 0


def test_weights_of_zero_move_as_if_their_norm_was_one():
    params = jax.tree.map(jnp.zeros_like, tree())
    optimizer = PLAIN
    step, _ = plain_update(optimizer)(tree(seed=1), optimizer.init(params), params)
    assert sizes(SKETCHED, step)[0] == pytest.approx(RATE, rel=1e-5)


def test_the_step_has_the_rank_and_a_new_projection_each_time():
    steps, _, _ = run(PLAIN)
    rows = []
    for step in steps:
        assert np.linalg.matrix_rank(np.float64(step["wide"]), tol=1e-6) == RANK
        rows.append(step["wide"])
    both = np.concatenate(rows[:2], axis=1)  # [in, 2 out]
    assert np.linalg.matrix_rank(np.float64(both), tol=1e-6) == 2 * RANK
    other, _, _ = run(logra(RATE, RANK, seed=1), 1)
    assert not np.allclose(other[0]["wide"], steps[0]["wide"], atol=1e-4)
    again, _, _ = run(PLAIN, 1)
    np.testing.assert_array_equal(again[0]["wide"], steps[0]["wide"])


def test_the_state_is_a_row_of_moments_for_each_matrix():
    params = {name: tree(more=True)[name] for name in MORE}
    state: Any = scale_by_logra(RANK).init(params)
    assert {n: v.shape for n, v in state.v.items()} == {
        "wide": (9,), "tall": (15,), "stack": (3, 6), "deep": (2, 2, 5)
    }  # fmt: skip
    assert {v.dtype for v in state.v.values()} == {jnp.dtype("float32")}
    assert state.count.dtype == jnp.int32 and state.count.shape == ()
    other: Any = scale_by_logra(RANK, axis=-1).init(params)
    assert other.v["stack"].shape == (3, 8)
    whole = optax.tree.size(logra(RATE, RANK, dense=optax.set_to_zero()).init(tree()))
    assert whole == 1 + 9


def test_the_dense_part():
    params, gradients = tree(), tree(seed=1)
    rest = [n for n in params if n not in SKETCHED]
    chosen = [
        (logra(RATE, RANK, weight_decay=0.2), optax.adamw(RATE * DENSE_SHARE, weight_decay=0.2)),
        (logra(RATE, RANK, weight_decay=0.2, dense=optax.sgd(3.0)), optax.sgd(3.0)),
        (logra(RATE, RANK, dense=optax.set_to_zero()), optax.set_to_zero()),
    ]
    for optimizer, dense in chosen:
        step, _ = plain_update(optimizer)(gradients, optimizer.init(params), params)
        alone, _ = plain_update(dense)(gradients, dense.init(params), params)
        for name in rest:
            np.testing.assert_allclose(step[name], alone[name], rtol=1e-5, atol=1e-9)
        assert not np.allclose(step["wide"], alone["wide"], rtol=0.1, atol=0)


def test_which_weights_decay():
    params, zeros = tree(), jax.tree.map(jnp.zeros_like, tree())

    def decayed(mask):
        optimizer = logra(RATE, RANK, weight_decay=0.5, mask=mask)
        step, _ = plain_update(optimizer)(zeros, optimizer.init(params), params)
        for name in SKETCHED:
            expected = -RATE * 0.5 * params[name] * bool(jnp.any(step[name]))
            np.testing.assert_allclose(step[name], expected, rtol=1e-5)
        return {name for name in params if np.any(step[name])}

    assert decayed({name: name in ("wide", "bias") for name in params}) == {"wide", "bias"}
    assert decayed(lambda p: jax.tree.map(lambda x: x.ndim == 2, p)) == {"wide", "narrow"}


def test_targets():
    params = {"a": tree(), "embed": random(30, 8)}

    def sketched(targets):
        state = logra(RATE, RANK, targets=targets).init(params)
        (v,) = [x for path, x in optax.tree.get_all_with_path(state, "v") if isinstance(x, dict)]
        return {n for n, x in {**v["a"], "embed": v["embed"]}.items() if jax.tree.leaves(x)}

    assert sketched(None) == {*SKETCHED, "embed"}
    assert sketched((r"^a\.",)) == sketched(r"a\.") == set(SKETCHED)
    assert sketched([r"wide$", r"a\.(bias|narrow)"]) == {"wide"}
    with pytest.raises(ValueError, match=r"targets \['kernel'\] match none of .*'a\.wide'.*embed"):
        logra(RATE, RANK, targets=("wide", "kernel")).init(params)


def test_what_is_too_narrow_is_said_once(caplog):
    optimizer = logra(RATE, RANK, targets=("wide", "narrow"))
    with caplog.at_level(logging.INFO, logger="hilore_jax"):
        state = optimizer.init(tree())
        plain_update(optimizer)(tree(1), state, tree())
    (message,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert message == "logra: no side may be 4 or less: narrow (20, 4) are left dense"
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="hilore_jax"):
        logra(RATE, RANK, targets="wide").init(tree())
    assert not caplog.records


def test_a_gradient_of_zeros():
    params, zeros = tree(), jax.tree.map(jnp.zeros_like, tree())
    optimizer = PLAIN
    state = optimizer.init(params)
    for _ in range(2):
        step, state = plain_update(optimizer)(zeros, state, params)
        assert not any(np.any(x) for x in jax.tree.leaves(step))
    step, state = plain_update(optimizer)(tree(1), state, params)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((step, state)))
    assert sizes(SKETCHED, step)[0] > 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite(bad):
    params = {**tree(), "other": random(8, 8)}
    gradients = {**params, "wide": params["wide"].at[2, 3].set(bad)}
    optimizer = PLAIN
    step, state = plain_update(optimizer)(gradients, optimizer.init(params), params)
    assert not np.any(np.isfinite(step["wide"])) and not np.any(np.isfinite(step["other"]))
    assert not all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state))

    gradients, guarded = {**tree(1), "bias": jnp.full(9, bad)}, optax.apply_if_finite(PLAIN, 5)
    params = tree()
    step, state = plain_update(guarded)(gradients, guarded.init(params), params)
    assert not any(np.any(x) for x in jax.tree.leaves(step))
    step, state = plain_update(guarded)(tree(1), state, params)
    expected, _, _ = run_once(tree(1))
    np.testing.assert_allclose(step["wide"], expected["wide"], rtol=1e-6)


def run_once(gradients, optimizer=None, params=None):
    optimizer = optimizer or PLAIN
    params = tree() if params is None else params
    state = optimizer.init(params)
    step, state = plain_update(optimizer)(gradients, state, params)
    return step, state, params


# ------------------------------------------------------- laws of optax's own tests, over all leaves


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtypes_are_kept(dtype):
    """Of updates and state, so that the state goes through `lax.cond` and `lax.scan`."""
    params, optimizer = tree(dtype=dtype), logra(RATE, RANK, weight_decay=0.1)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, gradients, flag):
        updates, state = jax.lax.cond(
            flag,
            lambda: optimizer.update(gradients, state, params),
            lambda: (jax.tree.map(jnp.zeros_like, gradients), state),
        )
        return optax.apply_updates(params, updates), updates, state

    for flag in (False, True):
        moved, updates, state = step(params, state, tree(1, dtype), flag)
        assert {x.dtype for x in jax.tree.leaves((updates, moved))} == {jnp.dtype(dtype)}
        assert bool(np.any(updates["wide"])) == flag
    narrow, wide = (
        np.float64(run_once(tree(1, t), None, tree(0, t))[0]["wide"]) for t in (dtype, "float32")
    )
    assert np.linalg.norm(narrow - wide) < 0.02 * np.linalg.norm(wide)


def test_wide_parameters():
    with jax.enable_x64(True):
        params = {"w": jnp.asarray(np.ones((9, 8))), "b": jnp.asarray(np.ones(3))}
        step, state, _ = run_once(params, None, params)
        assert {x.dtype for x in jax.tree.leaves(step)} == {jnp.dtype("float64")}
        before = jax.tree.map(lambda x: x.dtype, logra(RATE, RANK).init(params))
        assert before == jax.tree.map(lambda x: x.dtype, state)


def test_gradients_wider_than_parameters():
    step, _, _ = run_once(tree(1), None, tree(0, "bfloat16"))
    assert {x.dtype for x in jax.tree.leaves(step)} == {jnp.dtype("float32")}


def test_one_compilation_and_extra_arguments():
    optimizer, traces = logra(lambda count: RATE / (1 + count), RANK), []

    @jax.jit
    def step(params, state, gradients):
        traces.append(1)
        updates, state = optimizer.update(gradients, state, params, surprise=1)
        return optax.apply_updates(params, updates), state

    params, state = tree(), jax.jit(optimizer.init)(tree())
    for number in range(3):
        params, state = step(params, state, tree(number))
    assert len(traces) == 1


def test_a_donated_state_is_reused():
    optimizer, params = PLAIN, tree()
    update = jax.jit(optimizer.update, donate_argnums=(0, 1))
    old = jax.jit(optimizer.init)(params)
    expected, kept = plain_update(optimizer)(tree(1), old, params)
    step, state = update(tree(1), old, params)
    assert all(x.is_deleted() for x in jax.tree.leaves(old) if x.size)
    jax.tree.map(np.testing.assert_array_equal, (step, state), (expected, kept))


def test_schedules():
    schedule: Any = optax.linear_schedule(1e-2, 1e-3, 2)
    steps, _, _ = run(logra(schedule, RANK), 3)
    params = tree()
    for number, step in enumerate(steps):
        ratio = np.divide(*sizes(SKETCHED, step, params))
        assert ratio == pytest.approx(float(schedule(number)), rel=1e-5)
        params = optax.apply_updates(params, step)
    assert pytest.approx(1 / 30) == DENSE_SHARE
    assert abs(float(steps[0]["scale"])) == pytest.approx(1e-2 / 30, rel=1e-3)
    number, _, _ = run(PLAIN, 1)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), steps[0], number[0])


def test_inject_hyperparams():
    static = ("rank", "seed", "axis")
    make = optax.inject_hyperparams(logra, static_args=static)
    injected, plain = make(RATE, RANK, weight_decay=0.1), logra(RATE, RANK, weight_decay=0.1)
    params, gradients = tree(), tree(1)
    state, update = jax.jit(injected.init)(params), jax.jit(injected.update)
    assert set(state.hyperparams) == {"learning_rate", "b2", "eps", "weight_decay"}
    step, state = update(gradients, state, params)
    expected, after = plain_update(plain)(gradients, plain.init(params), params)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8)  # noqa: E731
    jax.tree.map(close, (step, state.inner_state), (expected, after))
    state.hyperparams["learning_rate"] = jnp.float32(2 * RATE)
    state.hyperparams["weight_decay"] = jnp.float32(0)
    step, _ = update(gradients, state, params)
    assert np.divide(*sizes(SKETCHED, step, params)) == pytest.approx(2 * RATE, rel=1e-4)


def test_inject_hyperparams_says_what_is_static():
    with (
        annotations_off(),
        pytest.raises(TypeError, match=r'rank is .*static_args=\("rank", "seed", "axis"\)'),
    ):
        optax.inject_hyperparams(logra)(RATE, RANK).init(tree())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_multi_steps(dtype):
    """Two microbatches count as one update of their mean."""
    optimizer = optax.MultiSteps(logra(RATE, RANK), every_k_schedule=2)
    params, one, two = ({"wide": tree(n, dtype)["wide"]} for n in range(3))
    state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
    step, state = update(one, state, params)
    assert not any(np.any(x) for x in jax.tree.leaves(step))
    step, state = update(two, state, params)
    assert {x.dtype for x in jax.tree.leaves(step)} == {jnp.dtype(dtype)}
    mean = jax.tree.map(lambda x, y: ((x + y) / 2).astype(dtype), one, two)
    expected, _, _ = run_once(mean, None, params)
    error = np.float64(step["wide"]) - np.float64(expected["wide"])
    assert (
        np.linalg.norm(error)
        < (1e-5 if dtype == "float32" else 0.03) * sizes(["wide"], expected)[0]
    )


def test_masked_and_chained():
    params, gradients = ({**tree(n), "other": random(8, 8, seed=n)} for n in (0, 1))
    masked = optax.masked(PLAIN, {name: name != "other" for name in params})
    step, _, _ = run_once(gradients, masked, params)
    np.testing.assert_array_equal(step["other"], gradients["other"])
    assert np.divide(*sizes(SKETCHED, step, params)) == pytest.approx(RATE, rel=1e-5)
    gradients, params = tree(1), tree()
    chained = optax.chain(optax.clip_by_global_norm(1.0), logra(RATE, RANK), optax.scale(0.5))
    step, _, _ = run_once(gradients, chained)
    alone, _, _ = run_once(gradients)
    np.testing.assert_allclose(step["wide"], 0.5 * alone["wide"], rtol=1e-4, atol=1e-7)


def test_map_params():
    optimizer = logra(RATE, RANK, targets=("wide",))
    state = optimizer.init(tree())
    mapped = optax.tree.map_params(optimizer, lambda x: x + 1, state)
    assert jax.tree.structure(mapped) == jax.tree.structure(state)
    scaled = optax.tree.get(mapped, "v")
    assert scaled is not None and float(scaled["wide"][0]) == 1.0
    assert {int(x) for _, x in optax.tree.get_all_with_path(mapped, "count")} == {0}


def test_other_trees():
    """The same steps in a list, an nnx.State and a bare array, but for the names drawn by."""
    model = nnx.Linear(12, 9, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    gradients = jax.tree.map(lambda x: random(*x.shape, seed=1), params)
    step, _, _ = run_once(gradients, None, params)
    assert isinstance(step, nnx.State)
    norm = optax.tree.norm
    ratio = norm(step["kernel"]) / norm(params["kernel"])
    assert float(ratio) == pytest.approx(RATE, rel=1e-5)
    for made in ([random(12, 9), random(8, 8)], random(12, 9)):
        step, _, _ = run_once(jax.tree.map(lambda x: 2 * x, made), None, made)
        assert float(norm(step) / norm(made)) == pytest.approx(RATE, rel=1e-5)
    assert run_once({"a": None}, None, {"a": None})[0] == {"a": None}


def test_an_nnx_optimizer():
    model = nnx.Linear(12, 9, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, logra(RATE, RANK), wrt=nnx.Param)
    x, y = random(16, 12), random(16, 9)
    loss = lambda m: jnp.mean((m(x) - y) ** 2)  # noqa: E731

    @nnx.jit
    def step(model, optimizer):
        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer)) for _ in range(60)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("start", ["zeros", "random"])
def test_convergence(start):
    """Optax's mixed target, with a matrix that is really sketched."""
    target = {"w": random(5, 6), "b": random(3)}
    params = jax.tree.map(jnp.zeros_like, target)
    if start == "random":
        params = {"w": random(5, 6, seed=1), "b": random(3, seed=1)}
    schedule = optax.exponential_decay(0.05, 300, 0.5)
    optimizer = logra(schedule, 2, dense=optax.adam(0.05))

    def step(carry, _):
        params, state = carry
        gradients = jax.tree.map(lambda p, t: 2 * (p - t), params, target)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

    carry = (params, optimizer.init(params))
    (params, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, length=3000))(carry)
    jax.tree.map(
        lambda p, t: np.testing.assert_allclose(p, t, rtol=3e-2, atol=3e-2), params, target
    )


def test_sharded_parameters():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    shard = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    params, gradients = {"w": random(12, 10)}, {"w": random(12, 10, seed=1)}
    expected, _, _ = run_once(gradients, None, params)
    placed = jax.device_put((gradients, params), shard)
    step, _, _ = run_once(placed[0], None, placed[1])
    np.testing.assert_allclose(step["w"], expected["w"], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank is 0, expected at least 1"),
        ({"rank": -3}, "rank is -3"),
        ({"seed": -1}, r"seed is -1, expected 0 to 2\^64 - 1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"axis": 0}, r"axis is 0, expected -2 for \[in, out\] or -1"),
        ({"b2": 1.0}, "b2 is 1.0, expected at least 0 and below 1"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0, expected a number from 0"),
        ({"learning_rate": np.nan}, "learning_rate is nan"),
        ({"learning_rate": np.float32(-1)}, "learning_rate is -1.0, expected a number from 0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1, expected a number from 0, or a schedule"),
        ({"eps": -1e-8}, "eps is -1e-08, expected a number from 0"),
        ({"eps": np.float32(np.inf)}, "eps is inf, expected a number from 0"),
        ({"b2": np.float32(1.5)}, "b2 is 1.5, expected at least 0 and below 1"),
        ({"b2": True}, "b2 is True, expected at least 0 and below 1"),
        ({"learning_rate": np.ones(2)}, "learning_rate is .*, expected a number from 0, or a sch"),
        ({"rank": True}, "rank is True, expected an int"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        logra(**{"learning_rate": RATE, **settings})


def test_numbers_of_numpy_are_taken():
    params = {"w": random(6, 8)}
    plain: dict[str, Any] = {"learning_rate": RATE}
    one: dict[str, Any] = {
        "learning_rate": np.float32(RATE),
        "eps": np.array(1e-8),
        "weight_decay": np.float64(0),
    }
    found = [run_once(params, logra(rank=2, **how), params)[0] for how in (one, plain)]
    np.testing.assert_allclose(found[0]["w"], found[1]["w"], rtol=1e-6)
    assert np.any(found[0]["w"])


def test_weights_whose_steps_may_vanish_are_named(caplog):
    params = {"w": random(6, 8, dtype=jnp.bfloat16), "b": jnp.zeros(4, jnp.bfloat16)}
    logra(RATE, 2).init({**params, "w": params["w"].astype(jnp.float32)})
    assert not caplog.records
    logra(RATE, 2).init(params)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("logra: w bfloat16: steps below half a unit")


def test_bad_calls():
    optimizer, params = PLAIN, tree()
    with pytest.raises(
        ValueError, match=r"relative to the weights: call update\(gradients, state,"
    ):
        optimizer.update(params, optimizer.init(params))
    with pytest.raises(ValueError, match=r"found bias of shape \(9,\), expected at least 2 axes"):
        scale_by_logra(RANK).init(params)
