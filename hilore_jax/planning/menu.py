"""The Pareto menu of one block: bytes kept, seconds of recomputation, risk of compression.

The value of saving one name depends on what else is saved, so the unit of choice is a block's whole
policy. The menu is exact: every entry minimizes recompute seconds for some bytes and squared risk,
by the mixed-integer program of `menu_program.py`; the figures of the entries that are returned are
those of their real backward programs.
"""

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hilore_jax.actions import Compress, Policy
from hilore_jax.planning.backward import BlockProgram, block_program
from hilore_jax.planning.cost import Roofline
from hilore_jax.planning.graph import Graph, recomputed
from hilore_jax.planning.menu_program import MenuProgram
from hilore_jax.planning.options import Option, block_options
from hilore_jax.planning.pareto import thinned, undominated

_LOG = logging.getLogger("hilore_jax")
_EXACT = 2_000  # policies of a block up to which its whole Pareto set is enumerated
_LEVELS = 6  # of risk, on larger blocks
_STEPS = 9  # of bytes, at each level of risk


@dataclasses.dataclass(frozen=True)
class Entry:
    """One policy of a block, with what it costs against no rematerialization at all.

    Attributes:
        policy: actions by name; names that backward would not read are left out.
        nbytes: bytes that one block keeps in device memory beside its inputs.
        seconds: what backward spends on evaluating again and on codecs, a block and microbatch;
            modelled by `cost.Roofline`.
        matmuls: matmuls evaluated again.
        flops: their floating-point operations.
        risk: relative gradient error of the block's compression, the root of the summed squares of
            its names' risks.
    """

    policy: Policy
    nbytes: int
    seconds: float
    matmuls: int
    flops: int
    risk: float


@dataclasses.dataclass(frozen=True)
class _Point:
    """A policy with figures from the graph."""

    policy: Policy
    nbytes: int
    seconds: float
    squared: float

    def figures(self) -> tuple[int, float, float]:
        return self.nbytes, self.seconds, self.squared


def block_menu(
    block_fn: Callable[..., Any],
    *args: Any,
    codecs: Sequence[Compress],
    risks: Callable[[str, Compress], float],
    target: Any,
    argnums: Sequence[int] | None = None,
    offload: bool = False,
    limit: int = 40,
) -> tuple[Entry, ...]:
    """The policies of one block that no other policy beats in bytes, seconds and risk.

    Args:
        block_fn: the undecorated block, which names its activations.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        codecs: what a name may be compressed with.
        risks: relative gradient error of compressing one name in one block; a value that is not
            finite forbids it.
        target: a `planning.target.Target`.
        argnums: positions of the arguments that are differentiated; None is all.
        offload: also consider keeping names in pinned host memory.
        limit: most entries; a larger Pareto set is thinned to well-spread ones.

    Returns:
        Entries sorted by bytes, then seconds. One of them recomputes everything, even where
        offloading takes no more device memory and less time.

    Raises:
        ValueError: the block names nothing that a policy can keep, or a risk is negative.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> class Toy:
        ...     bandwidth, host_link = 1e12, 0.0
        ...
        ...     def flops_of(self, dtype):
        ...         return 1e12
        >>> def block(w, x):
        ...     return jnp.sin(checkpoint_name(x @ w, "h"))
        >>> w, x = jnp.ones((4096, 128)), jnp.ones((8, 4096))
        >>> menu = block_menu(
        ...     block, w, x, codecs=[Compress()], risks=lambda name, codec: 0.01, target=Toy()
        ... )
        >>> [(str(e.policy), e.nbytes, e.matmuls) for e in menu]
        [('gc', 0, 1), ('h=int8:axis=-1:tile=128', 1040, 0), ('h=store', 4096, 0)]
    """
    if limit < 4:
        raise ValueError(f"block_menu(limit={limit}): expected at least 4 entries.")
    program = block_program(block_fn, *args, argnums=argnums)
    roofline = Roofline(target)
    options = block_options(program, roofline, codecs, risks, offload)
    points = _Points(program.graph, roofline, options)
    policies = math.prod(1 + len(found) for found in options.values())
    chosen = points.every() if policies <= _EXACT else points.spread()
    chosen = thinned(undominated(chosen, _Point.figures), points.landmarks, limit, _Point.figures)
    entries = [_entry(program, roofline, point) for point in chosen]
    best = undominated(entries, lambda e: (e.nbytes, e.seconds, e.risk))
    if all(entry.policy != Policy({}) for entry in best):  # offloading may beat it
        best.append(_entry(program, roofline, points.point(Policy({}))))
    return tuple(sorted(best, key=lambda e: (e.nbytes, e.seconds, e.risk)))


