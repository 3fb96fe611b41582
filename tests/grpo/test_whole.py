"""Log-probs from whole logits: the reference that the chunked ones are measured against."""

import jax
import jax.numpy as jnp
import numpy as np

from hilore_jax.grpo import token_logprobs
from hilore_jax.grpo.whole import whole_logprobs


def test_it_is_a_log_softmax_and_equals_the_chunked_form():
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (2, 7, 5))
    head = jax.random.normal(keys[1], (11, 5))
    targets = jax.random.randint(keys[2], (2, 7), 0, 11)
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T / 0.7
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = np.take_along_axis(want, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(whole_logprobs(hidden, head, targets, 0.7), want, atol=1e-5)
    chunked = token_logprobs(hidden, head, targets, 0.7, chunk=3)
    np.testing.assert_allclose(whole_logprobs(hidden, head, targets, 0.7), chunked, atol=1e-5)


def test_it_holds_the_whole_logits_in_float32():
    half = jnp.ones((1, 3, 4), jnp.bfloat16)
    program = jax.make_jaxpr(whole_logprobs)(half, jnp.ones((9, 4)), jnp.zeros((1, 3), int))
    assert any(
        v.aval.shape == (1, 3, 9) and v.aval.dtype == jnp.float32
        for eqn in program.jaxpr.eqns
        for v in eqn.outvars
    )
