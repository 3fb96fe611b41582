"""Which blocks may decode: the most seconds saved within a risk budget, on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Num


class Flags(NamedTuple):
    """The blocks that decode, and what that risks."""

    flags: Float[Array, "blocks"]  # 1 decode, 0 recompute: the cotangent of a gate's token
    risk_used: Float[Array, ""]  # root of the sum of squared risks of the flagged blocks
    risk_budget: Float[Array, ""]  # what it may be


def choose_flags(
    coefficients: Num[Array | np.ndarray, "blocks"],
    seconds: Num[Array | np.ndarray, "blocks"],
    exposure: ArrayLike,
    budget: ArrayLike,
) -> Flags:
    r"""The blocks that decode in the backward pass of one microbatch.

    Memory is already paid, so one budget of methods' two remains (arXiv 2609.33570; squares ours):

        maximize   sum_u seconds_u flag_u
        such that  sum_u flag_u (coefficient_u E)^2 <= budget^2

    With equal seconds the answer is exact: the least risky blocks, as many as fit. Otherwise it is
    greedy by seconds per squared risk, in two rounds (what fits until one does not; then, in the
    room left, the same among the rest), or the one best block if that saves more. It loses less
    than the seconds of one block, and at most half of the optimum: the first round and the block
    that ended it save at least the fractional optimum.

    All in float32; room for the rounding of every step is kept back, `(4 blocks + 32)` units in
    the last place of budget^2, so that the sum in real numbers is within the budget.

    Args:
        coefficients: `[blocks]`, risk per exposure, `kappa e / Ghat`; a block with an infinite, NaN
            or negative one (not measured) never decodes.
        seconds: `[blocks]`, saved by decoding; a block that saves nothing never decodes.
        exposure: scalar `sum_t |omega_t|` of the microbatch. NaN, infinite or negative: no flag; 0:
            all blocks that save time.
        budget: scalar, `R sqrt(tokens / update tokens)`. NaN or negative: no flag; 0: blocks
            without risk only.

    Returns:
        Flags, risk used and the budget, float32.

    Example:
        >>> import numpy as np
        >>> chosen = choose_flags(np.array([3.0, 1.0, 2.0]), np.ones(3), exposure=0.01, budget=0.03)
        >>> chosen.flags.tolist()
        [0.0, 1.0, 1.0]
    """
    c, s, e, b = (jnp.asarray(a, jnp.float32) for a in (coefficients, seconds, exposure, budget))
    units = c.shape[0]
    tiny = float(jnp.finfo(jnp.float32).tiny)
    known = (e >= 0) & jnp.isfinite(e) & (b >= 0) & jnp.isfinite(b)
    # Relative to the budget, so that squares neither overflow nor vanish; rounded up from zero.
    per_budget = jnp.where(e == 0, 0.0, jnp.maximum(e / b, tiny))
    relative = jnp.where((c == 0) | (e == 0), 0.0, c * per_budget)
    weights = jnp.where(relative < 1e-15, jnp.where(relative > 0, 1e-30, 0.0), relative**2)
    room = 1.0 - (4 * units + 32) * float(jnp.finfo(jnp.float32).eps)
    able = known & (c >= 0) & jnp.isfinite(c) & (s > 0) & jnp.isfinite(s) & (weights <= room)
    weights = jnp.where(able, weights, 0.0)
    # Increasing in the risk where seconds are equal, and free of overflow.
    worst_first_last = jnp.where(able, relative / jnp.sqrt(jnp.where(able, s, 1.0)), jnp.inf)
    order = jnp.argsort(worst_first_last)

    def fill(among: Bool[Array, "blocks"], room: Array) -> Bool[Array, "blocks"]:
        """Those of `among` that fit, in order, before the first that does not."""
        sums = jnp.cumsum(jnp.where(among, weights, 0.0)[order])
        return among & jnp.zeros(units, bool).at[order].set(sums <= room)

    greedy = fill(able, jnp.asarray(room))
    left = room - jnp.sum(weights, where=greedy)
    greedy |= fill(able & ~greedy & (weights <= left), left)
    saved = jnp.where(able, s, 0.0)
    best = able & (jnp.arange(units) == jnp.argmax(saved))
    single = jnp.max(saved, initial=0.0) > jnp.sum(saved, where=greedy)
    flags = jnp.where(single, best, greedy)
    used = b * jnp.sqrt(jnp.sum(weights, where=flags))
    return Flags(flags.astype(jnp.float32), jnp.where(known, used, 0.0), b)


def share_of_budget(risk: ArrayLike, tokens: ArrayLike, update_tokens: ArrayLike) -> jax.Array:
    """A microbatch's part of an update's risk budget: `R sqrt(tokens / update_tokens)`.

    Squared risks add up over microbatches, so that all of them together stay within R.

    Args:
        risk: R, the update's relative gradient error, e.g. 0.015.
        tokens: scalar, optimized tokens of the microbatch.
        update_tokens: scalar, those of the update; 0 gives 0, fewer than `tokens` NaN.

    Example:
        >>> print(share_of_budget(0.02, 1, 4))
        0.01
    """
    tokens, total = jnp.asarray(tokens, jnp.float32), jnp.asarray(update_tokens, jnp.float32)
    share = jnp.where(total > 0, tokens / jnp.where(total > 0, total, 1.0), 0.0)
    return jnp.asarray(risk, jnp.float32) * jnp.sqrt(jnp.where(share <= 1, share, jnp.nan))
