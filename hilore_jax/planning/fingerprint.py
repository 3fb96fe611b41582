"""What a plan was made for, and how another situation differs from it."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.extend import core as jex

from hilore_jax.planning.values import content

Fingerprint = dict[str, str]

# Facts of which others follow: names in a `fingerprint` or a calibration's, by what they show.
_SHAPES = (
    *("block arguments", "update arguments"),
    *("activations", "trained parameters of a block"),
)
_GENERAL = ("jax", "target", "blocks", "argnums")


def fingerprint(block_fn: Callable, block_args: tuple[Any, ...], args: Any, **facts: Any) -> dict:
    """Names and values that must be equal for a plan to hold.

    Args:
        block_fn: the planned block.
        block_args: its arguments, arrays or shapes.
        args: the update's arguments, arrays or shapes.
        **facts: others, such as `target` and `blocks`.

    Returns:
        `block` (the block's traced program, hashed), `block arguments`, `update arguments`
        (shapes and dtypes, short ones in full), `jax`, and the facts, all text.
    """
    program = _printed(jax.make_jaxpr(block_fn)(*block_args))
    return {
        **{name: str(value) for name, value in facts.items()},
        "block": _digest(program),
        "block arguments": describe(block_args),
        "update arguments": describe(args),
        "jax": jax.__version__,
    }


def program_digest(closed: Any) -> str:
    """A hash of a traced program: what it computes, and the arrays that it captures.

    Args:
        closed: a `ClosedJaxpr`.

    Example:
        >>> import jax
        >>> one, two = (jax.make_jaxpr(lambda x, n=n: n * x)(1.0) for n in (1.0, 2.0))
        >>> program_digest(one) == program_digest(two)
        False
    """
    return _digest(_printed(closed) + content(list(_arrays(closed))))


def _arrays(closed: Any) -> Iterator[Any]:
    """Every array that a closed jaxpr captures or spells out, inner jaxprs included."""
    yield from closed.consts
    yield from _inner_arrays(closed.jaxpr)


def _inner_arrays(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield from (atom.val for atom in eqn.invars if isinstance(atom, jex.Literal))
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, jex.ClosedJaxpr):
                    yield from _arrays(part)
                elif isinstance(part, jex.Jaxpr):
                    yield from _inner_arrays(part)


def _printed(closed: Any) -> str:
    # Printed jaxprs show the addresses of custom rules.
    return re.sub(r"0x[0-9a-f]+", "", str(closed))


def describe(tree: Any) -> str:
    """Shapes and dtypes of a pytree's leaves, equal ones counted, hashed where there are many.

    Example:
        >>> import jax.numpy as jnp
        >>> describe((jnp.ones((2, 3)), [jnp.ones((2, 3)), 1]))
        '2 x float32[2,3], int32[]'
    """
    counts: dict[str, int] = {}
    for leaf in jax.tree.leaves(tree):
        aval = jax.typeof(leaf) if not hasattr(leaf, "dtype") else leaf
        shape = ",".join(map(str, aval.shape))
        text = f"{aval.dtype}[{shape}]"
        counts[text] = counts.get(text, 0) + 1
    parts = [f"{n} x {text}" if n > 1 else text for text, n in counts.items()]
    return ", ".join(parts)


def differences(
    planned: Mapping[str, str],
    found: Mapping[str, str],
    words: str = "planned for {}; found {}",
) -> list[str]:
    """What differs, in words; empty where both agree on every name that both have.

    What only follows from another difference is left out: shapes where a fact in words differs
    (a batch, a rank), and the hash of the block's program where anything else does.

    Args:
        planned: facts of a file.
        found: facts of the present situation.
        words: what is said of the two values.

    Example:
        >>> differences({"block": "1f", "LoRA rank": "0"}, {"block": "2e", "LoRA rank": "16"})
        ['LoRA rank: planned for 0; found 16']
    """
    differ = [name for name in planned if name in found and planned[name] != found[name]]
    if any(name not in (*_SHAPES, *_GENERAL, "block") for name in differ):
        differ = [name for name in differ if name not in _SHAPES]
    differ = [name for name in differ if name != "block"] or differ
    return [
        f"{name}: {words.format(*_short(planned[name], found[name]))}"
        + " (hashes of its traced program)" * (name == "block")
        for name in differ
    ]


def _short(planned: str, found: str) -> tuple[str, str]:
    """Both values, reduced to the parts that differ where they are lists."""
    left, right = planned.split(", "), found.split(", ")
    only_left = [part for part in left if part not in right] or left
    only_right = [part for part in right if part not in left] or right
    return ", ".join(only_left[:4]), ", ".join(only_right[:4])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
