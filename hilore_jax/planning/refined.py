"""Stacks of blocks that no plan of a run has to cut."""

from collections.abc import Iterable, Sequence

from hilore_jax.actions import Policy
from hilore_jax.planning.plan import Plan


def refined_segments(plans: Iterable[Plan | Sequence[Policy]]) -> tuple[int, ...]:
    """Stack lengths in which every plan's runs of equal policies are whole stacks.

    Weights held so are never copied when the plan changes: `hilore_jax.scan_blocks` passes on
    uncut every stack that lies within one run.

    Args:
        plans: plans, or policies one a block, for the same number of blocks.

    Returns:
        Lengths that sum to the number of blocks: the common refinement.

    Raises:
        ValueError: no plans, or for different numbers of blocks.

    Example:
        >>> from hilore_jax import Compress
        >>> gc, kept = Policy({}), Policy({"q": Compress("int8")})
        >>> refined_segments([[gc, gc, kept, kept], [gc, kept, kept, kept]])
        (1, 1, 2)
    """
    every = [tuple(p.policies if isinstance(p, Plan) else p) for p in plans]
    counts = sorted({len(policies) for policies in every})
    if len(counts) != 1 or counts == [0]:
        raise ValueError(f"plans for {counts} blocks: expected plans for one number of blocks.")
    columns = list(zip(*every, strict=True))
    starts = [i for i, column in enumerate(columns) if i == 0 or column != columns[i - 1]]
    return tuple(b - a for a, b in zip(starts, [*starts[1:], counts[0]], strict=True))
