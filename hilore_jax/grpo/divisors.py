"""How an update's tokens are averaged: what each row's sum is divided by."""

from __future__ import annotations

import typing
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from hilore_jax.grpo.checks import is_concrete
from hilore_jax.grpo.terms import check_choice

Mean = Literal["token", "sequence", "constant", "local"]


def loss_divisors(
    lengths: Int[Array | np.ndarray, "rows"],
    mean: Mean = "token",
    *,
    longest: int | None = None,
    local_rows: int | None = None,
) -> Float[Array, "rows"]:
    r"""`update_tokens` a row: with it, losses of microbatches add up to a chosen mean.

    With `n_i` the optimized tokens of row i and B the rows that have any:

        token      sum_i n_i               every token alike (DAPO, arXiv 2503.14476)
        sequence   B n_i                   every row alike (GRPO, arXiv 2402.03300; GSPO)
        constant   B longest               a token counts the same in rows of any length (Dr. GRPO,
                                           arXiv 2503.20783)
        local      J sum_{i in j} n_i      token means of `local_rows` neighbours j, averaged over
                                           the J that have tokens (BNPO, as TRL has it)

    Rows without tokens count nowhere, so that masking a truncated completion takes it out of the
    denominator too. The divisors are those of a complete update: microbatches, devices and the
    order of rows change nothing, but for `local` the neighbours.

    Args:
        lengths: `[rows]`, optimized tokens of each row of the update.
        mean: see above.
        longest: of `constant`, the length that every row is divided by, tokens.
        local_rows: of `local`, rows a mean; divides the rows.

    Returns:
        `[rows]` float32; 0 for rows without tokens.

    Raises:
        ValueError: an unknown word, an option that is missing or belongs to another mean, rows that
            do not divide, or (concrete) a row longer than `longest`.

    Example:
        >>> import numpy as np, hilore_jax as hl
        >>> print(hl.grpo.loss_divisors(np.array([1, 3]), "sequence"))
        [2. 6.]
    """
    check_choice("mean", mean, typing.get_args(Mean))
    for name, value, of in (("longest", longest, "constant"), ("local_rows", local_rows, "local")):
        if (value is None) == (mean == of):
            raise ValueError(f"{name} is {value} and mean is {mean!r}; {name} belongs to {of!r}.")
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1.")
    counts = jnp.asarray(lengths).astype(jnp.float32)
    active = counts > 0
    rows = jnp.sum(active, dtype=jnp.float32)
    if mean == "token":
        found = jnp.broadcast_to(jnp.sum(counts), counts.shape)
    elif mean == "sequence":
        found = rows * counts
    elif mean == "constant":
        assert longest is not None
        if is_concrete(lengths) and np.size(lengths) and np.max(lengths) > longest:
            raise ValueError(
                f"row {int(np.argmax(lengths))} has {int(np.max(lengths))} optimized tokens, more "
                f"than longest = {longest}; give the longest completion that can be sampled."
            )
        found = jnp.broadcast_to(rows * longest, counts.shape)
    else:
        assert local_rows is not None
        if len(counts) % local_rows:
            raise ValueError(f"{len(counts)} rows do not divide into means of {local_rows} rows.")
        sums = jnp.sum(counts.reshape(-1, local_rows), axis=1)
        found = jnp.sum(sums > 0, dtype=jnp.float32) * jnp.repeat(sums, local_rows)
    return jnp.where(active, found, 0.0)
