"""token_logprobs against float64, with witnesses that logits are neither whole nor recomputed."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh, PartitionSpec

import hilore_jax as hl
from hilore_jax.grpo import token_logprobs

BATCH, SEQ, D_MODEL, VOCAB = 3, 7, 5, 23
CHUNKS = [None, 1, 2, 3, 7, 100]
TEMPERATURE = 0.7


def inputs(seed=0, vocab=VOCAB, dtype=np.float32):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(BATCH, SEQ, D_MODEL)).astype(np.float32)
    head = rng.normal(size=(vocab, D_MODEL)).astype(np.float32)
    targets = rng.integers(0, vocab, (BATCH, SEQ))
    return jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), jnp.asarray(targets)


def reference(hidden, head, targets, ct, ct_entropy: Any = 0.0, temperature=TEMPERATURE) -> tuple:
    """Values and gradients in float64 NumPy: (logp, entropy, dhidden, dhead)."""
    hidden, head = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    logits = hidden @ head.T / temperature
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(-1)
    hot = np.eye(head.shape[0])[np.asarray(targets)]
    dlogits = ct[..., None] * (hot - p)
    dlogits -= np.asarray(ct_entropy)[..., None] * p * (log_p + entropy[..., None])
    dlogits /= temperature
    dhead = np.einsum("bsv,bsd->vd", dlogits, hidden)
    return (log_p * hot).sum(-1), entropy, dlogits @ head, dhead


def cotangent(seed=1):
    return np.random.default_rng(seed).normal(size=(BATCH, SEQ)).astype(np.float32)


def objective(ct, ct_entropy=None, chunk=None):
    def loss(hidden, head, targets):
        if ct_entropy is None:
            return jnp.vdot(ct, token_logprobs(hidden, head, targets, TEMPERATURE, chunk=chunk))
        logp, entropy = token_logprobs(
            hidden, head, targets, TEMPERATURE, chunk=chunk, entropy=True
        )
        return jnp.vdot(ct, logp) + jnp.vdot(ct_entropy, entropy)

    return loss


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("vocab", [1, VOCAB, 24])
def test_value_and_every_gradient(chunk, vocab):
    arguments, ct = inputs(vocab=vocab), cotangent()
    logp, entropy, dhidden, dhead = reference(*arguments, ct)
    found = token_logprobs(*arguments, TEMPERATURE, chunk=chunk, entropy=True)
    np.testing.assert_allclose(found[0], logp, atol=3e-6)
    np.testing.assert_allclose(found[1], entropy, atol=3e-6)
    loss = objective(ct, chunk=chunk)
    for argnums, expected in (
        (0, dhidden),  # frozen head
        (1, dhead),  # hidden not differentiated
        ((0, 1), (dhidden, dhead)),
    ):
        value, grads = jax.jit(jax.value_and_grad(loss, argnums))(*arguments)
        np.testing.assert_allclose(value, (ct * logp).sum(), rtol=1e-5, atol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, expected)


@pytest.mark.parametrize("chunk", [None, 3])
def test_entropy_is_differentiable(chunk):
    arguments, ct, ct_entropy = inputs(), cotangent(), cotangent(2)
    _, _, dhidden, dhead = reference(*arguments, ct, ct_entropy)
    loss = objective(ct, ct_entropy, chunk)
    np.testing.assert_allclose(jax.grad(loss)(*arguments), dhidden, atol=1e-5)
    both = jax.jit(jax.grad(loss, (0, 1)))(*arguments)
    np.testing.assert_allclose(both[0], dhidden, atol=1e-5)
    np.testing.assert_allclose(both[1], dhead, atol=1e-5)


def walk(jaxpr: Jaxpr) -> Iterator[Any]:
    """Every equation, inner jaxprs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)
        ):
            if isinstance(value, ClosedJaxpr):
                yield from walk(value.jaxpr)
            elif isinstance(value, Jaxpr):
                yield from walk(value)


@pytest.mark.parametrize(
    ("argnums", "ct_entropy", "matmuls"),
    [
        (None, None, 1),  # not differentiated: logits only
        (0, None, 2),  # frozen: logits, (onehot - p) W; nothing again
        (1, None, 3),  # logits, logits again, dW
        ((0, 1), None, 4),  # logits, logits again, dW, dhidden
        (0, 1.0, 4),  # frozen, entropy differentiated: logits twice, derivative, dhidden
    ],
)
def test_matmuls_and_buffers(argnums, ct_entropy, matmuls):
    arguments, ct = inputs(vocab=64), cotangent()
    loss = objective(ct, None if ct_entropy is None else cotangent(2), chunk=2)
    function = loss if argnums is None else jax.value_and_grad(loss, argnums)
    equations = list(walk(jax.make_jaxpr(function)(*arguments).jaxpr))
    # The matmuls over the vocabulary (`vdot` of the loss is a dot_general too).
    dots = [e for e in equations if e.primitive.name == "dot_general"]
    dots = [e for e in dots if max(v.aval.ndim for v in e.invars) > 1]
    assert len(dots) == matmuls
    sizes = Counter(v.aval.size for e in equations for v in e.outvars)
    whole = BATCH * SEQ * 64
    assert max(sizes) < whole  # the logits are never whole
    assert max(sizes) >= BATCH * 64  # witness: chunks of them are there
    # Witness: the plain expression holds them whole.
    plain = jax.make_jaxpr(lambda h, w: jax.nn.log_softmax(jnp.einsum("bsd,vd->bsv", h, w)))
    assert max(v.aval.size for e in walk(plain(*arguments[:2]).jaxpr) for v in e.outvars) == whole


