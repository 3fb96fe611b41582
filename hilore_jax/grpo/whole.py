"""Token log-probabilities from whole logits, as most trainers compute them: the reference."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int


def whole_logprobs(
    hidden: Float[Array, "batch seq d_model"],
    unembedding: Float[Array, "vocab d_model"],
    targets: Int[Array, "batch seq"],
    temperature: ArrayLike = 1.0,
) -> Float[Array, "batch seq"]:
    """`log_softmax(h W^T / T)[y]` with the whole logits in float32.

    What `token_logprobs` is compared with, in numbers and in memory.

    Args:
        hidden: `[batch, seq, d_model]`.
        unembedding: `[vocab, d_model]`.
        targets: `[batch, seq]`.
        temperature: softmax temperature.

    Returns:
        `[batch, seq]`, nats, float32.

    Example:
        >>> print(whole_logprobs(jnp.ones((1, 1, 2)), jnp.zeros((4, 2)), jnp.zeros((1, 1), int)))
        [[-1.3862944]]
    """
    weight = unembedding.astype(hidden.dtype)
    logits = jnp.einsum("bsd,vd->bsv", hidden, weight, preferred_element_type=jnp.float32)
    scores = jax.nn.log_softmax(logits / temperature)
    return jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
