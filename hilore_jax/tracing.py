"""Everything that reads a jaxpr: names seen, saved residuals, recomputed matmuls and their FLOPs.

The only room that may touch jax's private modules; each use is guarded here and tested on both
supported jax versions.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
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
# route or sort differently from forward.
_CHOICES = frozenset({"sort", "argmax", "argmin", "top_k", "approx_top_k"})
_MATMULS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})
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


class Work(NamedTuple):
    """What a traced program computes."""

    matmuls: int  # executions of matmul equations, loop bodies times their length
    flops: int  # floating-point operations of those matmuls, a multiply-add counted as two

    def __add__(self, other: tuple) -> "Work":
        return Work(self.matmuls + other[0], self.flops + other[1])

    def __sub__(self, other: "Work") -> "Work":
        return Work(self.matmuls - other.matmuls, self.flops - other.flops)

    def __mul__(self, times: int) -> "Work":
        return Work(self.matmuls * times, self.flops * times)


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


def _contains(eqn: Any, names: frozenset[str]) -> bool:
    if eqn.primitive.name in names:
        return True
    return any(e.primitive.name in names for j in inner_jaxprs(eqn) for e in primitives(j))


def is_heavy(eqn: Any) -> bool:
    """Whether an equation is a matmul or an opaque kernel, or has one inside."""
    return _contains(eqn, _MATMULS | _OPAQUE)


def is_choice(eqn: Any) -> bool:
    """Whether an equation orders or selects by value (sort, top-k, argmax), at any depth."""
    return _contains(eqn, _CHOICES)


def _matmul_flops(eqn: Any) -> int:
    out = math.prod(eqn.outvars[0].aval.shape)
    left, right = (v.aval.shape for v in eqn.invars[:2])
    if eqn.primitive.name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        return 2 * out * math.prod(left[d] for d in contract)
    if eqn.primitive.name == "conv_general_dilated":
        out_features = eqn.params["dimension_numbers"].rhs_spec[0]
        return 2 * out * math.prod(right) // max(right[out_features], 1)
    return 2 * out * left[-1]  # ragged: every row meets one group


def work(jaxpr: Any) -> Work:
    """Matmuls of a jaxpr and their FLOPs; a scan body counts `length` times, a branch at its most.

    A `while` body counts once: its trip count is not in the jaxpr.

    Example:
        >>> import jax.numpy as jnp
        >>> work(trace(lambda a, b: a @ b, jnp.ones((2, 3)), jnp.ones((3, 5))).jaxpr)
        Work(matmuls=1, flops=60)
    """
    total = Work(0, 0)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _MATMULS:
            total += Work(1, _matmul_flops(eqn))
            continue
        inner = [work(j) for j in inner_jaxprs(eqn)]
        if not inner:
            continue
        if eqn.primitive.name == "cond":
            total += max(inner, key=lambda w: w.flops)
        elif eqn.primitive.name.startswith(("custom_jvp", "custom_vjp")):
            total += inner[0]  # the primal; rules are other parameters
        else:
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            total += sum(inner, Work(0, 0)) * times
    return total


def prune(closed: Any) -> tuple[Any, list[bool]]:
    """Removes dead equations.

    Returns:
        The open jaxpr with live equations only, and for each of the original inputs whether it
        is still read.
    """
    return pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))


def live_work(fn: Callable, *args: Any) -> Work:
    """Matmuls that `fn` really needs for its outputs, after dead code is removed."""
    return work(prune(trace(fn, *args).closed)[0])


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

    empty = jax.numpy.zeros(0, q.dtype)
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
