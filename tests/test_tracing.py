"""Reading jaxprs: names, dead code, matmuls and FLOPs, residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from blocks import inputs, mlp, params
from hilore_jax import tracing

pytestmark = pytest.mark.newest


def named(x, name):
    return checkpoint_name(jnp.sin(x), name)


def test_sites_are_found_at_every_depth_with_what_is_around_them():
    def f(x):
        x = named(x, "top")
        x = jax.jit(lambda y: named(y, "jit"))(x)
        x, _ = jax.lax.scan(
            lambda c, _: (jax.jit(named, static_argnums=1)(c, "scan"), None), x, None, 2
        )
        x = jax.lax.cond(x.sum() > 0, lambda y: named(y, "cond"), lambda y: y, x)
        x = jax.lax.fori_loop(0, x.astype(int).sum(), lambda _, y: named(y, "while"), x)
        return jax.checkpoint(lambda y: named(y, "checkpoint"))(x)

    found = {s.name: s.inside for s in tracing.sites(tracing.trace(f, jnp.ones(3)).jaxpr)}
    remat = found.pop("checkpoint")
    assert remat in ("checkpoint", "remat2")
    assert found == {"top": "", "jit": "", "scan": "scan", "cond": "cond", "while": "while"}


def test_heavy_and_choice():
    w = jnp.ones((4, 4))

    def first(f):
        return tracing.trace(f, w).jaxpr.eqns[0]

    assert tracing.is_heavy(first(lambda x: x @ w))
    assert tracing.is_heavy(first(jax.jit(lambda x: jnp.sin(x) @ w)))
    assert not tracing.is_heavy(first(jax.jit(lambda x: jnp.sin(x))))
    assert tracing.is_choice(first(lambda x: jax.lax.top_k(x, 2)))
    assert tracing.is_choice(first(jax.jit(lambda x: jnp.sort(x))))
    assert not tracing.is_choice(first(jnp.sin))
    assert tracing.is_choice(first(lambda x: x >= x))
    assert not tracing.is_choice(first(lambda x: x > 0))
    assert not tracing.is_choice(first(jax.nn.relu))
    assert tracing.is_choice(first(jnp.round))
    # A loop that carries its counter makes no integers of its floats.
    assert not tracing.is_choice(
        first(lambda x: jax.lax.fori_loop(0, 3, lambda i, v: jnp.sin(v), x))
    )


def test_evaluate_equals_the_function():
    p, x = params(), inputs()
    traced = tracing.trace(mlp, p, x)
    (out,) = tracing.evaluate(
        traced.jaxpr, traced.closed.consts, jax.tree.leaves((p, x)), tracing.bind
    )
    np.testing.assert_array_equal(out, mlp(p, x))


def test_saved_residuals_name_what_is_kept():
    p, x = params(), inputs()
    policy = jax.checkpoint_policies.save_only_these_names("gate")
    kept = tracing.saved_residuals(jax.checkpoint(mlp, policy=policy), p, x)
    (gate,) = [r for r in kept if "argument" not in r.origin]
    assert gate.shape == (3, 5, 12) and gate.nbytes == 3 * 5 * 12 * 4 and "'gate'" in gate.origin
    assert len(tracing.saved_residuals(mlp, p, x)) > len(kept)
