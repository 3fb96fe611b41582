"""Probes of a LoGRA step: how far it is predicted to move the policy on the batch's own rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from hilore_jax.logra.kl import WORDS, predicted_kl, realized_kl
from hilore_jax.models.sharding import is_cut
from hilore_jax.remat import disabled
from hilore_jax.training.batch import Batch
from hilore_jax.training.logra_state import Sketching, with_slots

RESPONSES = 2
TOKENS = 4096


class Probes(NamedTuple):
    """Rows on which a step is looked at; the KL counts at the optimized response tokens alone."""

    tokens: Int[Array, "rows seq"]
    attention_mask: Bool[Array, "rows seq"]
    completion_mask: Bool[Array, "rows completion"]


def probes_of(batch: Batch, responses: int = RESPONSES, tokens: int = TOKENS) -> Probes:
    """The batch's first rows that have response tokens.

    Args:
        batch: a complete update.
        responses: rows, as far as the batch has them.
        tokens: the most in all rows together, padding included; one row is always taken.

    Returns:
        The probes, in the batch's order.

    Raises:
        ValueError: no row has a response token (concrete batches alone can be looked at).

    Example:
        >>> tokens, mask = jnp.arange(6).reshape(1, 2, 3), jnp.ones((1, 2, 3), bool)
        >>> scored = jnp.array([[[False], [True]]])
        >>> batch = Batch(tokens, mask, scored, jnp.zeros((1, 2, 1)), None, jnp.zeros((1, 2)))
        >>> probes_of(batch, responses=1).tokens.tolist()
        [[3, 4, 5]]
    """
    flat = [x.reshape(-1, x.shape[-1]) for x in batch_fields(batch)]
    seq = flat[0].shape[1]
    count = max(1, min(responses, tokens // seq, flat[0].shape[0]))
    has = jnp.any(flat[2], axis=1)
    if not isinstance(has, Tracer) and not np.any(has):
        raise ValueError(
            "no row of the batch has an optimized response token, on which a step could be "
            "probed; check completion_mask"
        )
    # Stable: rows with tokens first, else in the batch's order.
    first = jnp.argsort(~has, stable=True)[:count]
    return Probes(*(x[first] for x in flat))


def batch_fields(batch: Batch) -> tuple[Array, Array, Array]:
    """Tokens and masks of a batch."""
    return batch.tokens, batch.attention_mask, batch.completion_mask


def probe_hidden(
    graphdef: nnx.GraphDef, params: nnx.State, frozen: nnx.State, probes: Probes
) -> tuple[Float[Array, "rows completion d_model"], Float[Array, "vocab d_model"]]:
    """Hidden states that score the probes' responses, and the head."""
    model: Any = nnx.merge(graphdef, params, frozen)
    width = probes.completion_mask.shape[1]
    with disabled():
        hidden = model.hidden(probes.tokens, probes.attention_mask)
    return hidden[:, -width - 1 : -1], model.unembedding()


def displacement(
    graphdef: nnx.GraphDef,
    view: Sketching,
    probes: Probes,
    proposal: Mapping[str, Float[Array, "n d_out rank"]],
) -> tuple[Array, Array, Array]:
    """The probes' hidden states and their derivative along a proposal, in forward mode.

    The matrices `D A` are never formed: `sketched_dense`'s tangent is `(x A^T) D^T`. Dense
    parameters stay where they are.

    Args:
        graphdef: of the sketched model.
        view: its state.
        probes: rows.
        proposal: D of each stack, by name.

    Returns:
        Hidden states `[rows, completion, d_model]`, their derivative, and the head.
    """

    def hidden(params: nnx.State) -> tuple[Array, Array]:
        return probe_hidden(graphdef, params, view.frozen, probes)

    with disabled():
        (states, head), (moved, _) = jax.jvp(
            hidden, (view.params,), (with_slots(view.params, proposal),)
        )
    return states, moved, head


def mean_predicted_kl(
    states: Array, moved: Array, head: Array, probes: Probes, temperature: float
) -> Float[Array, ""]:
    """q: the mean predicted KL over the probes' response tokens, nats (methods 2.3)."""
    return _mean(predicted_kl(states, moved, head, temperature, words=_words(head)), probes)


def mean_realized_kl(
    states: Array, after: Array, head: Array, probes: Probes, temperature: float
) -> Float[Array, ""]:
    """The mean KL between the policies before and after a step, same tokens, nats."""
    return _mean(realized_kl(states, after, head, temperature, words=_words(head)), probes)


def _words(head: Array) -> int:
    """Words whose logits exist at a time: a head whose words are cut over devices is not again."""
    return head.shape[0] if is_cut() else WORDS


def _mean(values: Array, probes: Probes) -> Array:
    mask = probes.completion_mask
    return jnp.sum(values, where=mask) / jnp.maximum(jnp.sum(mask), 1)
