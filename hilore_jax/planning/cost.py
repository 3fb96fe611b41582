"""Modelled seconds of recomputation: a roofline over the equations of a block.

A matmul takes `max(FLOPs / peak of its dtype, bytes / bandwidth)`; everything else its bytes.
Elementwise chains are taken to be fused: an equation of a chain costs nothing, the chain costs
what it reads and writes where its result is materialized, that is named, or read by something
that is not elementwise. Nothing here is measured.
"""

import dataclasses
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend import core as jex

from hilore_jax import codecs, tracing
from hilore_jax.actions import Action, Compress, Offload, Policy
from hilore_jax.planning.backward import BlockProgram, Figures, Key, block_program, opened
from hilore_jax.planning.fusion import ELEMENTWISE, REDUCTIONS, VIEWS, Step, moved_values
from hilore_jax.planning.graph import Graph, Replayed, aval_bytes, recomputed
from hilore_jax.planning.rules import flat_equations
from hilore_jax.work import work

_LOG = logging.getLogger("hilore_jax")
_CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Modelled seconds on one kind of device.

    Attributes:
        target: a `planning.target.Target`, or anything with `flops_of(dtype)` in FLOP/s,
            `bandwidth` and `host_link` in bytes/s.

    Example:
        >>> import jax.numpy as jnp
        >>> class Toy:
        ...     bandwidth, host_link = 1e3, 1.0
        ...
        ...     def flops_of(self, dtype):
        ...         return 1e3
        >>> eqn = tracing.trace(lambda a, b: a @ b, jnp.ones((9, 9)), jnp.ones((9, 9))).jaxpr.eqns[
        ...     0
        ... ]
        >>> Roofline(Toy()).seconds(eqn)  # 2 * 9**3 FLOPs take longer than 972 bytes
        1.458
    """

    target: Any

    @property
    def source(self) -> str:
        """What the figures are: "modelled"."""
        return "modelled"

    def stream(self, nbytes: int | float) -> float:
        """Seconds that moving so many bytes through device memory takes."""
        return nbytes / self.target.bandwidth

    def seconds(self, eqn: Any) -> float:
        """Seconds of one equation by itself: an elementwise one as its own kernel, a view 0."""
        name = eqn.primitive.name
        if name in VIEWS:
            return 0.0
        traffic = self.stream(sum(aval_bytes(v.aval) for v in (*eqn.invars, *eqn.outvars)))
        if name in ELEMENTWISE or name in REDUCTIONS:
            return traffic
        if name in tracing.MATMULS:
            flops = work(_Equations([eqn])).flops
            return max(flops / self._peak(eqn), traffic)
        if name == _CUDNN_ATTENTION:
            return max(_attention_flops(eqn) / self._peak(eqn), traffic)
        inner = [self.program(body) for body in tracing.inner_jaxprs(eqn)]
        if not inner or "pallas" in name or "triton" in name:
            return traffic  # an opaque kernel
        if name == "cond":
            return max(inner)
        if name.startswith(("custom_jvp", "custom_vjp")):
            return inner[0]
        return math.fsum(inner) * (eqn.params["length"] if name == "scan" else 1)

    def program(self, jaxpr: Any) -> float:
        """Seconds of a whole jaxpr, its elementwise chains fused.

        Example:
            >>> import jax.numpy as jnp
            >>> class Toy:
            ...     bandwidth, host_link = 4.0, 1.0
            >>> chain = tracing.trace(lambda x: jnp.sin(jnp.cos(x) * 2) + 1, jnp.ones(5)).jaxpr
            >>> Roofline(Toy()).program(chain)  # reads 20 bytes and writes 20
            10.0
        """
        equations, outvars = flat_equations(jaxpr)
        steps = [
            Step(f.eqn, [v for v in f.invars if not isinstance(v, jex.Literal)], f.outvars)
            for f in equations
        ]
        outputs = [v for v in outvars if not isinstance(v, jex.Literal)]
        return math.fsum(
            self.seconds(step.eqn) if moved is None else self.stream(sum(map(_var_bytes, moved)))
            for step, moved in zip(steps, moved_values(steps, outputs), strict=True)
        )

    def nodes(self, graph: Graph) -> tuple[float, ...]:
        """Seconds that evaluating each equation of a block again takes."""
        steps = [Step(n.eqn, n.inputs, n.outputs) for n in graph.nodes]
        return tuple(
            self.seconds(step.eqn) if moved is None else self.stream(sum(map(graph.nbytes, moved)))
            for step, moved in zip(steps, moved_values(steps, graph.outputs), strict=True)
        )

    def keeping(self, action: Action, aval: Any) -> float:
        """Seconds that an action itself takes for one value: encoding and decoding, or transfers.

        Args:
            action: what is done with the value.
            aval: its shape and dtype.

        Returns:
            Seconds of both ways together; 0 for Store and Recompute.
        """
        exact = aval_bytes(aval)
        if isinstance(action, Compress):
            return self.stream(2 * (exact + encoded_bytes(action, aval)))
        if isinstance(action, Offload):
            return 2 * exact / self.target.host_link if self.target.host_link else math.inf
        return 0.0

    def keepings(self, graph: Graph, replayed: Replayed, policy: Policy) -> float:
        """Seconds of codecs and transfers of the kept values that backward reads."""
        return math.fsum(
            self.keeping(policy[graph.nodes[i].eqn.params["name"]], graph.avals[node_output])
            for i, used in replayed.used.items()
            if used
            for node_output in graph.nodes[i].outputs
        )

    def backward(self, program: BlockProgram, policy: Policy, figures: Figures) -> float:
        """Seconds of recomputation and codecs in the real backward program of a policy.

        Args:
            program: the block.
            policy: actions by name.
            figures: `program.figures(policy)`.

        Returns:
            Seconds; each equation costs what it costs in the block's forward. Where the program
            does not evaluate again what the graph says, the program is right, and it is logged.
        """
        replayed = recomputed(program.graph, policy)
        predicted: Counter[Key] = Counter()
        price: dict[Key, float] = {}
        each = self.nodes(program.graph)
        for node, seconds, times in zip(
            program.graph.nodes, each, map(replayed.times, range(len(each))), strict=True
        ):
            inside = opened(node.eqn)
            if len(inside) == 1:
                price[next(iter(inside))] = seconds
            for key, n in inside.items():
                predicted[key] += n * times
        extra = Counter(figures.equations)
        extra.subtract(predicted)
        # The elementwise part of the difference is decoding, which `keepings` counts.
        odd = {k: n for k, n in extra.items() if n and k[0] not in VIEWS | ELEMENTWISE}
        total = sum(s * replayed.times(i) for i, s in enumerate(each))
        total += self.keepings(program.graph, replayed, policy)
        if odd:
            _log_once(
                f"backward of the block evaluates other equations again than its graph says "
                f"({policy}): {odd}. Their seconds are taken from the program."
            )
            total += sum(n * price.get(key, self.stream(_key_bytes(key))) for key, n in odd.items())
        return max(total, 0.0)

    def _peak(self, eqn: Any) -> float:
        return self.target.flops_of(eqn.invars[0].aval.dtype.name)


def _key_bytes(key: Key) -> int:
    """Bytes that an equation of this key moves, from its shapes' spelling `float32[2,3]`."""
    total = 0
    for text in key[2]:
        dtype, _, shape = text.partition("[")
        numbers = [int(n) for n in shape.rstrip("]").split(",") if n.isdigit()]
        width = "".join(c for c in dtype.split("_")[0] if c.isdigit())
        total += math.prod(numbers) * max(int(width or 8) // 8, 1)
    return total


@functools.cache
def _log_once(message: str) -> None:
    _LOG.warning(message)


def _var_bytes(var: Any) -> int:
    return aval_bytes(var.aval)


class _Equations(NamedTuple):
    """What `work` needs of a jaxpr."""

    eqns: list[Any]


def encoded_bytes(action: Compress, aval: Any) -> int:
    """Bytes of a value under a Compress action, scales included."""
    return codecs.nbytes(tuple(aval.shape), action.codec, axis=action.axis, tile=action.tile)


def _attention_flops(eqn: Any) -> int | float:
    """Two products over every pair of positions, or half of them where the mask is causal."""
    query, key = (v.aval.shape for v in eqn.invars[:2])
    batch_first = "0" in str(eqn.params.get("layout", 0))  # BTNH, else BNTH
    seq, heads = (query[1], query[2]) if batch_first else (query[2], query[1])
    keys = key[1] if batch_first else key[2]
    causal = "CAUSAL" in str(eqn.params.get("mask_type", "")).upper()
    return 4 * query[0] * heads * seq * keys * query[3] / (2 if causal else 1)


def recompute_seconds(
    policy: Policy,
    block_fn: Callable[..., Any],
    *args: Any,
    argnums: Sequence[int] | None = None,
    target: Any,
) -> float:
    """Modelled seconds that backward spends on evaluating again, and on codecs, under a policy.

    What is evaluated again is counted in the block's real backward program, against that of the
    plain gradient.

    Args:
        policy: actions by name.
        block_fn: the undecorated block.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        argnums: positions of the arguments that are differentiated; None is all.
        target: a `planning.target.Target`.

    Returns:
        Seconds a block and microbatch, modelled; 0 without rematerialization.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> class Toy:
        ...     bandwidth, host_link = 1e9, 0.0
        ...
        ...     def flops_of(self, dtype):
        ...         return 1e3
        >>> def block(w, x):
        ...     return jnp.sin(jax.ad_checkpoint.checkpoint_name(x @ w, "h"))
        >>> w, x = jnp.ones((4, 5)), jnp.ones((3, 4))
        >>> recompute_seconds(Policy({}), block, w, x, target=Toy())  # 120 FLOPs
        0.12
    """
    if policy.keeps_everything:
        return 0.0
    program = block_program(block_fn, *args, argnums=argnums)
    return Roofline(target).backward(program, policy, program.figures(policy))