def _entry(program: BlockProgram, roofline: Roofline, point: _Point) -> Entry:
    figures = program.figures(point.policy)
    if figures.nbytes != point.nbytes:
        _log_once(
            f"policy {point.policy} keeps {figures.nbytes} bytes of the block, where its graph "
            f"predicts {point.nbytes}; the menu shows the former but may not be exact."
        )
    return Entry(
        point.policy,
        figures.nbytes,
        roofline.backward(program, point.policy, figures),
        *figures.work,
        math.sqrt(point.squared),
    )


@functools.cache
def _log_once(message: str) -> None:
    _LOG.warning(message)


class _Points:
    """Solutions of one block's program, with figures from its graph.

    Args:
        graph: the block.
        roofline: seconds.
        options: actions of each name beside Recompute.
    """

    def __init__(self, graph: Graph, roofline: Roofline, options: Mapping[str, Sequence[Option]]):
        self._graph = graph
        self._seconds = roofline.nodes(graph)
        self._options = {name: {o.action: o for o in found} for name, found in options.items()}
        self._program = MenuProgram(graph, self._seconds, options)
        singles = [
            self.point(Policy({name: action}))
            for name, found in self._options.items()
            for action in found
        ]
        self._singles = [self.point(Policy({})), *singles]
        ends = [self._solve(squared=0.0), self._solve()]
        self.landmarks = [self._singles[0], *(p for p in ends if p), *_best(self._singles)]

    def point(self, policy: Policy) -> _Point:
        """A policy without names that backward does not read, and its figures."""
        while True:
            replayed = recomputed(self._graph, policy)
            used = {
                name: [i for i in self._graph.sites[name] if replayed.used[i]] for name in policy
            }
            if all(used.values()):
                break
            policy = Policy({n: policy[n] for n, places in used.items() if places})
        seconds = sum(s * replayed.times(i) for i, s in enumerate(self._seconds))
        nbytes, squared = 0, 0.0
        for name, places in used.items():
            option = self._options[name][policy[name]]
            which = [self._graph.sites[name].index(place) for place in places]
            nbytes += sum(option.nbytes[w] for w in which)
            seconds += sum(option.seconds[w] for w in which)
            squared += option.risk**2
        return _Point(policy, nbytes, seconds, squared)

    def _solve(self, **budgets: Any) -> _Point | None:
        policy = self._program.solve(**budgets)
        return None if policy is None else self.point(policy)

    def every(self) -> list[_Point]:
        """All policies: exact by construction, whatever the scales of bytes and risks are."""
        choices = [[None, *found] for found in self._options.values()]
        return [
            self.point(Policy({n: a for n, a in zip(self._options, actions, strict=True) if a}))
            for actions in itertools.product(*choices)
        ]

    def spread(self) -> list[_Point]:
        """Solutions at several levels of risk, and at each for bytes that halve its largest gap."""
        found = list(self._singles)
        for level in self._risk_levels():
            low, high = self._solve(nbytes=0, squared=level), self._solve(squared=level)
            if low is None or high is None:
                continue
            found += [low, high]
            gaps = [(low, high, low.nbytes)]
            for _ in range(_STEPS):
                if not gaps:
                    break
                gap = max(gaps, key=lambda g: (g[1].nbytes - g[2]) * (g[0].seconds - g[1].seconds))
                gaps.remove(gap)
                below, above, start = gap
                middle = (start + above.nbytes) // 2
                if middle <= start or middle >= above.nbytes:
                    continue
                point = self._solve(nbytes=middle, squared=level)
                if point is None:
                    continue
                found.append(point)
                gaps.append((point, above, middle))
                if point.nbytes > below.nbytes:
                    gaps.append((below, point, start))
        return found

    def _risk_levels(self) -> list[float]:
        """Sums of the least squared risks, first of one name, then of two, ..., a few of them."""
        least = [
            min(squares)
            for found in self._options.values()
            if (squares := [o.risk**2 for o in found.values() if isinstance(o.action, Compress)])
        ]
        sums = [math.fsum(sorted(least)[:k]) for k in range(len(least) + 1)]
        if len(sums) > _LEVELS - 1:
            last = len(sums) - 1
            sums = [sums[round(i * last / (_LEVELS - 2))] for i in range(_LEVELS - 1)]
        return [*sums, math.inf]


def _best(points: Sequence[_Point]) -> list[_Point]:
    """Of policies that keep one name, those that spare most seconds for their bytes."""
    nothing = points[0].seconds
    gain = lambda p: (nothing - p.seconds) / max(p.nbytes, 1)  # noqa: E731
    return sorted((p for p in points[1:] if gain(p) > 0), key=gain, reverse=True)[:3]
