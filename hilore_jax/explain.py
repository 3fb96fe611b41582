"""`explain`: what a policy keeps of a block, and what backward recomputes because of it."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hilore_jax import modules, replay, tracing
from hilore_jax.actions import Action, Compress, Policy, Recompute, Store
from hilore_jax.remat import CONTROL_FLOW, apply_policy, check_names, check_policy
from hilore_jax.work import Work, live_work


@dataclasses.dataclass(frozen=True)
class Row:
    """One name of the block under its action."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sites: int  # how often the block uses the name
    action: Action
    exact_bytes: int  # bytes that Store would keep
    kept_bytes: int  # bytes that this action keeps, scales included
    recomputed: Work  # what backward would not recompute if the name were stored
    tainted: bool  # backward recomputes it from a decoded value
    looped: bool  # named only inside a loop or branch, where bytes are not counted


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a policy does to one block; `str()` is a table.

    Attributes:
        rows: one for each name, in program order.
        recomputed: matmuls and FLOPs that backward repeats in all, against no rematerialization.
        input_bytes: bytes of the block's own inputs, which every policy keeps or recomputes from.
        notes: what a reader should know before trusting the table.
    """

    rows: tuple[Row, ...]
    recomputed: Work
    input_bytes: int
    notes: tuple[str, ...]

    @property
    def saved_bytes_by_action(self) -> dict[str, int]:
        """Bytes kept for backward by kind of action: `{"store": ..., "compress": ..., ...}`."""
        total: dict[str, int] = {"store": 0, "compress": 0, "offload": 0, "recompute": 0}
        for row in self.rows:
            total[type(row.action).__name__.lower()] += row.kept_bytes
        return total

    @property
    def kept_bytes(self) -> int:
        """Bytes kept of all names."""
        return sum(row.kept_bytes for row in self.rows)

    @property
    def compression_savings(self) -> int:
        """Bytes that Compress saves against storing the same names exactly."""
        return sum(
            r.exact_bytes - r.kept_bytes for r in self.rows if isinstance(r.action, Compress)
        )

    def __str__(self) -> str:
        head = ("name", "shape", "dtype", "action", "kept", "exact", "matmuls", "GFLOP", "decoded")
        body = [
            (
                row.name + (f" x{row.sites}" if row.sites > 1 else ""),
                "x".join(map(str, row.shape)) or "scalar",
                row.dtype,
                str(row.action),
                format_bytes(row.kept_bytes),
                format_bytes(row.exact_bytes),
                str(row.recomputed.matmuls),
                f"{row.recomputed.flops / 1e9:.3f}",
                "tainted" if row.tainted else "",
            )
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
        numeric = {4, 5, 6, 7}
        lines = [
            "  ".join(
                cell.rjust(w) if i in numeric else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in (head, *body)
        ]
        kept = ", ".join(f"{k} {format_bytes(v)}" for k, v in self.saved_bytes_by_action.items())
        lines += [
            f"kept: {kept}; block inputs {format_bytes(self.input_bytes)}",
            f"backward recomputes {self.recomputed.matmuls} matmul"
            f"{'s' * (self.recomputed.matmuls != 1)}, {self.recomputed.flops / 1e9:.3f} GFLOP; a "
            "row's matmuls and GFLOP are what storing that name alone would spare, so rows need "
            "not add up",
            *['"tainted": recomputed from a decoded value'] * any(r.tainted for r in self.rows),
            *(f"note: {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def format_bytes(n: int) -> str:
    """Bytes for people: `1.50 MiB`.

    Example:
        >>> format_bytes(1536), format_bytes(12)
        ('1.50 KiB', '12 B')
    """
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{int(value)} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def explain(
    policy: Policy | Any,
    block_fn: Callable[..., Any],
    *args: Any,
    argnums: Sequence[int] | None = None,
) -> Explanation:
    """Says what `hl.remat(policy)(block_fn)` keeps and recomputes, without running it.

    FLOPs are those of matmuls (a multiply-add is two),
    counted in the traced gradient after dead code is removed; they are counted, not measured.

    A block, or a module among the arguments, that `hl.remat` decorated is explained as if it were
    not: under `policy` in place of its own. A function decorated further inside keeps its policy.

    Args:
        policy: the policy to explain.
        block_fn: the block; its arguments may be NNX modules.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        argnums: positions of the arguments that are differentiated, as in `jax.grad`; None is
            all. A rotary embedding's angles, say, are not: their derivative would need the
            unrotated queries.

    Returns:
        `Explanation`; print it for the table.

    Raises:
        ValueError: a listed name does not occur in the block; `argnums` with NNX modules.

    Example:
        >>> import jax.numpy as jnp, hilore_jax as hl
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> def block(w, x):
        ...     return jnp.sin(checkpoint_name(x @ w, "h"))
        >>> policy = hl.Policy({"h": hl.Compress("int8")})
        >>> e = hl.explain(policy, block, jnp.ones((8, 128)), jnp.ones((4, 8)))
        >>> e.rows[0].kept_bytes, e.rows[0].exact_bytes, e.recomputed.matmuls
        (520, 2048, 0)
    """
    check_policy(policy, "hl.explain")
    block_fn = modules.undecorated(block_fn)
    args = jax.tree.map(modules.undecorated, args, is_leaf=modules.is_leaf)
    if not any(modules.is_module(x) for x in jax.tree.leaves(args, is_leaf=modules.is_leaf)):
        moving = range(len(args)) if argnums is None else [n % len(args) for n in argnums]
        marks = [i in moving for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        return _explain(policy, block_fn, args, marks)
    if argnums is not None:
        raise ValueError(
            "explain(argnums=...) takes no NNX modules; split them and pass the state."
        )
    found: list[Explanation] = []

    def analyse(fn: Callable, *inner: Any, **kwargs: Any) -> Any:
        found.append(_explain(policy, fn, inner, [True] * len(jax.tree.leaves(inner))))
        return jax.eval_shape(fn, *inner, **kwargs)[0], {}

    modules.lifted(analyse, block_fn)(*args)
    return found[0]


def _gradient_work(
    policy: Policy, fn: Callable, leaves: list[Any], tree: Any, marks: list[bool]
) -> Work:
    """Matmuls of output and gradient with respect to the marked floating-point inputs."""
    places = [
        i
        for i, (x, mark) in enumerate(zip(leaves, marks, strict=True))
        if mark and jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    ]

    def outputs(moving: list[Any], resting: list[Any]) -> list[Any]:
        full = list(resting)
        for place, value in zip(places, moving, strict=True):
            full[place] = value
        args = jax.tree.unflatten(tree, full)
        out = fn(*args) if policy.keeps_everything else apply_policy(policy, fn, *args)
        return [o for o in jax.tree.leaves(out) if jnp.issubdtype(o.dtype, jnp.inexact)]

    def gradient(resting: list[Any], cotangents: list[Any]) -> Any:
        out, pull = jax.vjp(lambda m: outputs(m, resting), [resting[i] for i in places])
        return out, pull(cotangents)

    shapes = jax.eval_shape(lambda xs: outputs([xs[i] for i in places], xs), leaves)
    return live_work(gradient, leaves, shapes)


def _explain(policy: Policy, fn: Callable, args: tuple[Any, ...], marks: list[bool]) -> Explanation:
    leaves, tree = jax.tree.flatten(args)
    traced = tracing.trace(fn, *args)
    check_names(policy, traced)
    sites = list(tracing.sites(traced.jaxpr))
    plain = _gradient_work(Policy(default=Store()), fn, leaves, tree, marks)
    total = plain if policy.keeps_everything else _gradient_work(policy, fn, leaves, tree, marks)
    names = list(dict.fromkeys(site.name for site in sites))
    kept = _kept_by_name(policy, traced, names, marks)
    tainted = replay.tainted_names(policy, traced)
    rows = []
    for name in names:
        mine = [site for site in sites if site.name == name]
        spared = Work(0, 0)
        # A name of an inner custom rule is that rule's own: storing it outside spares nothing.
        if isinstance(policy[name], Recompute) and not all(map(_is_ruled, mine)):
            stored = Policy(
                {**dict(policy.actions), name: Store()}, tainted_matmuls=policy.tainted_matmuls
            )
            spared = total - _gradient_work(stored, fn, leaves, tree, marks)
        exact = sum(math.prod(s.shape) * s.dtype.itemsize for s in mine)
        rows.append(
            Row(
                name,
                mine[0].shape,
                str(mine[0].dtype),
                len(mine),
                policy[name],
                exact,
                kept[name],
                spared,
                name in tainted,
                all(site.inside in CONTROL_FLOW for site in mine),
            )
        )
    inputs = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in traced.jaxpr.invars)
    extra = Work(0, 0)
    if policy.names(Compress) and not policy.tainted_matmuls:
        loose = Policy(dict(policy.actions), tainted_matmuls=True)
        extra = total - _gradient_work(loose, fn, leaves, tree, marks)
    notes = [
        f"{name!r} is named inside an inner function with a derivative rule of its own, such as "
        "another hl.remat, which decides what is kept of it."
        for name in names
        if all(_is_ruled(site) for site in sites if site.name == name)
    ]
    notes += _notes(policy, rows, extra)
    return Explanation(tuple(rows), total - plain, inputs, tuple(notes))


def _is_ruled(site: tracing.Site) -> bool:
    return site.inside.startswith("custom_vjp")


def _kept_by_name(
    policy: Policy, traced: tracing.Traced, names: list[str], marks: list[bool]
) -> dict[str, int]:
    kept = dict.fromkeys(names, 0)
    if policy.keeps_everything:
        policy = Policy({name: Store() for name in names})
    sites = [site for site in tracing.sites(traced.jaxpr) if not site.inside]
    for site, size in zip(sites, replay.backward_and_bytes(policy, traced, marks)[1], strict=True):
        kept[site.name] += size
    return kept


def _notes(policy: Policy, rows: list[Row], extra: Work) -> tuple[str, ...]:
    notes = [
        f"{row.name!r} is not read by any gradient: {row.action} keeps nothing and spares nothing."
        for row in rows
        if not isinstance(row.action, Recompute) and row.kept_bytes == 0 and not row.looped
    ]
    notes += [
        f"{row.name!r} is named inside a loop or branch: what {row.action} keeps there is not "
        "counted."
        for row in rows
        if row.looped and not isinstance(row.action, Recompute)
    ]
    if extra.matmuls:
        notes.append(
            f"{extra.matmuls} of the recomputed matmuls ({extra.flops / 1e9:.3f} GFLOP) are there "
            "so that no matmul is recomputed from a decoded value; storing the names between "
            "spares them, tainted_matmuls=True gives the accuracy up."
        )
    if policy.tainted_matmuls:
        notes.append("tainted_matmuls=True: matmuls may be recomputed from decoded values.")
    return tuple(notes)
