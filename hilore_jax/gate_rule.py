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
    risk_used: Float[Array, ""]  # root of the summed squares of the flagged blocks' risks, or sum
    risk_budget: Float[Array, ""]  # what it may be


def choose_flags(
    coefficients: Num[Array | np.ndarray, "blocks"],
    seconds: Num[Array | np.ndarray, "blocks"],
    exposure: ArrayLike,
    budget: ArrayLike,
    *,
    paper: bool = False,
) -> Flags:
    r"""The blocks that decode in the backward pass of one microbatch.

    Memory is already paid, so one budget of methods' two remains (arXiv 2609.33570; squares ours):

        maximize   sum_u seconds_u flag_u
        such that  sum_u flag_u (coefficient_u E)^2 <= budget^2;
                   the paper's: sum_u flag_u coefficient_u E <= budget

    With equal seconds the answer is exact: the least risky blocks, as many as fit. Otherwise it is
    greedy by seconds per squared risk (per risk), in two rounds (what fits until one does not;
    then, in the room left, the same among the rest), or the one best block if that saves more. It
    loses less than the seconds of one block, and at most half of the optimum: the first round and
    the block that ended it save at least the fractional optimum.

    All in float32; room for the rounding of every step is kept back, `(4 blocks + 32)` units in
    the last place of budget^2 (of the budget), so that the sum in real numbers is within it.

    Args:
        coefficients: `[blocks]`, risk per exposure, `kappa e / Ghat`; a block with an infinite, NaN
            or negative one (not measured) never decodes.
        seconds: `[blocks]`, saved by decoding; a block that saves nothing never decodes.
        exposure: scalar `sum_t |omega_t|` of the microbatch. NaN, infinite or negative: no flag; 0:
            all blocks that save time.
        budget: scalar, see `share_of_budget`. NaN, infinite, negative or 0: no flag, whatever the
            risks: a budget of 0 admits no compression.
        paper: risks add linearly, as in the paper.

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
    known = (e >= 0) & jnp.isfinite(e) & (b > 0) & jnp.isfinite(b)
    # Relative to the budget, so that squares neither overflow nor vanish; rounded up from zero.
    per_budget = jnp.where(e == 0, 0.0, jnp.maximum(e / b, tiny))
    relative = jnp.where((c == 0) | (e == 0), 0.0, c * per_budget)
    if paper:
        weights = jnp.where(relative > 0, jnp.maximum(relative, tiny), 0.0)
    else:
        weights = jnp.where(relative < 1e-15, jnp.where(relative > 0, 1e-30, 0.0), relative**2)
    room = 1.0 - (4 * units + 32) * float(jnp.finfo(jnp.float32).eps)
    able = known & (c >= 0) & jnp.isfinite(c) & (s > 0) & jnp.isfinite(s) & (weights <= room)
    weights = jnp.where(able, weights, 0.0)
    # Increasing in the risk where seconds are equal, and free of overflow.
    gain = jnp.where(able, s, 1.0)
    per_gain = relative / (gain if paper else jnp.sqrt(gain))
    worst_first_last = jnp.where(able, per_gain, jnp.inf)
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
    total = jnp.sum(weights, where=flags)
    used = b * (total if paper else jnp.sqrt(total))
    return Flags(flags.astype(jnp.float32), jnp.where(known, used, 0.0), b)


def share_of_budget(
    risk: ArrayLike, tokens: ArrayLike, update_tokens: ArrayLike, *, paper: bool = False
) -> jax.Array:
    """A microbatch's part of an update's risk budget.

        R sqrt(tokens / update_tokens);   in the paper, whose risks add up, R tokens / update_tokens

    Squared risks add up over microbatches, so that all of them together stay within R.

    Args:
        risk: R, the update's relative gradient error, e.g. 0.015.
        tokens: scalar, optimized tokens of the microbatch.
        update_tokens: scalar, those of the update; 0 gives 0, fewer than `tokens` NaN.
        paper: the paper's form (arXiv 2609.33570).

    Example:
        >>> print(share_of_budget(0.02, 1, 4), share_of_budget(0.02, 1, 4, paper=True))
        0.01 0.005
    """
    tokens, total = jnp.asarray(tokens, jnp.float32), jnp.asarray(update_tokens, jnp.float32)
    share = jnp.where(total > 0, tokens / jnp.where(total > 0, total, 1.0), 0.0)
    share = jnp.where(share <= 1, share, jnp.nan)
    return jnp.asarray(risk, jnp.float32) * (share if paper else jnp.sqrt(share))
