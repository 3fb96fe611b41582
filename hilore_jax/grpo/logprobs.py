"""Log-probabilities of given tokens from hidden states; the logits are never whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from hilore_jax import tracing
from hilore_jax.grpo.checks import at_least_float32, check_number, is_concrete
from hilore_jax.grpo.vocabulary import LogitInputs, Settings, forward, plain, recomputing_backward
from hilore_jax.remat import is_disabled

CHUNK_TOKENS = 128
"""Tokens whose logits exist at one time, where `chunk` does not say otherwise."""


@overload
def token_logprobs(
    hidden: Float[Array | np.ndarray, "..."],
    unembedding: Float[Array | np.ndarray, "..."],
    targets: Shaped[Array | np.ndarray, "..."],
    temperature: ArrayLike = 1.0,
    *,
    chunk: int | None = None,
    entropy: Literal[False] = False,
) -> Float[Array, "batch seq"]: ...
@overload
def token_logprobs(
    hidden: Float[Array | np.ndarray, "..."],
    unembedding: Float[Array | np.ndarray, "..."],
    targets: Shaped[Array | np.ndarray, "..."],
    temperature: ArrayLike = 1.0,
    *,
    chunk: int | None = None,
    entropy: Literal[True],
) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]: ...
def token_logprobs(
    hidden: Float[Array | np.ndarray, "..."],
    unembedding: Float[Array | np.ndarray, "..."],
    targets: Shaped[Array | np.ndarray, "..."],
    temperature: ArrayLike = 1.0,
    *,
    chunk: int | None = None,
    entropy: bool = False,
) -> Float[Array, "batch seq"] | tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]:
    r"""Log-probability of each target token, in chunks of positions.

        z_t    = W h_t / T,    logp_t = z_t[y_t] - log sum_v exp z_t[v]
        d logp_t / d h_t = (W[y_t] - p_t W) / T

    Frozen head (W not differentiated): the derivative depends on h_t alone, so the forward of a
    differentiated call keeps it, `[batch, seq, d_model]`, and backward multiplies it by the
    cotangent: no logits are recomputed. It is kept in float32 whatever `hidden` is, so that the
    gradient is rounded once, after the multiplication. Trained head: only `log sum exp` is kept,
    and backward recomputes logits in blocks of the vocabulary, whose rows of dW are then complete
    and written once. A call that is not differentiated computes neither.

    Matmuls run in the dtype of `hidden` and accumulate in float32. Only `seq` and `vocab` are
    cut, so a batch axis sharded over devices stays where it is.

    Args:
        hidden: `[batch, seq, d_model]`, after the final norm; position t scores `targets[:, t]`.
        unembedding: `[vocab, d_model]`; may be the embedding (tied head).
        targets: `[batch, seq]` integers in `[0, vocab)`, at masked positions too.
        temperature: Scalar > 0, no gradient.
        chunk: Positions of a sequence at a time; default such that `batch * chunk` is about 128
            tokens. In a trained head's backward the same share of the vocabulary.
        entropy: Also return the entropy of each distribution, nats. It is differentiable, at the
            price of recomputed logits; wrap it in `stop_gradient` where it is only reported.

    Returns:
        Log-probabilities `[batch, seq]`, nats, float32 (float64 if `hidden` is); with `entropy` a
        pair. Under `jit` an illegal target gives NaN there; its gradient is finite for a
        cotangent that is, so a masked one does no harm.

    Raises:
        ValueError: Shapes or dtypes that do not fit, or (concrete) a target outside the
            vocabulary or a temperature that is not positive.

    Example:
        >>> import jax.numpy as jnp, hilore_jax as hl
        >>> hidden = jnp.array([[[0.0, 0.0], [1.0, 0.0]]])
        >>> unembedding = jnp.array([[0.0, 1.0], [jnp.log(3.0), 0.0]])
        >>> print(jnp.exp(hl.grpo.token_logprobs(hidden, unembedding, jnp.array([[0, 1]]))))
        [[0.5  0.75]]
    """
    _check(hidden, unembedding, targets, temperature, chunk)
    hidden, unembedding, targets = map(jnp.asarray, (hidden, unembedding, targets))
    if targets.dtype.itemsize < 4:  # too narrow to count the vocabulary with
        targets = targets.astype(jnp.int32)
    dtype = at_least_float32(hidden)
    batch, seq, _ = hidden.shape
    if batch == 0 or seq == 0:
        empty = jnp.zeros((batch, seq), dtype)
        return (empty, empty) if entropy else empty
    size = chunk or max(1, CHUNK_TOKENS // batch)
    temperature = jax.lax.stop_gradient(jnp.asarray(temperature).astype(dtype))
    settings = Settings(min(size, seq), entropy)
    # Forward mode cannot pass a custom VJP; inside `hilore_jax.disabled()` nothing needs one.
    hidden = tracing.varying_like(hidden, (unembedding, targets))
    unembedding = tracing.varying_like(unembedding, hidden)
    arguments = (settings, hidden, unembedding, targets, temperature)
    if is_disabled():
        logp, entropies = plain(*arguments)
    else:
        logp, entropies = cast(tuple[Array, Array], _token_logprobs(*arguments))
    return (logp, entropies) if entropy else logp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Residuals:
    """What backward reads; None where it does not."""

    # Any: JAX also fills a pytree node with its own placeholders.
    derivative: Any  # [batch, seq, d_model] d logp / d hidden, frozen head
    inputs: Any  # LogitInputs
    wanted: tuple[bool, bool] = field(metadata={"static": True})  # dhidden, dW
    hidden_dtype: Any = field(metadata={"static": True})


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_logprobs(
    settings, hidden, unembedding, targets, temperature
) -> tuple[Array, Array | None]:
    logp, _, entropy, _ = forward(settings, False, hidden, unembedding, targets, temperature)
    return logp, entropy


def _fwd(settings, hidden, unembedding, targets, temperature):
    wanted = hidden.perturbed, unembedding.perturbed
    arrays = (hidden.value, unembedding.value, targets.value, temperature.value)
    logp, lse, entropy, derivative = forward(settings, wanted == (True, False), *arrays)
    # With a frozen head only the gradient of the entropy needs logits a second time.
    recompute = unembedding.perturbed or settings.entropy
    inputs = LogitInputs(*arrays, lse, entropy) if recompute else None
    return (logp, entropy), _Residuals(derivative, inputs, wanted, arrays[0].dtype)


def _bwd(settings, residuals, cotangents):
    dlogp, dentropy = (None if isinstance(ct, SymbolicZero) else ct for ct in cotangents)
    inputs = residuals.inputs
    dhidden = dhead = None
    if inputs is not None and (dentropy is not None or residuals.derivative is None):
        if dlogp is not None or dentropy is not None:
            dlogp = jnp.zeros_like(inputs.lse) if dlogp is None else dlogp
            dhidden, dhead = recomputing_backward(
                settings, residuals.wanted, inputs, dlogp, dentropy
            )
    elif residuals.derivative is not None and dlogp is not None:
        # Where the cotangent is 0 (a masked position) a non-finite derivative must not leak.
        ct = dlogp[..., None]
        dhidden = jnp.where(ct == 0, jnp.zeros_like(ct), ct * residuals.derivative)
        dhidden = dhidden.astype(residuals.hidden_dtype)
    return dhidden, dhead, None, None


_token_logprobs.defvjp(_fwd, _bwd, symbolic_zeros=True)


def _check(hidden, unembedding, targets, temperature, chunk) -> None:
    shapes = [tuple(np.shape(x)) for x in (hidden, unembedding, targets)]
    if len(shapes[0]) != 3:
        raise ValueError(f"hidden has shape {shapes[0]}; expected [batch, seq, d_model].")
    d_model = shapes[0][2]
    if len(shapes[1]) != 2 or shapes[1][1] != d_model or shapes[1][0] == 0:
        turned = len(shapes[1]) == 2 and shapes[1][0] == d_model
        raise ValueError(
            f"unembedding has shape {shapes[1]} but hidden has shape {shapes[0]}; expected "
            f"[vocab, {d_model}]." + (" Pass its transpose." if turned else "")
        )
    if shapes[2] != shapes[0][:2]:
        raise ValueError(
            f"targets has shape {shapes[2]} but hidden has shape {shapes[0]}; expected targets of "
            f"shape {shapes[0][:2]}, one token a position."
        )
    for name, array in (("hidden", hidden), ("unembedding", unembedding)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {array.dtype}; expected a floating dtype.")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets has dtype {targets.dtype}; expected integer token ids.")
    check_number("temperature", temperature, above=0.0)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; expected at least 1 position.")
    vocab = shapes[1][0]
    if not is_concrete(targets):
        return
    bad = (np.asarray(targets) < 0) | (np.asarray(targets) >= vocab)
    if bad.any():
        row, position = np.argwhere(bad)[0]
        raise ValueError(
            f"targets is {int(np.asarray(targets)[row, position])} at row {row}, position "
            f"{position} ({int(bad.sum())} such values); expected token ids in [0, {vocab}). Give "
            "masked positions any legal id: the mask, not the id, takes them out."
        )
