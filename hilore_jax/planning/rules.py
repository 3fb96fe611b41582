"""What the derivative of a single equation reads, found by tracing that derivative."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex

from hilore_jax import tracing

_LANDMARK = "hilore_landmark"
_LOOPS = frozenset({"scan", "while"})


def is_inexact(aval: Any) -> bool:
    """Whether a value can carry a derivative."""
    return jnp.issubdtype(getattr(aval, "dtype", jnp.int32), jnp.inexact)


class Rule(NamedTuple):
    """The derivative of one equation, for given moving inputs and live outputs."""

    reads: tuple[bool, ...]  # for each input, whether the derivative reads its value
    passes: tuple[bool, ...]  # for each input, whether it receives a cotangent
    moves: tuple[bool, ...]  # for each output, whether its cotangent reaches an input
    again: bool  # it reads an output, or what only evaluating the equation gives


class Flat(NamedTuple):
    """An equation of a jaxpr whose inner jits are inlined, in the outer jaxpr's variables."""

    eqn: Any
    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]
    choice: bool  # inside a jit that replay treats as one choice


class _Scoped:
    """A variable of an inlined jaxpr: the same jaxpr inlined twice makes different values."""

    __slots__ = ("aval",)

    def __init__(self, aval: Any):
        self.aval = aval


def flat_equations(jaxpr: Any) -> tuple[list[Flat], list[Any]]:
    """All equations of a jaxpr with inner jits inlined, and its output variables.

    Constants that an inner jit holds are values that nothing produces.
    """
    found: list[Flat] = []

    def walk(jaxpr: Any, env: dict[Any, Any], choice: bool, top: bool) -> list[Any]:
        def look(var: Any) -> Any:
            return var if isinstance(var, jex.Literal) else env.setdefault(var, _fresh(var, top))

        for eqn in jaxpr.eqns:
            invars = tuple(look(v) for v in eqn.invars)
            inner = tracing.inlined_jaxpr(eqn)
            if inner is None:
                found.append(Flat(eqn, invars, tuple(look(v) for v in eqn.outvars), choice))
                continue
            body = inner.jaxpr
            named = next(tracing.sites(body), None) is not None
            unit = choice or (not named and tracing.is_choice(eqn))
            outs = walk(body, dict(zip(body.invars, invars, strict=True)), unit, False)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [look(v) for v in jaxpr.outvars]

    return found, walk(jaxpr, {}, False, True)


def _fresh(var: Any, top: bool) -> Any:
    return var if top else _Scoped(var.aval)


class Rules:
    """Derivatives of equations, traced once for each primitive, parameters and shapes."""

    def __init__(self) -> None:
        self._found: dict[Any, Rule] = {}

    def rule(self, eqn: Any, moving: tuple[bool, ...], live: tuple[bool, ...]) -> Rule:
        """The derivative of `eqn`.

        Args:
            eqn: a jaxpr equation.
            moving: which inputs are differentiated.
            live: which outputs have a cotangent.
        """
        key = (*signature(eqn), moving, live)
        if key not in self._found:
            self._found[key] = _trace_rule(eqn, moving, live)
        return self._found[key]

    def moves(self, eqn: Any, moving: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which outputs carry a derivative, were all of them wanted.

        An equation without a derivative, such as a `while_loop`, is no fault where none is wanted
        of it, as under `stop_gradient`: it counts as carrying one, and `rule` says so if it is.

        Args:
            eqn: a jaxpr equation.
            moving: which inputs are differentiated.
        """
        every = tuple(is_inexact(v.aval) for v in eqn.outvars)
        try:
            return self.rule(eqn, moving, every).moves
        except (ValueError, NotImplementedError):
            return every


def signature(eqn: Any) -> tuple[Any, ...]:
    """Equal for equations that compute the same function; valid while their jaxpr is alive."""
    avals = tuple(str(v.val) if isinstance(v, jex.Literal) else str(v.aval) for v in eqn.invars)
    params = tuple((k, _hashable(v)) for k, v in sorted(eqn.params.items()))
    return eqn.primitive.name, params, avals


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _trace_rule(eqn: Any, moving: Sequence[bool], live: Sequence[bool]) -> Rule:
    places = [i for i, v in enumerate(eqn.invars) if not isinstance(v, jex.Literal)]
    shapes = [eqn.invars[i].aval for i in places]

    def pullback(primals: list[Any], cotangents: list[Any]) -> Any:
        full = [v.val if isinstance(v, jex.Literal) else None for v in eqn.invars]
        for place, value in zip(places, primals, strict=True):
            full[place] = value

        def forward(*moved: Any) -> Any:
            values = iter(moved)
            out = tracing.bind(
                eqn, [next(values) if m else x for x, m in zip(full, moving, strict=True)]
            )
            return [o for o, use in zip(out, live, strict=True) if use], out

        start = [x for x, m in zip(full, moving, strict=True) if m]
        _, pull, out = jax.vjp(forward, *start, has_aux=True)
        # A landmark in the trace: what comes before it runs in forward, the rest in backward.
        landmark = checkpoint_name(start[0], _LANDMARK)
        return out, pull(cotangents), landmark

    cotangents = [v.aval for v, use in zip(eqn.outvars, live, strict=True) if use]
    closed = tracing.trace(pullback, shapes, cotangents).closed
    return _read_rule(closed, len(eqn.invars), places, moving, live)


def _read_rule(
    closed: Any, n_inputs: int, places: list[int], moving: Sequence[bool], live: Sequence[bool]
) -> Rule:
    equations, outvars = flat_equations(closed.jaxpr)
    primals = closed.jaxpr.invars[: len(places)]
    given = {v for v in outvars[: len(live)] if not isinstance(v, jex.Literal)} - set(primals)
    grads = outvars[len(live) : -1]
    landmark = next(
        i for i, flat in enumerate(equations) if flat.eqn.params.get("name") == _LANDMARK
    )
    # Which cotangents each value depends on.
    depends: dict[Any, set[int]] = {}
    lit = [j for j, use in enumerate(live) if use]
    for j, var in zip(lit, closed.jaxpr.invars[len(places) :], strict=True):
        depends[var] = {j}
    for flat in equations:
        sources = set().union(
            *(depends.get(v, set()) for v in flat.invars if not isinstance(v, jex.Literal))
        )
        for var in flat.outvars:
            depends[var] = sources

    def cotangents_of(var: Any) -> set[int]:
        return set() if isinstance(var, jex.Literal) else depends.get(var, set())

    wanted = {g for g in grads if cotangents_of(g)}
    again = False
    for place, flat in reversed(list(enumerate(equations))):
        mine = wanted.intersection(flat.outvars)
        if not mine:
            continue
        if mine & given:
            again = True
            if not mine - given:
                continue
        if place < landmark and (tracing.is_heavy(flat.eqn) or flat.eqn.primitive.name in _LOOPS):
            again = True
        wanted.update(v for v in flat.invars if not isinstance(v, jex.Literal))
    again = again or bool(wanted & given)
    reads = [False] * n_inputs
    for place, var in zip(places, primals, strict=True):
        reads[place] = var in wanted
    passes, reached = [False] * n_inputs, set()
    for place, grad in zip((i for i, m in enumerate(moving) if m), grads, strict=True):
        passes[place] = bool(cotangents_of(grad))
        reached |= cotangents_of(grad)
    moves = tuple(j in reached for j in range(len(live)))
    return Rule(tuple(reads), tuple(passes), moves, again)
