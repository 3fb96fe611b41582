"""Everything that reads a jaxpr or runs one: names seen, saved residuals, single equations.

The only room that may touch jax's private modules; each use is guarded here and tested on both
supported jax versions.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jex
from jax.interpreters import partial_eval as pe

try:
    from jax._src import ad_checkpoint as _ad_checkpoint
    from jax._src import source_info_util as _source_info

    _saved_residuals = _ad_checkpoint.saved_residuals
except (ImportError, AttributeError) as error:  # pragma: no cover - a jax we have not tested
    raise ImportError(
        f"jax {jax.__version__} moved the internals that hilore_jax.tracing reads ({error}); "
        "install jax 0.10.2 (Python 3.11) or a version listed in the README."
    ) from error

# Primitives whose output jumps when an input changes a little: choosing by a decoded value would
# route, sort or branch differently from forward.
_CHOICES = frozenset(
    {"sort", "argmax", "argmin", "top_k", "approx_top_k", "cond", "while"}
    | {"round", "floor", "ceil", "sign", "rem"}
)
MATMULS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})
# Calls whose inside is unknown here (Triton, cuDNN, foreign functions): never replayed for free.
_OPAQUE = frozenset(
    {"pallas_call", "triton_kernel_call", "ffi_call", "dot_product_attention_fwd_wrapper"}
)


class Site(NamedTuple):
    """One `checkpoint_name` in a traced block."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    inside: str  # "" at the top or in an inner jit, else the primitive around it ("scan", ...)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function traced to a jaxpr: `closed.consts` are the arrays and tracers it captured."""

    closed: Any  # jax.extend.core.ClosedJaxpr
    out_tree: Any

    @property
    def jaxpr(self) -> Any:
        """The open jaxpr."""
        return self.closed.jaxpr


def remat3_enabled() -> bool:
    """Whether jax's experimental second rematerialization engine is switched on."""
    return bool(getattr(jax.config, "jax_remat3", False))


def trace(fn: Callable, *args: Any) -> Traced:
    """Traces `fn` on pytrees of arrays, tracers or `jax.ShapeDtypeStruct`s.

    Example:
        >>> import jax.numpy as jnp
        >>> len(trace(lambda x: jnp.sin(x) + 1, 1.0).jaxpr.eqns)
        2
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    return Traced(closed, jax.tree.structure(shapes))


def is_name(eqn: Any) -> bool:
    """Whether an equation is a `checkpoint_name`."""
    return eqn.primitive.name == "name"


def inlined_jaxpr(eqn: Any) -> Any | None:
    """The closed jaxpr of an inner `jax.jit` call, which is the same program inlined."""
    return eqn.params["jaxpr"] if eqn.primitive.name in ("jit", "pjit") else None


def inner_jaxprs(eqn: Any) -> list[Any]:
    """Open jaxprs among an equation's parameters: bodies of loops, branches and calls."""
    found = []
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, jex.ClosedJaxpr):
                found.append(part.jaxpr)
            elif isinstance(part, jex.Jaxpr):
                found.append(part)
    return found


def sites(jaxpr: Any, inside: str = "") -> Iterator[Site]:
    """Every `checkpoint_name` of a jaxpr, in program order, inner jaxprs included."""
    for eqn in jaxpr.eqns:
        if is_name(eqn):
            aval = eqn.outvars[0].aval
            yield Site(eqn.params["name"], tuple(aval.shape), aval.dtype, inside)
        around = inside if inlined_jaxpr(eqn) is not None else (inside or eqn.primitive.name)
        for inner in inner_jaxprs(eqn):
            yield from sites(inner, around)


