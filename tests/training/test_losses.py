"""Every loss in a model's update: against whole logits and autodiff, in every split."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from optax import identity

import hilore_jax as hl
from hilore_jax.grpo import loss_divisors
from hilore_jax.models.decoder import segment
from hilore_jax.training.batch import Batch, check_batch
from hilore_jax.training.gradients import make_gradients
from hilore_jax.training.step import TrainState, init_state

GC = (hl.Policy({}),) * 2
FORMS: dict[str, dict[str, Any]] = {
    "dapo, dual clip": {"clip_high": 0.28, "clip_dual": 1.05},
    "grpo, k2": {"mean": "sequence", "beta": 0.2, "reference": "k2"},
    "dr_grpo, k1": {"mean": "constant", "longest": 7, "beta": 0.2, "reference": "k1"},
    "bnpo": {"mean": "local", "local_rows": 2},
    "gspo": {"mean": "sequence", "ratio": "sequence", "clip": 0.1},
    "cispo, entropy": {"surrogate": "cispo", "entropy_coef": 0.3},
}


def divided(batch: Batch, form: dict[str, Any], order=(0, 1, 2, 3), micro: int = 2) -> Batch:
    """The batch with its divisors, rows in another order and other microbatches."""
    lengths = jnp.sum(batch.completion_mask, axis=-1).reshape(-1)
    how = {name: form[name] for name in ("longest", "local_rows") if name in form}
    found = loss_divisors(lengths, form.get("mean", "token"), **how)
    whole = dataclasses.replace(batch, divisors=found.reshape(batch.completion_mask.shape[:2]))
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[np.array(order)], whole)
    made = jax.tree.map(lambda x: x.reshape(micro, -1, *x.shape[1:]), flat)
    check_batch(made)
    return made


def uneven(batch: Batch) -> Batch:
    """Rows of 4, 1, 3 and 1 tokens."""
    mask = batch.completion_mask.at[1, 1, 1].set(False)
    return dataclasses.replace(batch, completion_mask=mask)


def plain_loss(params, graphdef, frozen, batch, form):
    """Whole logits, textbook formulas, all rows at once."""
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    logits = nnx.merge(graphdef, params, frozen).logits(flat.tokens, flat.attention_mask)
    mask, width = flat.completion_mask, flat.completion_mask.shape[-1]
    logs = jax.nn.log_softmax(logits[:, -width - 1 : -1])
    logp = jnp.take_along_axis(logs, flat.tokens[:, -width:, None], axis=-1)[..., 0]
    count = jnp.sum(mask, axis=1)
    gaps = logp - flat.logp_old
    if form.get("ratio") == "sequence":
        gaps = (jnp.sum(jnp.where(mask, gaps, 0), axis=1) / count)[:, None]
    rho, a = jnp.exp(gaps), flat.advantages[:, None]
    low, high = 1 - form.get("clip", 0.2), 1 + form.get("clip_high", form.get("clip", 0.2))
    terms = jnp.maximum(-rho * a, -jnp.clip(rho, low, high) * a)
    terms = jnp.where(a < 0, jnp.minimum(terms, -form.get("clip_dual", jnp.inf) * a), terms)
    if form.get("surrogate") == "cispo":
        terms = -jax.lax.stop_gradient(jnp.minimum(rho, high)) * a * logp
    gap = flat.logp_ref - logp
    distance = {"k1": -gap, "k2": gap**2 / 2, "k3": jnp.exp(gap) - gap - 1}
    terms = terms + form.get("beta", 0.0) * distance[form.get("reference", "k3")]
    entropy = -jnp.sum(jnp.exp(logs) * logs, axis=-1)
    terms = terms - form.get("entropy_coef", 0.0) * entropy
    sums = jnp.sum(jnp.where(mask, terms, 0), axis=1)
    mean = form.get("mean", "token")
    if mean == "sequence":
        return jnp.mean(sums / count)
    if mean == "constant":
        return jnp.mean(sums) / form["longest"]
    if mean == "local":
        pairs = jnp.sum(sums.reshape(-1, 2), axis=1) / jnp.sum(count.reshape(-1, 2), axis=1)
        return jnp.mean(pairs)
    return jnp.sum(sums) / jnp.sum(count)


@pytest.fixture(scope="module")
def state(tiny) -> tuple[Any, TrainState]:
    return init_state(segment(tiny(), GC), identity(), jax.random.key(0))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_gradients_are_those_of_the_formula_in_every_split(form, state, batch, quick):
    graphdef, state = state
    means = "mean", "longest", "local_rows"
    options = {"beta": 0.0} | {name: form[name] for name in form if name not in means}
    gradients = quick(make_gradients(graphdef, **options), static_argnums=0)
    made = uneven(batch())
    data = divided(made, form)
    want, slopes = jax.value_and_grad(plain_loss)(state.params, graphdef, state.frozen, data, form)
    plain = jax.grad(plain_loss)(state.params, graphdef, state.frozen, data, {})
    assert far(slopes, plain) > 1e-2  # Witness: it is not the plain loss.
    splits = [((0, 1, 2, 3), 2), ((0, 1, 2, 3), 1), ((3, 1, 0, 2), 2), ((2, 3, 1, 0), 4)]
    for order, micro in splits:
        found, metrics = gradients(GC, state, divided(made, form, order, micro))
        assert far(found, slopes) < 2e-5
        assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-4, abs=1e-6)
    assert ("entropy" in metrics) == ("entropy_coef" in form)
    assert ("clip_ratio/dual_mean" in metrics) == ("clip_dual" in form)


def far(found, expected) -> float:
    """Largest distance of a leaf, relative to its largest number."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(
        float(jnp.max(jnp.abs(one - other)) / jnp.maximum(jnp.max(jnp.abs(other)), 1e-6))
        for one, other in pairs
    )


def test_advantages_a_token_are_taken(state, batch, quick):
    graphdef, state = state
    gradients = quick(make_gradients(graphdef), static_argnums=0)
    made = batch()
    wide = jnp.broadcast_to(made.advantages[..., None], made.completion_mask.shape)
    found, _ = gradients(GC, state, dataclasses.replace(made, advantages=wide))
    want, _ = gradients(GC, state, made)
    assert far(found, want) < 1e-6
    with pytest.raises(ValueError, match=r"batch.divisors is \[4\], expected \[2, 2\]"):
        check_batch(dataclasses.replace(made, divisors=jnp.ones(4)))
