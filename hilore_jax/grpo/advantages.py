"""Group-relative advantages: each response against the others of its prompt."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Shaped

from hilore_jax.grpo.checks import at_least_float32, is_concrete
from hilore_jax.grpo.terms import check_choice

STD_EPSILON = 1e-6
Scale = Literal["group", "batch", "none"]


def group_advantages(
    rewards: Shaped[Array | np.ndarray, "..."] | Sequence[Any],
    scale: Scale = "group",
) -> Float[Array, "prompts group"]:
    """Advantages of the responses of each prompt, in units of the group's reward spread.

    `A_i = (r_i - mean r) / (std r + 1e-6)`, population standard deviation (ddof 0); a group whose
    rewards are all equal (`max == min`) gives exactly 0 (GRPO, arXiv 2402.03300, with the test of
    equality of HiLoRe, arXiv 2609.33570). Evaluated on `(r - min) / (max - min)`, so an offset or
    a scale common to the group costs no accuracy. With `scale="batch"` the deviation is that of
    all rewards (still `r_i - mean r` of the group), with "none" there is no division (Dr. GRPO,
    arXiv 2503.20783).

    Args:
        rewards: `[prompts, group]`, any real dtype, reward units; an array or nested lists of
            numbers. NumPy float64 and lists are shifted in float64 before they become float32.
        scale: what the differences are divided by.

    Returns:
        `[prompts, group]` float32 (float64 if the rewards are), dimensionless. Under `jit` a
        non-finite reward makes its whole group NaN.

    Raises:
        ValueError: Not two-dimensional, a group of one, or (concrete) a non-finite reward.

    Example:
        >>> import hilore_jax as hl
        >>> print(hl.grpo.group_advantages([[1.0, 0.0, 0.0, 1.0], [0.35, 0.35, 0.35, 0.35]]))
        [[ 0.999998 -0.999998 -0.999998  0.999998]
         [ 0.        0.        0.        0.      ]]
    """
    check_choice("scale", scale, typing.get_args(Scale))
    rewards = _as_array(rewards)
    if np.ndim(rewards) != 2:
        raise ValueError(
            f"rewards has shape {np.shape(rewards)}; expected [prompts, group]. For one reward a "
            "completion, in prompt order, use group_advantages(group_rewards(rewards, group))"
            + (f"; {_legal(np.shape(rewards)[0])}." if np.ndim(rewards) == 1 else ".")
        )
    if np.shape(rewards)[1] < 2:
        raise ValueError(
            f"GRPO needs a group of at least 2 responses a prompt; rewards has shape "
            f"{np.shape(rewards)}, a group of {np.shape(rewards)[1]}. Sample more responses."
        )
    if is_concrete(rewards):
        _check_finite(np.asarray(rewards))
    host = isinstance(rewards, np.ndarray)
    xp = np if host else jnp
    # float16 and bfloat16 rewards, counts and booleans are widened before the subtraction.
    wide = np.float64 if host else at_least_float32(rewards)
    rewards = xp.asarray(rewards, wide)
    low = xp.min(rewards, axis=1, keepdims=True)
    spread = xp.max(rewards, axis=1, keepdims=True) - low
    equal = spread == 0  # inf - inf is NaN, so a group of equal infinities stays visible
    unit = jnp.asarray((rewards - low) / xp.where(equal, xp.ones_like(spread), spread))
    dtype = at_least_float32(unit)
    spread, equal = jnp.asarray(spread, dtype), jnp.asarray(equal)
    centred = unit - jnp.mean(unit, axis=1, keepdims=True)
    if scale == "group":
        std = jnp.sqrt(jnp.mean(centred**2, axis=1, keepdims=True))
        scaled_epsilon = STD_EPSILON / jnp.where(equal, jnp.ones_like(spread), spread)
        return jnp.where(equal, jnp.zeros_like(centred), centred / (std + scaled_epsilon))
    # In reward units again; the deviation of all rewards is that within groups and between them.
    differences = jnp.where(equal, jnp.zeros_like(centred), centred * spread)
    if scale == "none":
        return differences
    means = jnp.asarray(xp.mean(rewards - xp.min(low), axis=1, keepdims=True), dtype)
    between = means - jnp.mean(means)
    # In units of the largest, whose square neither overflows nor vanishes.
    unit = jnp.maximum(jnp.max(jnp.abs(differences)), jnp.max(jnp.abs(between)))
    unit = jnp.where(unit == 0, jnp.ones_like(unit), unit)
    inside, between = differences / unit, between / unit
    std = jnp.sqrt(jnp.mean(inside**2 + between**2))
    return inside / (std + STD_EPSILON / unit)


def group_rewards(
    rewards: Shaped[Array | np.ndarray, "..."] | Sequence[Any], group: int
) -> Shaped[Array | np.ndarray, "prompts group"]:
    """One reward a completion, in prompt order, as `[prompts, group]`.

    Args:
        rewards: `[prompts * group]`, array or list; the completions of a prompt are neighbours.
        group: Responses a prompt.

    Returns:
        `[prompts, group]`, same dtype.

    Raises:
        ValueError: Not one-dimensional, a group under 2, or a count `group` does not divide.

    Example:
        >>> import hilore_jax as hl
        >>> print(hl.grpo.group_rewards([1.0, 0.0, 0.0, 1.0], 2))
        [[1. 0.]
         [0. 1.]]
    """
    found = _as_array(rewards)
    if np.ndim(found) != 1:
        raise ValueError(f"rewards has shape {np.shape(found)}; expected [prompts * group].")
    count = np.shape(found)[0]
    if group < 2:
        raise ValueError(
            f"GRPO needs a group of at least 2 responses a prompt, got {group}; {_legal(count)}."
        )
    if count % group:
        raise ValueError(
            f"{count} rewards (completions) do not divide into groups of {group}: prompts x group "
            f"must be {count}; {_legal(count)}."
        )
    return found.reshape(count // group, group)


def _as_array(rewards: Any) -> Any:
    if hasattr(rewards, "dtype"):
        return rewards
    sizes = {len(row) if isinstance(row, Sequence) else np.size(row) for row in rewards}
    if len(sizes) > 1:
        raise ValueError(
            f"rewards is a list of groups of {sorted(sizes)} responses; expected one size: "
            "[prompts, group]. Score or pad every prompt's group alike."
        )
    return np.asarray(rewards)


def _legal(count: int) -> str:
    sizes = [size for size in range(2, count + 1) if count % size == 0]
    listed = ", ".join(map(str, sizes)) or "none"
    return f"legal group sizes for {count} rewards: {listed}"


def _check_finite(rewards: np.ndarray) -> None:
    bad = ~np.isfinite(rewards.astype(np.float64))
    if bad.any():
        prompt, response = np.argwhere(bad)[0]
        raise ValueError(
            f"rewards is {rewards[prompt, response]} at prompt {prompt}, response {response} "
            f"({int(bad.sum())} such values); expected finite rewards. Fix the reward function or "
            "give the response a defined reward."
        )