def primitives(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, inner jaxprs included, each once."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from primitives(inner)


def _at_any_depth(eqn: Any) -> Iterator[Any]:
    yield eqn
    for inner in inner_jaxprs(eqn):
        yield from primitives(inner)


def is_heavy(eqn: Any) -> bool:
    """Whether an equation is a matmul or an opaque kernel, or has one inside."""
    return any(e.primitive.name in MATMULS | _OPAQUE for e in _at_any_depth(eqn))


def _is_integer(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", jnp.float32)
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _jumps(eqn: Any) -> bool:
    """Whether an equation itself makes integers of other values, or compares two arrays."""
    if inner_jaxprs(eqn) or eqn.primitive.name == "optimization_barrier":
        return False  # passes integers on; what makes them is inside, or before
    if any(map(_is_integer, eqn.outvars)):
        return not all(map(_is_integer, eqn.invars))
    compared = [v for v in eqn.invars if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    return (
        jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.bool_)
        and sum(not isinstance(v, jex.Literal) for v in compared) > 1
    )


def is_choice(eqn: Any) -> bool:
    """Whether an equation chooses by value at any depth: sorts, branches, compares, rounds.

    Integers made of floats become indices and counts; a comparison of two arrays (a router's
    scores with their k-th largest) holds for one side exact and the other decoded by luck alone.
    One with a constant, as in a ReLU, may read decoded values. A branch itself is a choice only
    by its index, an integer, so that one at the top counts for what its bodies do.
    """
    return any(
        (e.primitive.name in _CHOICES and not (e is eqn and e.primitive.name == "cond"))
        or (bool(e.outvars) and _jumps(e))
        for e in _at_any_depth(eqn)
    )


def uses_refs(jaxpr: Any) -> bool:
    """Whether a jaxpr reads or writes mutable arrays, given to it or its own."""
    classes = {c.__name__ for effect in jaxpr.effects for c in type(effect).__mro__}
    return bool(classes & {"RefEffect", "InternalMutableArrayEffect"})


def prune(closed: Any) -> tuple[Any, list[bool]]:
    """Removes dead equations.

    Returns:
        The open jaxpr with live equations only, and for each of the original inputs whether it
        is still read.
    """
    return pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates one equation, under its own mesh, name stack and source lines."""
    params = eqn.primitive.get_bind_params(eqn.params)
    functions: Sequence[Any] = ()
    if isinstance(params, tuple):  # jax before and after call primitives lost their functions
        functions, params = params
    stack = _source_info.current_name_stack() + eqn.source_info.name_stack
    with (
        _source_info.user_context(eqn.source_info.traceback, name_stack=stack),
        eqn.ctx.manager,
    ):
        out = eqn.primitive.bind(*functions, *values, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    on_equation: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    """Evaluates a jaxpr, handing each equation to `on_equation(eqn, values) -> outputs`.

    Literals arrive bare. Inner `jax.jit` calls that hold names are inlined.
    """
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        values = [v.val if isinstance(v, jex.Literal) else env[v] for v in eqn.invars]
        inner = inlined_jaxpr(eqn)
        if inner is not None and next(sites(inner.jaxpr), None) is not None:
            out = evaluate(inner.jaxpr, inner.consts, values, on_equation)
        else:
            out = on_equation(eqn, values)
        env.update(zip(eqn.outvars, out, strict=True))
    return [v.val if isinstance(v, jex.Literal) else env[v] for v in jaxpr.outvars]


class Residual(NamedTuple):
    """An array that autodiff keeps between forward and backward."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int  # bytes
    origin: str  # what jax says of it: an argument, a name, or the primitive that made it


def saved_residuals(fn: Callable, *args: Any) -> list[Residual]:
    """The arrays that differentiating `fn` at `args` keeps, as jax lists them.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> [r.dtype for r in saved_residuals(jnp.sin, 1.0)]
        ['float32']
    """
    found = []
    for aval, origin in _saved_residuals(fn, *args):
        shaped: Any = aval
        size = math.prod(shaped.shape) * getattr(shaped.dtype, "itemsize", 0)
        found.append(Residual(tuple(shaped.shape), str(shaped.dtype), size, origin))
    return found


def cudnn_attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    bias: jax.Array | None,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """CuDNN's causal attention backward kernel, which jax offers only inside its own rule.

    `[batch, seq, heads, head_dim]` in 16 bits; `lse` float32 `[batch, heads, seq]`; `bias` additive
    scores `[batch, 1, seq, seq]` without a gradient. Returns the gradients of q, k and v.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    empty = jnp.zeros(0, q.dtype)
    residuals = (q, k, v, empty if bias is None else bias, *([empty] * 6), lse, out)
    grads = fused._dot_product_attention_bwd_rule(
        scale,
        42,  # seed of a dropout that is off
        0.0,
        (bias is not None, False),
        fused.MaskType.CAUSAL,
        fused.AttentionLayout.BTNH.value,
        None,
        fused.check_cudnn_version(),
        True,
        residuals,
        (d_out, None),
    )
    return tuple(grads[:3])


def varying_like(x: jax.Array, tree: Any) -> jax.Array:
    """`x`, typed as differing between the devices of a `jax.shard_map` where a leaf of `tree` does.

    A function's derivative rule may not return cotangents that differ for an argument that does
    not; and what a function returns must agree with the cotangents that it is handed. Outside of
    `shard_map`, and without its `check_vma`, nothing happens.
    """

    def axes(leaf: Any) -> frozenset[str]:
        aval: Any = jax.typeof(leaf)
        return aval.mat.varying

    wanted = frozenset().union(*map(axes, jax.tree.leaves(tree))) - axes(x)
    return jax.lax.pcast(x, tuple(sorted(wanted)), to="varying") if wanted else x
