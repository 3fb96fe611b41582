"""Whether an update runs the block that is planned: the activations that both name, compared."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hilore_jax import tracing
from hilore_jax.planning.menu import Entry
from hilore_jax.planning.plan import Blocks

_SHOWN = 3  # names, and shapes of each, that an error lists


def same_block(blocks: Blocks, menu: Sequence[Entry]) -> Callable[[Any], None]:
    """A check of an update's program: the activations of the planned block occur in it.

    What a plan says of bytes, seconds and risk is counted on `blocks.args`. The program may have
    more axes than the block, as under `jax.vmap`, and shorter ones under `jax.shard_map`, which
    cuts arrays for its devices. Names that no entry of the menu acts on are not looked for: where
    nothing reads them, they may be gone.

    Args:
        blocks: the repeated block.
        menu: the block's entries.

    Returns:
        A function of the update's jaxpr, with every block recomputed, that raises ValueError and
        says what is missing or different.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> from hilore_jax import Policy, Store
        >>> menu = [Entry(Policy({"h": Store()}), 8, 1.0, 0, 0, 0.0)]
        >>> check = same_block(Blocks(lambda x: checkpoint_name(x, "h"), (jnp.ones(2),), 1), menu)
        >>> check(jax.make_jaxpr(lambda x: checkpoint_name(x[1:], "h"))(jnp.ones(4)).jaxpr)
        Traceback (most recent call last):
        ValueError: hl.Blocks(args=...) are not what the update's blocks are given: h is float32[2]
        in the planned block, float32[3] in the update. ...
    """
    wanted = {name for entry in menu for name in entry.policy}
    block, _ = tracing.prune(tracing.trace(blocks.fn, *blocks.args).closed)
    planned = [site for site in tracing.sites(block) if site.name in wanted]

    def check(program: Any) -> None:
        cut = any(eqn.primitive.name == "shard_map" for eqn in tracing.primitives(program))
        found: dict[str, list[tracing.Site]] = {}
        for site in tracing.sites(program):
            found.setdefault(site.name, []).append(site)
        _refuse_missing([s.name for s in planned if s.name not in found], found)
        different = {
            site.name: f"{site.name} is {_kind(site)} in the planned block, "
            f"{_kinds(found[site.name])} in the update"
            for site in planned
            if not any(_fits(site, other, cut) for other in found[site.name])
        }
        if different:
            listed = "; ".join([*different.values()][:_SHOWN])
            more = f" (and {len(different) - _SHOWN} more)" if len(different) > _SHOWN else ""
            raise ValueError(
                "hl.Blocks(args=...) are not what the update's blocks are given: "
                f"{listed}{more}. Give the block the shapes and dtypes of one microbatch, as the "
                "update hands them to it."
            )

    return check


def _refuse_missing(names: Iterable[str], found: Iterable[str]) -> None:
    if missing := list(dict.fromkeys(names)):
        raise ValueError(
            f"the update does not run the planned block: that names {', '.join(missing)}, the "
            f"update's program names {', '.join(sorted(found)) or 'nothing'}. Does the update hand "
            "its policies to hl.scan_blocks, and is hl.Blocks(fn=...) the same block?"
        )


def _fits(planned: tracing.Site, found: tracing.Site, cut: bool) -> bool:
    """Whether the planned axes are among the found ones, in order; `cut`: or multiples of them."""
    if planned.dtype != found.dtype:
        return False
    sizes = iter(found.shape)
    return all(
        any(size == wanted or (cut and size and wanted % size == 0) for size in sizes)
        for wanted in planned.shape
    )


def _kind(site: tracing.Site) -> str:
    return f"{site.dtype}[{','.join(map(str, site.shape))}]"


def _kinds(sites: Iterable[tracing.Site]) -> str:
    kinds = [*dict.fromkeys(map(_kind, sites))]
    return ", ".join(kinds[:_SHOWN]) + (", ..." if len(kinds) > _SHOWN else "")
