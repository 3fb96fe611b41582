"""Other planners, for comparison: one policy a block from the same block and byte budget."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from hilore_jax import codecs, tracing
from hilore_jax.actions import Compress, Policy, Store
from hilore_jax.planning.allocate import allocate
from hilore_jax.planning.backward import BlockProgram, block_program
from hilore_jax.planning.cost import Roofline
from hilore_jax.planning.graph import Graph, aval_bytes, recomputed
from hilore_jax.planning.menu import Entry, block_menu
from hilore_jax.planning.risks import recommended_codecs


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """A repeated block, and what planners need to know of it.

    Attributes:
        fn: the undecorated block.
        args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        argnums: positions of the arguments that are differentiated; None is all.
        target: a `planning.target.Target`.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    target: Any
    argnums: tuple[int, ...] | None = None

    @functools.cached_property
    def program(self) -> BlockProgram:
        """The traced block."""
        return block_program(self.fn, *self.args, argnums=self.argnums)

    @functools.cached_property
    def origins(self) -> dict[str, frozenset[str]]:
        """For each name, what computes it since the names before: `"matmul"`, `"attention"`."""
        return _origins(self.program.graph)

    def names(self, origin: str | None = None) -> tuple[str, ...]:
        """Names of that origin, or all; a name of one of the block's own inputs is left out."""
        return tuple(n for n, found in self.origins.items() if origin is None or origin in found)

    @functools.cached_property
    def kernels(self) -> dict[int, float]:
        """Seconds of each matmul and opaque kernel, by its place: FLOPs over the target's peak."""
        roofline = Roofline(self.target)
        nodes = enumerate(self.program.graph.nodes)
        return {i: roofline.seconds(node.eqn) for i, node in nodes if node.kind == "heavy"}

    @functools.cached_property
    def tensor_menu(self) -> tuple[Entry, ...]:
        """The block's menu where risk is the tensors' own error."""
        return block_menu(
            self.fn,
            *self.args,
            codecs=recommended_codecs(),
            risks=tensor_error,
            target=self.target,
            argnums=self.argnums,
        )

    def figures(self, stored: Iterable[str]) -> tuple[int, float]:
        """Bytes kept, and seconds of kernels evaluated again, where these names are stored."""
        graph, stored = self.program.graph, tuple(stored)
        replayed = recomputed(graph, _storing(stored))
        kept = [graph.nodes[i] for name in stored for i in graph.sites[name] if replayed.used[i]]
        nbytes = sum(aval_bytes(graph.avals[v]) for node in kept for v in node.outputs)
        return nbytes, math.fsum(s * replayed.times(i) for i, s in self.kernels.items())


def baseline(
    name: str, block: Block, count: int, memory: int, *, error: float = 0.01
) -> tuple[Policy, ...]:
    """One policy a block, as another method would choose it.

    Args:
        name: which. They take no notice of `memory` unless said:

            - `"gc"`: every block recomputed, which is gradient checkpointing.
            - `"none"`: no rematerialization.
            - `"sqrt"`: every k-th block kept whole, k the rounded root of `count`; the others are
              recomputed. Chen et al. (arXiv 1604.06174) keep the inputs of sqrt(n) segments of
              sqrt(n) blocks and hold one segment's insides in backward; with a policy a block
              every block's input is kept anyway, and as many insides are held as there.
            - `"selective"`: everything named is stored but what attention computes (Korthikanti
              et al., arXiv 2205.05198).
            - `"dots"`: names that a matmul without batch dimensions computes are stored, as
              `jax.checkpoint_policies.dots_with_no_batch_dims_saveable` would.
            - `"greedy"`: fills `memory` with exact activations, those first that save most
              recomputed FLOPs (over the target's peak) a byte; a name or two at a time, in as many
              blocks as fit.
            - `"adacc"`: exact store, compress or recompute by an integer program within `memory`,
              where the mean over blocks of their tensors' relative error (root of the summed
              squares, normal values) is at most `error`: the idea of AdaCC (adaptive compression
              and checkpointing), which bounds the error of tensors and not of the gradient.
        block: the repeated block.
        count: number of blocks.
        memory: bytes kept for backward over all blocks, beside their inputs.
        error: of `"adacc"` only.

    Returns:
        One policy a block.

    Raises:
        ValueError: another name, fewer than one block, or (adacc) a budget that nothing keeps.

    Example:
        >>> import jax.numpy as jnp
        >>> block = Block(lambda w, x: jnp.tanh(x @ w), (jnp.ones((2, 2)), jnp.ones((1, 2))), None)
        >>> [str(policy) for policy in baseline("sqrt", block, 4, 0)]
        ['gc', 'store', 'gc', 'store']
    """
    if name not in BASELINES:
        raise ValueError(f"no baseline {name!r}: expected one of {', '.join(BASELINES)}.")
    if count < 1:
        raise ValueError(f"count={count}: expected the number of blocks, at least 1.")
    if name in ("gc", "none"):
        return (Policy({}) if name == "gc" else Policy(default=Store()),) * count
    if name == "sqrt":
        every = max(1, round(math.sqrt(count)))
        return tuple(
            Policy(default=Store()) if (i + 1) % every == 0 else Policy({}) for i in range(count)
        )
    if name == "selective":
        attention = block.names("attention")
        return (_storing(n for n in block.names() if n not in attention),) * count
    if name == "dots":
        return (_storing(block.names("matmul")),) * count
    if name == "greedy":
        return _greedy(block, count, memory)
    return _adacc(block, count, memory, error)


