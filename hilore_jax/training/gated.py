"""Gradients of an update whose blocks decode as far as its own coefficients allow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Num

from hilore_jax import tracing
from hilore_jax.actions import Compress
from hilore_jax.gate import gated_blocks
from hilore_jax.gate_rule import choose_flags, share_of_budget
from hilore_jax.grpo import exposure, loss_and_coefficients, token_logprobs
from hilore_jax.grpo.gradient_norm import first_ghat
from hilore_jax.grpo.terms import LossOptions
from hilore_jax.training.batch import Batch
from hilore_jax.training.gradients import (
    Metrics,
    Policies,
    divisors,
    loss_terms,
    observe,
    scored_inputs,
    sum_micro_gradients,
    update_metrics,
)
from hilore_jax.training.step import TrainState, make_apply


def make_gated_gradients(
    graphdef: nnx.GraphDef,
    *,
    coefficients: Num[Array | np.ndarray, "..."],
    seconds: Num[Array | np.ndarray, "..."],
    risk: Any = 0.015,
    paper: bool = False,
    norm: float | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    logprobs: Callable[..., Any] = token_logprobs,
    **loss: Unpack[LossOptions],
) -> Callable[..., tuple[nnx.State, Metrics]]:
    """`make_micro_gradients` with a gate: blocks decode or recompute by the microbatch's exposure.

    The coefficients omega = d loss / d logp are known after the forward pass, and with them the
    exposure `E = sum_t |omega_t|` and the risk `coefficient_u E` of decoding block u (arXiv
    2609.33570). `gate_rule.choose_flags` picks the blocks within the microbatch's share of R;
    then one pass goes back, from omega and the flags. One executable for all exposures.

    With a batch that is sharded under `jit` the flags are those of all rows. Under `jax.shard_map`
    each device decides for its own rows, by their exposure and their share of `update_tokens`,
    which must count every device's.

    Args:
        graphdef: the static part of a model with `embed`, `blocks` and `norm`, as `Decoder`.
        coefficients: `[blocks]`, risk per exposure: `kappa e / Ghat` of a calibration.
        seconds: `[blocks]`, saved where the block decodes instead of recomputing.
        risk: R, the relative gradient error of an update; 0 never decodes.
        paper: risks add linearly, as in the paper: those of a calibration of that form.
        norm: the Ghat in the coefficients, where they are to follow another.
        temperature: softmax temperature at which tokens are scored.
        entropy: as in `make_micro_gradients`, like those below.
        logprobs: as there.
        **loss: as there.

    Returns:
        `gradients(policies, params, frozen, micro, update_tokens, ghat=None) -> (grads, seen)`,
        which takes the place of `make_micro_gradients`; `seen["gate"]` holds the flags, exposure,
        and the risk used and allowed, for `gated_metrics`. With `ghat`, scalar, the norm that the
        update's gradient is expected to have, a coefficient is `coefficient_u norm / ghat`.

    Raises:
        ValueError: coefficients or seconds of other shapes; a negative or NaN R; at the call,
            another number of policies, or `ghat` without `norm`.

    Example:
        >>> import jax, hilore_jax as hl
        >>> from hilore_jax.models.config import DecoderConfig
        >>> from hilore_jax.models.decoder import Decoder
        >>> config = DecoderConfig(
        ...     vocab_size=8, d_model=4, d_ff=6, n_layers=2, n_heads=1, n_kv_heads=1, head_dim=4
        ... )
        >>> graphdef, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
        >>> gradients = make_gated_gradients(
        ...     graphdef, coefficients=np.full(2, 0.01), seconds=np.ones(2)
        ... )
        >>> ones = jnp.ones((1, 2))
        >>> micro = Batch(
        ...     jnp.ones((1, 4), int),
        ...     jnp.ones((1, 4), bool),
        ...     ones > 0,
        ...     -2 * ones,
        ...     None,
        ...     ones[0, :1],
        ... )
        >>> policies = (hl.Policy({"mlp_up": hl.Compress("int8")}),) * 2
        >>> _, seen = gradients(policies, params, nnx.State({}), micro, 2)
        >>> seen["gate"]["flags"].tolist()
        [1.0, 1.0]
    """
    _check(coefficients, seconds, risk)

    def gradients(policies: Policies, params, frozen, micro: Batch, update_tokens, ghat=None):
        blocks = len(policies or ())
        if blocks != np.shape(coefficients)[0]:
            raise ValueError(
                f"found {np.shape(coefficients)[0]} risk coefficients for {blocks} policies; a "
                "gate needs one policy, coefficient and saving for each block"
            )

        def forward(params, token):
            model = nnx.merge(graphdef, params, frozen)
            x, shared = model.embed(micro.tokens, micro.attention_mask)
            x, token = gated_blocks(*model.blocks(), x, policies, token, *shared)
            scored = scored_inputs(model.norm(x), model.unembedding(), micro)
            asked = {"entropy": True} if entropy else {}
            logp = logprobs(*scored, temperature, **asked)
            logp, nats = logp if isinstance(logp, tuple) else (logp, None)
            return (logp, token), nats

        token = tracing.varying_like(jnp.zeros(blocks, jnp.float32), micro)
        (logp, _), pull, nats = jax.vjp(forward, params, token, has_aux=True)
        mask = micro.completion_mask
        terms = loss_terms(logp, micro)
        value, omega = loss_and_coefficients(*terms, divisors(micro, update_tokens), **loss)
        total = exposure(omega, mask)
        tokens = jnp.sum(mask, dtype=jnp.float32)
        budget = share_of_budget(risk, tokens, update_tokens, paper=paper)
        # A block whose policy is exact has nothing to decode: it must not use up the budget.
        lossy = np.array([bool(policy.names(Compress)) for policy in policies or ()])
        saved = jnp.where(lossy, jnp.asarray(seconds), 0.0)
        relative = coefficients if ghat is None else coefficients_at(coefficients, norm, ghat)
        chosen = choose_flags(relative, saved, total, budget, paper=paper)
        grads, _ = pull((omega.astype(logp.dtype), chosen.flags))
        seen = observe(value, logp, omega, nats, micro, **loss)
        return grads, {**seen, "gate": {"exposure": total, **chosen._asdict()}}

    return gradients


def _check(coefficients: Any, seconds: Any, risk: Any) -> None:
    shapes = np.shape(coefficients), np.shape(seconds)
    if shapes[0] != shapes[1] or len(shapes[0]) != 1:
        raise ValueError(
            f"coefficients {list(shapes[0])} and seconds {list(shapes[1])}: expected one risk "
            "coefficient and one saving in seconds for each block"
        )
    if not isinstance(risk, Tracer) and not float(risk) >= 0:
        raise ValueError(f"risk is {risk}; expected R >= 0, where 0 means no compression at all")


def coefficients_at(
    coefficients: Num[Array | np.ndarray, "blocks"], norm: float | None, ghat: ArrayLike
) -> Float[Array, "blocks"]:
    """Risk coefficients `kappa e / Ghat` at another Ghat, float32; the same ones at the same.

    Args:
        coefficients: `[blocks]`, at `norm`.
        norm: the Ghat in them.
        ghat: scalar, another.

    Raises:
        ValueError: the Ghat in them is not known, or not finite or above 0.

    Example:
        >>> print(coefficients_at(np.array([0.25, np.inf]), 2.0, 1.0))
        [0.5 inf]
    """
    if norm is None:
        raise ValueError(
            "the gate's coefficients cannot follow the gradient's norm, as theirs is not known: "
            "give make_gated_gradients the calibration's norm, or no ghat."
        )
    return jnp.asarray(coefficients, jnp.float32) * (first_ghat(norm) / ghat)


def gated_metrics(grads: nnx.State, seen: dict[str, Any], *, paper: bool = False) -> Metrics:
    """`update_metrics`, and what the gate did.

    Args:
        grads: the update's gradients, summed over the microbatches.
        seen: what the gradients of `make_gated_gradients` return, stacked over microbatches.
        paper: as there.

    Returns:
        Also `gate/decoded` (blocks decoded, over all microbatches), `gate/decoded_fraction`,
        `gate/risk_used` and `gate/risk_budget` (of the update: roots of sums of squares, or sums in
        the paper's form), and by microbatch `gate/flags` `[micro, blocks]` and `gate/exposure`
        `[micro]`.
    """
    gate = seen["gate"]
    risks = {name: gate[name] for name in ("risk_used", "risk_budget")}
    whole = jnp.sum if paper else jnp.linalg.norm
    return {
        **update_metrics(grads, {name: value for name, value in seen.items() if name != "gate"}),
        "gate/decoded": jnp.sum(gate["flags"]),
        "gate/decoded_fraction": jnp.mean(gate["flags"]),
        **{f"gate/{name}": whole(value) for name, value in risks.items()},
        "gate/flags": gate["flags"],
        "gate/exposure": gate["exposure"],
    }


def sum_gated_gradients(
    graphdef: nnx.GraphDef, *, paper: bool = False, **options: Any
) -> Callable[[Policies, Any, Batch], tuple[nnx.State, Metrics]]:
    """`make_gradients` with a gate, whose risks are relative to the state's Ghat.

    Args:
        graphdef: the model's static part, from `init_state`.
        paper: as in `make_gated_gradients`.
        **options: the others there.
    """
    micro_gradients = make_gated_gradients(graphdef, paper=paper, **options)
    metrics = functools.partial(gated_metrics, paper=paper)

    def gradients(policies: Policies, state: Any, batch: Batch):
        of_state = functools.partial(micro_gradients, ghat=state.ghat)
        return sum_micro_gradients(of_state, metrics)(policies, state, batch)

    return gradients


def make_gated_update(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    max_grad_norm: float | None = 1.0,
    **options: Any,
) -> Callable[[Policies, TrainState, Batch], tuple[TrainState, Metrics]]:
    """`make_actor_update` with a gate.

    Args:
        graphdef: the model's static part, from `init_state`.
        optimizer: as in `make_actor_update`.
        max_grad_norm: as in `make_actor_update`.
        **options: those of `make_gated_gradients`.

    Returns:
        `update(policies, state, batch) -> (state, metrics)`, pure; the metrics are those of
        `gated_metrics`.
    """
    gradients = sum_gated_gradients(graphdef, **options)
    apply = make_apply(optimizer, max_grad_norm)

    def update(policies: Policies, state: TrainState, batch: Batch):
        grads, metrics = gradients(policies, state, batch)
        return apply(state, grads, metrics), metrics

    return update
