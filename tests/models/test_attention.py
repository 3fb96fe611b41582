"""Attention against float64 softmax attention, its residuals, its masks and forward mode."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from hilore_jax.models.attention import attention, choose
from hilore_jax.remat import disabled


def inputs(seed, batch, seq, n_heads, n_kv_heads, head_dim=6, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 4)
    widths = (n_heads * head_dim, n_kv_heads * head_dim, n_kv_heads * head_dim, n_heads * head_dim)
    draws = zip(keys, widths, strict=True)
    return [jax.random.normal(key, (batch, seq, width)).astype(dtype) for key, width in draws]


def plain(q, k, v, mask, n_heads, n_kv_heads):
    """Softmax attention with repeated keys and values, as a textbook writes it."""
    batch, seq, width = q.shape
    split = lambda x, n: x.reshape(batch, seq, n, -1)  # noqa: E731
    q = split(q, n_heads)
    k, v = (jnp.repeat(split(x, n_kv_heads), n_heads // n_kv_heads, axis=2) for x in (k, v))
    s = jnp.einsum("bqhd,bthd->bhqt", q, k) / np.sqrt(q.shape[-1])
    allowed = jnp.tril(jnp.ones((seq, seq), bool))[None, None] & mask[:, None, None, :]
    allowed |= jnp.eye(seq, dtype=bool)  # padded queries read themselves, not nothing
    p = jax.nn.softmax(jnp.where(allowed, s, -jnp.inf), axis=-1)
    return jnp.einsum("bhqt,bthd->bqhd", p, v).reshape(batch, seq, width)


def dots(fun, *args):
    """Matrix products in the compiled-to-be program, inner jaxprs included."""
    return str(jax.make_jaxpr(fun)(*args)).count("dot_general")


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "chunk"),
    [(4, 4, None), (3, 1, 2), (6, 2, None), (6, 2, 3), (6, 2, 50)],
)
def test_value_and_gradient_equal_autodiff_of_plain_softmax(n_heads, n_kv_heads, chunk):
    q, k, v, d = inputs(0, 3, 7, n_heads, n_kv_heads)
    mask = jnp.array([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1, 0]], bool)
    real = mask[:, :, None]  # a padded query's value is nobody's business

    def ours(q, k, v):
        heads: dict[str, Any] = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "query_chunk": chunk}
        return jnp.sum(jnp.where(real, attention(q, k, v, mask, **heads), 0) * d)

    def reference(q, k, v):
        return jnp.sum(jnp.where(real, plain(q, k, v, mask, n_heads, n_kv_heads), 0) * d)

    value, grads = jax.jit(jax.value_and_grad(ours, (0, 1, 2)))(q, k, v)
    with jax.enable_x64(True):
        args = [jnp.asarray(np.asarray(x), jnp.float64) for x in (q, k, v)]
        d = jnp.asarray(np.asarray(d), jnp.float64)
        want, want_grads = jax.jit(jax.value_and_grad(reference, (0, 1, 2)))(*args)
    np.testing.assert_allclose(value, want, rtol=2e-5)
    for got, expected in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(got, expected, atol=5e-6, rtol=2e-5)


def test_no_mask_equals_a_full_mask_and_builds_no_mask():
    q, k, v, _ = inputs(1, 2, 5, 4, 2)
    heads: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2}
    full = attention(q, k, v, jnp.ones((2, 5), bool), **heads)
    np.testing.assert_array_equal(attention(q, k, v, **heads), full)
    program = str(jax.make_jaxpr(lambda *x: attention(*x, **heads))(q, k, v))
    assert "bool[1,5,5]" in program
    assert "bool[2,5,5]" not in program


def test_rows_without_any_key_are_zero_with_zero_finite_gradients():
    q, k, v, d = inputs(2, 2, 4, 4, 2)
    q, k = 1e4 * q, 1e4 * k  # extreme scores as well
    mask = jnp.array([[0, 0, 0, 0], [0, 0, 1, 1]], bool)

    def loss(q, k, v):
        return jnp.sum(attention(q, k, v, mask, n_heads=4, n_kv_heads=2) * d)

    out = attention(q, k, v, mask, n_heads=4, n_kv_heads=2)
    assert np.all(out[0] == 0) and np.all(out[1, :2] == 0) and np.all(np.isfinite(out))
    assert np.any(out[1, 2:] != 0)
    for grad in jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v):
        assert np.all(np.isfinite(grad))
        assert np.all(grad[0] == 0) and np.all(grad[1, :2] == 0)


@pytest.mark.parametrize("chunk", [None, 2])
def test_causal_by_exactly_zero_gradients(chunk):
    q, k, v, _ = inputs(3, 1, 6, 4, 2)

    def at(k, v, t):
        out = attention(q, k, v, n_heads=4, n_kv_heads=2, query_chunk=chunk)
        return jnp.sum(out[0, t] ** 2)

    grads_at = jax.jit(jax.grad(at, (0, 1)))
    for t in (0, 3, 5):
        for grad in grads_at(k, v, t):
            touched = np.any(np.asarray(grad[0]) != 0, axis=-1)
            assert not np.any(touched[t + 1 :])
        assert np.all(touched[: t + 1])  # every past value is read


def test_backward_runs_five_products_and_the_forward_only_when_its_residuals_are_dropped():
    q, k, v, d = inputs(4, 1, 8, 4, 2)

    def block(q, k, v):
        # Products that read the inputs show whether q, k and v are kept: they are inputs here.
        out = attention(q, k, v, n_heads=4, n_kv_heads=2)
        return jnp.sum(checkpoint_name(out * d, "mlp_act"))

    forward = 2
    keep = jax.checkpoint_policies.save_only_these_names
    counts = {
        "none": dots(jax.grad(block, (0, 1, 2)), q, k, v),
        "both": dots(
            jax.grad(jax.checkpoint(block, policy=keep("attn_out", "attn_lse")), (0, 1, 2)), q, k, v
        ),
        "out": dots(jax.grad(jax.checkpoint(block, policy=keep("attn_out")), (0, 1, 2)), q, k, v),
        "nothing": dots(jax.grad(jax.checkpoint(block), (0, 1, 2)), q, k, v),
    }
    assert counts["none"] == forward + 5
    assert counts["both"] == forward + 5
    # lse alone costs the score product again, both cost the whole forward again.
    assert counts["out"] == forward + 5 + 1
    assert counts["nothing"] == forward + 5 + 2


def test_bfloat16_products_with_float32_softmax():
    q, k, v, d = inputs(5, 2, 5, 4, 2, dtype=jnp.bfloat16)
    heads: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2}

    def loss(q, k, v):
        return jnp.sum(attention(q, k, v, **heads).astype(jnp.float32) * d)

    program = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, v))
    products = [line for line in program.splitlines() if "= dot_general" in line]
    assert len(products) == 7
    assert all(":f32[" in line for line in products)
    exps = [line for line in program.splitlines() if "= exp " in line]
    assert len(exps) == 2 and all(":f32[" in line for line in exps)
    out, grads = attention(q, k, v, **heads), jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    assert out.dtype == jnp.bfloat16 and {g.dtype for g in grads} == {jnp.dtype(jnp.bfloat16)}
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    exact = plain(q, k, v, jnp.ones((2, 5), bool), 4, 2)
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=0.03)


def test_keys_are_not_repeated_for_their_group():
    q, k, v, _ = inputs(6, 1, 5, 6, 2)
    run = jax.grad(lambda q, k, v: jnp.sum(attention(q, k, v, n_heads=6, n_kv_heads=2)), (0, 1, 2))
    program = str(jax.make_jaxpr(run)(q, k, v))
    assert "broadcast_in_dim" not in "".join(
        line for line in program.splitlines() if "[1,5,2,3,6]" in line and "dot" not in line
    )
    assert "repeat" not in program and "gather" not in program


def test_forward_mode_works_while_disabled_and_only_then():
    q, k, v, d = inputs(7, 2, 5, 4, 2)
    mask = jnp.array([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], bool)

    @jax.jit
    def run(q):
        return attention(q, k, v, mask, n_heads=4, n_kv_heads=2)

    with disabled():
        value, tangent = jax.jit(lambda q, d: jax.jvp(run, (q,), (d,)))(q, d)
    step = 1e-2
    finite = (run(q + step * d) - run(q - step * d)) / (2 * step)
    np.testing.assert_allclose(tangent, finite, atol=2e-3)
    np.testing.assert_allclose(value, run(q), atol=1e-6)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(run, (q,), (d,))


def test_vmap_and_jit_agree_with_a_loop():
    q, k, v, _ = inputs(8, 3, 4, 2, 1)
    heads: dict[str, Any] = {"n_heads": 2, "n_kv_heads": 1}
    one = lambda q, k, v: attention(q[None], k[None], v[None], **heads)[0]  # noqa: E731
    mapped = jax.jit(jax.vmap(one))(q, k, v)
    np.testing.assert_allclose(mapped, attention(q, k, v, **heads), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"n_heads": 3}, "multiple of n_kv_heads"),
        ({"n_kv_heads": 4}, "expected widths"),
        ({"implementation": "flash"}, "'flash', expected 'auto', 'xla' or 'cudnn'"),
        ({"implementation": "cudnn"}, "takes bfloat16 or float16, found float32"),
        ({"query_chunk": 0}, "query_chunk is 0"),
    ],
)
def test_bad_arguments_are_named(change, match):
    q, k, v, _ = inputs(9, 1, 3, 4, 2)
    with pytest.raises(ValueError, match=match):
        attention(q, k, v, **{"n_heads": 4, "n_kv_heads": 2, **change})


def test_auto_logs_once_why_a_gpu_falls_back(monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert choose("auto", jnp.dtype("bfloat16"), 64) == "cudnn"
    with caplog.at_level("WARNING", "hilore_jax"):
        assert [choose("auto", jnp.dtype("bfloat16"), 132) for _ in range(2)] == ["xla", "xla"]
    assert [r.message for r in caplog.records].count(
        "attention runs on XLA: cuDNN attention takes a head_dim up to 128, a multiple of 8, "
        "found 132"
    ) == 1


@pytest.mark.gpu_target
@pytest.mark.parametrize("masked", [False, True])
def test_cudnn_runs_its_forward_once_when_its_output_and_lse_are_kept(h200, masked):
    def kernels(*names):
        def loss(q, k, v, mask):
            def block(q, k, v):
                heads = {"n_heads": 4, "n_kv_heads": 2, "implementation": "cudnn"}
                return jnp.sin(attention(q, k, v, mask, **heads))

            keep = jax.checkpoint_policies.save_only_these_names(*names)
            return jnp.sum(jax.checkpoint(block, policy=keep)(q, k, v).astype(jnp.float32))

        def arg(width, dtype=jnp.bfloat16):
            return jax.ShapeDtypeStruct((2, 128, *width), dtype, sharding=h200)

        mask = arg((), jnp.bool_) if masked else None
        args = arg((256,)), arg((128,)), arg((128,)), mask
        compiled = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*args).compile()
        found = re.findall(r'custom_call_target="(__cudnn[^"]+)"', str(compiled.as_text()))
        return [sum(("ackward" in name) == back for name in found) for back in (False, True)]

    assert kernels("attn_out", "attn_lse") == [1, 1]
    assert kernels("attn_out") == [2, 1]  # the witness: without its log-sum-exp it runs again
    assert kernels() == [2, 1]