BASELINES = ("gc", "none", "sqrt", "selective", "dots", "greedy", "adacc")
"""Names that `baseline` takes."""


def _storing(names: Iterable[str]) -> Policy:
    return Policy({name: Store() for name in names})


def _origins(graph: Graph) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    flags: dict[int, frozenset[str]] = {}
    made = {value for node in graph.nodes for value in node.outputs}
    for node in graph.nodes:
        inherited = frozenset().union(*(flags.get(v, frozenset()) for v in node.inputs))
        if node.name is not None:
            if all(v in made for v in node.inputs):
                found[node.name] = found.get(node.name, frozenset()) | inherited
            inherited = frozenset()
        elif node.kind == "heavy":
            inherited = frozenset([_heavy_origin(node.eqn)])
        flags |= dict.fromkeys(node.outputs, inherited)
    return found


def _heavy_origin(eqn: Any) -> str:
    """Attention's matmuls have batch dimensions, of rows and heads, and may be a kernel."""
    inside = [e for jaxpr in tracing.inner_jaxprs(eqn) for e in tracing.primitives(jaxpr)]
    matmuls = [e for e in (eqn, *inside) if e.primitive.name in tracing.MATMULS]
    plain = [e for e in matmuls if not _batched(e)]
    return "matmul" if plain else "attention"


def _batched(eqn: Any) -> bool:
    if eqn.primitive.name != "dot_general":
        return False
    _, (batch, _) = eqn.params["dimension_numbers"]
    return bool(batch)


def _greedy(block: Block, count: int, memory: int) -> tuple[Policy, ...]:
    stored: list[frozenset[str]] = [frozenset()] * count
    names, level, left = block.names(), frozenset[str](), memory
    price = functools.cache(block.figures)
    blocks = count  # the first of them hold `level`; only those can take more
    while True:
        base_bytes, base_seconds = price(level)
        steps = []
        rest = [name for name in names if name not in level]
        for extra in itertools.chain(
            itertools.combinations(rest, 1), itertools.combinations(rest, 2)
        ):
            nbytes, seconds = price(level | frozenset(extra))
            grown, saved = nbytes - base_bytes, base_seconds - seconds
            if saved > 1e-9 * base_seconds and grown <= left:
                steps.append((saved / max(grown, 1), -len(extra), extra, grown))
        if not steps:
            return tuple(map(_storing, stored))
        _, _, extra, grown = max(steps)
        blocks = min(blocks, left // grown if grown > 0 else blocks)
        level = level | frozenset(extra)
        stored[:blocks] = [level] * blocks
        left -= blocks * grown


def _adacc(block: Block, count: int, memory: int, error: float) -> tuple[Policy, ...]:
    return allocate([block.tensor_menu] * count, memory, error * count, paper=True).policies


@functools.cache
def tensor_error(name: str, compress: Compress) -> float:
    """Relative error `||x_hat - x|| / ||x||` of one tensor of normal values, whatever its name.

    Example:
        >>> round(tensor_error("mlp_up", Compress("int8", tile=128)), 3)
        0.006
    """
    del name
    values = np.random.default_rng(0).standard_normal((1, 256, 512), np.float32)
    found = codecs.relative_error(
        jax.numpy.asarray(values), compress.codec, axis=compress.axis, tile=compress.tile
    )
    return float(found)