def test_frozen_head_keeps_the_derivative_only():
    arguments = inputs(dtype=jnp.bfloat16)
    _, pull = jax.vjp(lambda h: token_logprobs(h, *arguments[1:]), arguments[0])
    kept = [(x.shape, str(x.dtype)) for x in jax.tree.leaves(pull) if x.ndim > 1]
    assert kept == [((BATCH, SEQ, D_MODEL), "float32")]


def test_bfloat16_accumulates_in_float32():
    arguments, ct = inputs(dtype=jnp.bfloat16), cotangent()
    logp, _, dhidden, dhead = reference(*arguments, ct)
    found = token_logprobs(*arguments, TEMPERATURE)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, logp, atol=1e-5)
    frozen = jax.grad(objective(ct))(*arguments)
    both = jax.grad(objective(ct), (0, 1))(*arguments)
    assert frozen.dtype == both[0].dtype == both[1].dtype == jnp.bfloat16
    for a, b in ((frozen, dhidden), (both[0], dhidden), (both[1], dhead)):
        a = np.asarray(a, np.float64)
        assert np.linalg.norm(a - b) / np.linalg.norm(b) < 4e-3  # a bfloat16 digit is 2^-9
    mixed = token_logprobs(arguments[0], arguments[1].astype(jnp.float32), arguments[2])
    np.testing.assert_allclose(mixed, token_logprobs(*arguments), atol=1e-6)
    grad = jax.grad(objective(ct), 1)(arguments[0], arguments[1].astype(jnp.float32), arguments[2])
    assert grad.dtype == jnp.float32


def test_a_sure_token_keeps_its_small_derivative():
    # p of the target is 1 - 3e-5: W[y] - p W in bfloat16 would be all rounding.
    head = jnp.array([[1.0, 0.5], [-1.0, 0.25]], jnp.bfloat16)
    hidden = jnp.array([[[5.25, 0.0]]], jnp.bfloat16)
    targets, ct = jnp.zeros((1, 1), int), np.ones((1, 1), np.float32)
    _, _, expected, _ = reference(hidden, head, targets, ct, temperature=1.0)
    found = jax.grad(lambda h: token_logprobs(h, head, targets).sum())(hidden)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=1e-2)


def test_transformations_and_tied_head():
    (hidden, head, targets), ct = inputs(), cotangent()
    _, _, dhidden, dhead = reference(hidden, head, targets, ct)
    loss = objective(ct)
    mapped = jax.vmap(jax.grad(loss), in_axes=(0, None, None))(
        jnp.stack([hidden] * 2), head, targets
    )
    np.testing.assert_allclose(mapped[1], dhidden, atol=1e-5)
    again = jax.grad(jax.checkpoint(loss), (0, 1))(hidden, head, targets)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), again, (dhidden, dhead))

    def body(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(loss, (0, 1))(part, head, targets)), None

    zero = jax.tree.map(jnp.zeros_like, (hidden, head))
    total, _ = jax.lax.scan(body, zero, jnp.stack([hidden] * 2))
    np.testing.assert_allclose(total[1], 2 * dhead, atol=2e-5)

    def tied(table):
        return loss(jnp.take(table, targets, axis=0), table, targets)

    def tied_plain(table):
        logits = jnp.take(table, targets, axis=0) @ table.T / TEMPERATURE
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return jnp.vdot(ct, chosen)

    np.testing.assert_allclose(jax.grad(tied)(head), jax.grad(tied_plain)(head), atol=2e-5)


