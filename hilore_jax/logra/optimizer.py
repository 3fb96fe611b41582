"""LoGRA as an optax optimizer, for gradients that exist: what is saved is the second moments.

The full method (`sketched_dense`, `step_control`) never forms the gradient. Here a dense gradient
is sketched on arrival, and the step that follows is LoGRA's, of a size relative to the weights'.
"""

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from hilore_jax.logra.projection import Kind
from hilore_jax.logra.scale_by_logra import check_number, leaf_name, scale_by_logra

_LOG = logging.getLogger("hilore_jax")

DENSE_SHARE = 1 / 30
"""Learning rate of the default dense part, as a share of the sketched part's.

AdamW moves an entry by about its learning rate; LoGRA moves a matrix by its learning rate times the
matrix's own size, whose entries are about 1/30 in a transformer. So both move entries alike."""


def logra(
    learning_rate: optax.ScalarOrSchedule | np.number | np.ndarray,
    rank: int = 256,
    *,
    seed: int = 0,
    kind: Kind = "rademacher",
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule | np.number | np.ndarray = 0.0,
    mask: Any = None,
    dense: optax.GradientTransformation | None = None,
    targets: str | Sequence[str] | None = None,
    axis: int = -2,
) -> optax.GradientTransformationExtraArgs:
    """LoGRA for matrices with a side of more than `rank` both ways, `dense` for all else.

        S = G A^T,  D = RowAdam(S),  W <- W - lr (D A sqrt(sum ||W||^2 / sum ||D A||^2) + decay W)

    (arXiv 2610.06647; methods 2.1 and 2.2.) The learning rate is the update ratio: the whole step's
    norm over the whole sketched weights' norm, whatever the gradient's size; 6e-5 in the paper.
    Weights that are all zero move as if their norm was 1. Axes before a leaf's last two are stacks
    of matrices, each with a projection of its own.

    A gradient of zeros moves nothing but by weight decay, and one that is not finite makes the
    update and the second moments not finite, as in optax's Adam: `optax.apply_if_finite` skips it.

    Args:
        learning_rate: a number, or an optax schedule from the update's number to one.
        rank: r, numbers that are left of a gradient's row. Static.
        seed: base seed of the projections, from 0 to 2^64 - 1. Static.
        kind: entries of the projections, "rademacher" or "gaussian".
        b2: decay of the second moment of an output row.
        eps: added to a row's root mean square, in units of the rows' mean.
        weight_decay: as in `optax.adamw`: times the learning rate. The default dense part's too.
        mask: as in `optax.adamw`: a tree of booleans, or a function that makes one of parameters;
            weights that decay.
        dense: what trains all other leaves. By default `optax.adamw` with 1/30 of the learning rate
            (`DENSE_SHARE`); `optax.set_to_zero()` freezes them.
        targets: regular expressions, found anywhere in a leaf's path (`blocks.0.q.kernel`): leaves
            that may be sketched. Embeddings are matrices too: leave them out here. Default: all.
        axis: the inputs' axis, over which gradients are sketched: -2 for kernels `[in, out]` as in
            flax, -1 for `[out, in]`.

    Returns:
        A transformation whose `update` needs the parameters. Updates have the gradients' dtypes.
        With `optax.inject_hyperparams`, pass `static_args=("rank", "seed", "axis")`.

    Raises:
        ValueError: rank, seed, kind, b2, eps, axis, the learning rate or the decay is out of its
            range; from `init`, one of the targets matches no leaf.
        TypeError: rank, seed or axis is not an int; another one is no number.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from hilore_jax.logra import logra
        >>> params = {"kernel": jnp.ones((6, 4)), "bias": jnp.zeros(4)}
        >>> optimizer = logra(1e-2, rank=2)
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update(params, state, params)
        >>> print(round(float(optax.tree.norm(updates["kernel"]) / optax.tree.norm(params)), 6))
        0.01
    """
    check_number("learning_rate", learning_rate, "a number from 0, or a schedule")
    check_number("weight_decay", weight_decay, "a number from 0, or a schedule")
    # Numbers of NumPy are taken as Python's, which optax's types ask for.
    learning_rate, weight_decay = _plain(learning_rate), _plain(weight_decay)
    if dense is None:
        dense = optax.adamw(_dense_rate(learning_rate), weight_decay=weight_decay, mask=mask)
    sketched = optax.chain(
        scale_by_logra(rank, seed=seed, kind=kind, b2=b2, eps=eps, axis=axis),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    patterns = (targets,) if isinstance(targets, str) else targets
    parts = optax.partition({"sketched": sketched, "dense": dense}, _labels(rank, patterns))

    def init(params: optax.Params) -> optax.OptState:
        _say_what_is_narrow(params, rank, patterns)
        _say_what_is_coarse(params, rank, patterns)
        return parts.init(params)

    return optax.GradientTransformationExtraArgs(init, parts.update)


def _labels(rank: int, targets: Sequence[str] | None) -> Callable[[Any], Any]:
    """A function from parameters or gradients to their "sketched" and "dense" leaves."""

    def label(path: tuple, leaf: Any) -> str:
        wide = _is_matrix(leaf) and rank < min(leaf.shape[-2:])
        return "sketched" if wide and _is_target(path, targets) else "dense"

    def labels(params: Any) -> Any:
        names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        unmatched = [p for p in targets or () if not any(re.search(p, name) for name in names)]
        # Without any leaf there is nothing to match: optax.tree.map_params asks with such a tree.
        if unmatched and names:
            raise ValueError(
                f"logra's targets {unmatched} match none of the leaves {names}; expected regular "
                "expressions, each found in a leaf's path"
            )
        return jax.tree_util.tree_map_with_path(label, params)

    return labels


def _say_what_is_narrow(params: Any, rank: int, targets: Sequence[str] | None) -> None:
    narrow = [
        f"{leaf_name(path)} {tuple(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if _is_matrix(leaf) and _is_target(path, targets) and rank >= min(leaf.shape[-2:])
    ]
    if narrow:
        _LOG.warning("logra: no side may be %d or less: %s are left dense", rank, ", ".join(narrow))


def _say_what_is_coarse(params: Any, rank: int, targets: Sequence[str] | None) -> None:
    """Warns of sketched weights into which `optax.apply_updates` rounds small steps away."""
    labels = jax.tree.leaves(_labels(rank, targets)(params))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    coarse = [
        f"{leaf_name(path)} {leaf.dtype}"
        for label, (path, leaf) in zip(labels, leaves, strict=True)
        if label == "sketched" and jnp.finfo(leaf.dtype).bits < 32
    ]
    if coarse:
        _LOG.warning(
            "logra: %s: steps below half a unit in the last place of a weight vanish where they "
            "are added, at the usual learning rates nearly all of them; keep weights that train in "
            "float32, or merge with hilore_jax.logra.merge_factor, which rounds at random",
            ", ".join(coarse),
        )


def _is_target(path: tuple, targets: Sequence[str] | None) -> bool:
    return targets is None or any(re.search(pattern, leaf_name(path)) for pattern in targets)


def _is_matrix(leaf: Any) -> bool:
    return jnp.ndim(leaf) >= 2 and leaf.size > 0 and jnp.issubdtype(leaf.dtype, jnp.floating)


def _plain(value: optax.ScalarOrSchedule | np.number | np.ndarray) -> optax.ScalarOrSchedule:
    return float(value) if isinstance(value, np.number | np.ndarray) else value


def _dense_rate(learning_rate: optax.ScalarOrSchedule) -> Any:
    if callable(learning_rate):
        return lambda count: DENSE_SHARE * learning_rate(count)
    return DENSE_SHARE * learning_rate
