"""What may be done with each name of a block, and what each action costs by itself."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from hilore_jax import tracing
from hilore_jax.actions import Action, Compress, Offload, Policy, Store
from hilore_jax.planning import expect
from hilore_jax.planning.backward import BlockProgram
from hilore_jax.planning.cost import Roofline, encoded_bytes
from hilore_jax.planning.graph import aval_bytes, recomputed


@dataclasses.dataclass(frozen=True)
class Option:
    """One action of one name.

    Attributes:
        action: the action.
        nbytes: bytes in device memory, for each site of the name.
        seconds: seconds of codec or transfers, for each site of the name.
        risk: relative gradient error.
    """

    action: Action
    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]
    risk: float = 0.0


def block_options(
    program: BlockProgram,
    roofline: Roofline,
    codecs: Sequence[Compress],
    risks: Callable[[str, Compress], float],
    offload: bool,
) -> dict[str, list[Option]]:
    """For each name that backward can read, its actions beside Recompute.

    Args:
        program: the block.
        roofline: seconds of codecs and transfers.
        codecs: what a name may be compressed with; one that would not be smaller is left out.
        risks: relative gradient error of compressing one name; infinite where it may not be.
        offload: offer pinned host memory too, where the target has some.

    Returns:
        Options by name, Store first. A name in a loop or branch body has none.

    Raises:
        ValueError: the block names nothing that a policy can keep, or a risk is negative.
    """
    graph = program.graph
    sites = list(tracing.sites(program.traced.jaxpr))
    if not sites:
        raise ValueError(
            "the block names no activation, so that a policy has nothing to choose. Name what is "
            'worth keeping: jax.ad_checkpoint.checkpoint_name(value, "mlp_gate").'
        )
    inside = {site.name: site.inside for site in sites if site.inside}
    names = [name for name in graph.sites if name not in inside]
    if not names:
        raise ValueError(
            f"the block names activations in loop or branch bodies only ({inside}), where no "
            "single array can be kept. Name values outside of them."
        )
    found: dict[str, list[Option]] = {}
    for name in names:
        places = graph.sites[name]
        alone = recomputed(graph, Policy({name: Store()})).used
        if not any(alone[place] for place in places):
            continue  # backward reads it in no case
        avals = [graph.avals[v] for place in places for v in graph.nodes[place].outputs]
        exact = tuple(map(aval_bytes, avals))
        found[name] = [Option(Store(), exact, tuple(0.0 for _ in avals))]
        if offload and roofline.target.host_link:
            fetch = tuple(roofline.keeping(Offload(), a) for a in avals)
            found[name].append(Option(Offload(), tuple(0 for _ in avals), fetch))
        for action in dict.fromkeys(codecs):
            if not all(_can_compress(action, aval) for aval in avals):
                continue
            risk = _checked_risk(risks, name, action)
            sizes = tuple(encoded_bytes(action, aval) for aval in avals)
            if math.isfinite(risk) and sum(sizes) < sum(exact):
                taken = tuple(roofline.keeping(action, aval) for aval in avals)
                found[name].append(Option(action, sizes, taken, risk))
    if not found:
        raise ValueError(
            f"no gradient of the block reads the activations it names ({names}); see "
            "hl.explain. Name values on the path from differentiated arguments to the output."
        )
    return found


def _can_compress(action: Compress, aval: Any) -> bool:
    dims = len(aval.shape)
    return jnp.issubdtype(aval.dtype, jnp.floating) and -dims <= action.axis < dims


def _checked_risk(risks: Callable[[str, Compress], float], name: str, action: Compress) -> float:
    found = risks(name, action)
    where, expected = f"the risk of {name}={action} is ...", "a number; math.inf forbids it"
    if isinstance(found, str | bool):
        expect.refuse(where, found, expected)
    try:
        risk = float(found)
    except (TypeError, ValueError):
        expect.refuse(where, found, expected)
    if risk < 0:
        raise ValueError(f"the risk of {name}={action} is {risk}; expected at least 0.")
    return risk