@pytest.mark.parametrize("argnums", [0, (0, 1)])
def test_forward_mode_inside_disabled(argnums):
    arguments, ct = inputs(), cotangent()
    loss = objective(ct, cotangent(2), 3)
    expected = jax.grad(loss, argnums)(*arguments)
    with hl.disabled():
        assert "custom_vjp" not in str(jax.make_jaxpr(loss)(*arguments))
        grads = jax.grad(loss, argnums)(*arguments)
        _, slope = jax.jvp(lambda h: loss(h, *arguments[1:]), arguments[:1], arguments[:1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, expected)
    dhidden = expected if argnums == 0 else expected[0]
    np.testing.assert_allclose(slope, jnp.vdot(dhidden, arguments[0]), rtol=1e-4)


def test_traced_temperature_without_gradient_or_retrace():
    arguments, ct = inputs(), cotangent()
    traces = []

    @jax.jit
    def value(temperature):
        traces.append(1)
        return jnp.vdot(ct, token_logprobs(*arguments, temperature))

    for temperature in (0.6, 1.3):
        logp = reference(*arguments, ct, temperature=temperature)[0]
        np.testing.assert_allclose(value(temperature), (ct * logp).sum(), rtol=1e-5)
    assert len(traces) == 1
    assert float(jax.grad(value)(0.6)) == 0.0


@pytest.mark.parametrize("argnums", [0, 1])
def test_masked_positions_do_not_leak(argnums):
    (hidden, head, targets), ct = inputs(), cotangent()
    ct[1, 3] = 0
    expected = reference(hidden, head, targets, ct)[2 + argnums]
    hidden, targets = hidden.at[1, 3].set(jnp.nan), targets.at[1, 3].set(-100)

    def loss(hidden, head, targets):
        logp = token_logprobs(hidden, head, targets, TEMPERATURE)
        return jnp.sum(jnp.where(ct == 0, 0.0, ct * logp))

    found = jax.jit(jax.grad(loss, argnums))(hidden, head, targets)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_illegal_targets(bad):
    hidden, head, targets = inputs()
    targets = targets.at[2, 1].set(bad)
    with pytest.raises(ValueError, match=rf"targets is {bad} at row 2, position 1.*\[0, 23\)"):
        token_logprobs(hidden, head, targets)
    logp = jax.jit(token_logprobs)(hidden, head, targets)
    assert np.argwhere(np.isnan(np.asarray(logp))).tolist() == [[2, 1]]


def test_refused_and_empty_input():
    hidden, head, targets = inputs()
    for temperature in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match="temperature is"):
            token_logprobs(hidden, head, targets, temperature)
    with pytest.raises(ValueError, match=r"unembedding has shape \(5, 23\).*transpose"):
        token_logprobs(hidden, head.T, targets)
    with pytest.raises(ValueError, match=r"targets has shape \(3, 6\) but hidden has shape"):
        token_logprobs(hidden, head, targets[:, 1:])
    with pytest.raises(ValueError, match=r"hidden has shape \(7, 5\)"):
        token_logprobs(hidden[0], head, targets[0])
    with pytest.raises(ValueError, match="chunk is 0"):
        token_logprobs(hidden, head, targets, chunk=0)
    with pytest.raises(ValueError, match="targets has dtype float32"):
        token_logprobs(hidden, head, targets.astype(jnp.float32))
    assert token_logprobs(hidden[:, :0], head, targets[:, :0]).shape == (BATCH, 0)
    assert token_logprobs(hidden[:0], head, targets[:0], entropy=True)[1].shape == (0, SEQ)


def test_a_sharded_batch_stays_where_it_is():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    (hidden, head, targets), ct = inputs(), cotangent()
    hidden, targets, ct = (
        jax.device_put(jnp.concatenate([x, x[:1]]), rows) for x in (hidden, targets, ct)
    )
    step = jax.jit(jax.grad(objective(ct, chunk=2)), out_shardings=rows)
    text = step.lower(hidden, head, targets).compile().as_text() or ""
    assert "dot" in text or "fusion" in text
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text
    expected = reference(hidden, head, targets, np.asarray(ct))[2]
    np.testing.assert_allclose(step(hidden, head, targets), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16"])
@pytest.mark.parametrize("vocab", [300, 70_000])
def test_narrow_targets_are_counted_in_wide_integers(dtype, vocab):
    keys = jax.random.split(jax.random.key(0), 2)
    hidden, head = jax.random.normal(keys[0], (1, 4, 3)), jax.random.normal(keys[1], (vocab, 3))
    targets = jnp.array([[1, 2, 3, 100]])

    def value_and_grad(targets):
        return jax.value_and_grad(lambda h: token_logprobs(h, head, targets).sum())(hidden)

    for got, want in zip(
        value_and_grad(targets.astype(dtype)), value_and_grad(targets), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.newest
def test_the_head_of_rows_on_two_devices_is_one():
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((4, 3, 8), (11, 8)))
    targets = jnp.asarray(rng.integers(0, 11, (4, 3)))

    def gradients(hidden, head, targets):
        loss = lambda h, w: jnp.sum(jnp.sin(token_logprobs(h, w, targets)))  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(hidden, head)

    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(
        gradients, mesh=mesh, in_specs=(rows, whole, rows), out_specs=(rows, whole)
    )
    want = gradients(hidden, head, targets)
    for found, expected in zip(mapped(hidden, head, targets), want, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
