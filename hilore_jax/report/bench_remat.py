"""Compiled memory and update time of remat policies against `jax.checkpoint` on a real block."""

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from hilore_jax.actions import Compress, Policy, Store
from hilore_jax.compiler import compiler_options
from hilore_jax.explain import explain
from hilore_jax.models.block import Block, BlockFn
from hilore_jax.models.config import DecoderConfig
from hilore_jax.planning.timing import interleaved, ratio
from hilore_jax.remat import remat
from hilore_jax.segments import scan_blocks

Row = dict[str, Any]
NAMES = ("q", "k", "v", "attn_out", "attn_lse", "mlp_gate", "mlp_up")
CODECS = ("int8", "fp8_e4m3", "fp8_e5m2", "int4")
LAYOUTS = ("scanned", "unrolled")


class Setup:
    """A stack of blocks of one model shape, its arguments, and one complete update of it."""

    def __init__(self, config: DecoderConfig, blocks: int, rows: int, seq: int, sharding: Any):
        graph, state = nnx.eval_shape(lambda: nnx.split(Block(config, rngs=nnx.Rngs(0))))
        self.block = BlockFn(graph)
        self.blocks = blocks
        self.sharding = sharding
        half = config.head_dim // 2
        place = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
        self.params = jax.tree.map(lambda s: place(s.shape, s.dtype), state)
        self.stack = jax.tree.map(lambda s: place((blocks, *s.shape), s.dtype), state)
        self.list = [self.params] * blocks
        self.x = place((rows, seq, config.d_model), config.compute_dtype)
        self.angles = place((rows, seq, half), jnp.float32)

    def split(self, lengths: Sequence[int]) -> tuple[Any, ...]:
        """The stack's shapes in segments of these lengths."""
        place = functools.partial(jax.ShapeDtypeStruct, sharding=self.sharding)
        return tuple(
            jax.tree.map(lambda s, n=n: place((n, *s.shape[1:]), s.dtype), self.stack)
            for n in lengths
        )

    def explain_savings(self, policy: Policy) -> int:
        """Bytes that compression saves in all blocks, as `explain` says."""
        arguments = (self.params, self.x, self.angles, self.angles)
        return (
            self.blocks
            * explain(policy, self.block, *arguments, argnums=(0, 1)).compression_savings
        )

    def scanned(self, policy: Policy) -> Callable:
        """All blocks through `hl.scan_blocks`, equal policies."""

        def run(stack: Any, x: Any, cos: Any, sin: Any) -> Any:
            return scan_blocks(self.block, stack, x, (policy,) * self.blocks, cos, sin)

        return run

    def unrolled(self, wrap: Callable) -> Callable:
        """All blocks in a Python loop over a list of their weights, each wrapped."""

        def run(blocks: Any, x: Any, cos: Any, sin: Any) -> Any:
            block = wrap(self.block)
            for params in blocks:
                x = block(params, x, cos, sin)
            return x

        return run

    def scanned_by_jax(self, wrap: Callable) -> Callable:
        """All blocks through `jax.lax.scan`, each wrapped: the reference."""

        def run(stack: Any, x: Any, cos: Any, sin: Any) -> Any:
            block = wrap(self.block)
            return jax.lax.scan(lambda x, p: (block(p, x, cos, sin), None), x, stack)[0]

        return run

    def gradient(self, run: Callable, stack: Any, *, trained: bool = True) -> Any:
        """Compiled gradient with respect to the weights, or to the input alone: for memory.

        With respect to the input, the temporaries are the activations' alone. Gradients of all
        weights are outputs as large as the weights, in whose space XLA then puts temporaries.
        """
        argnums = 0 if trained else 1
        lowered = jax.jit(jax.grad(_loss(run), argnums)).lower(
            stack, self.x, self.angles, self.angles
        )
        return lowered.compile(compiler_options=self._options())

    def update(self, run: Callable, stack: Any) -> Any:
        """Compiled complete update: forward, backward, AdamW on the weights: for time."""
        optimizer = optax.adamw(1e-6)

        def update(stack: Any, moments: Any, *inputs: Any) -> Any:
            value, grads = jax.value_and_grad(_loss(run))(stack, *inputs)
            step, moments = optimizer.update(grads, moments, stack)
            return value, optax.apply_updates(stack, step), moments

        moments = jax.eval_shape(optimizer.init, stack)
        lowered = jax.jit(update).lower(stack, moments, self.x, self.angles, self.angles)
        return lowered.compile(compiler_options=self._options())

    def _options(self) -> dict[str, Any]:
        return compiler_options(None if self.sharding is None else "gpu")

    def arguments(self, stack: Any) -> tuple[Any, ...]:
        """Random arguments of a compiled update."""
        keys = iter(jax.random.split(jax.random.key(0), 1000))

        def draw(s: Any) -> jax.Array:
            return 0.02 * jax.random.normal(next(keys), s.shape, s.dtype)

        weights = jax.tree.map(draw, stack)
        ones = jnp.ones(self.angles.shape)
        return weights, optax.adamw(1e-6).init(weights), draw(self.x) * 50, ones, 0 * ones


def _loss(run: Callable) -> Callable:
    return lambda *arguments: jnp.sum(jnp.sin(run(*arguments)).astype(jnp.float32))


def temp(compiled: Any) -> int:
    """Bytes of temporaries in XLA's buffer assignment."""
    return compiled.memory_analysis().temp_size_in_bytes


def operations(compiled: Any) -> Counter:
    """How often the optimized program does what: instructions by result shape and opcode."""
    return Counter(re.findall(r"= (\S+ [a-z][a-z\-]*)\(", compiled.as_text()))


def bench_parity(setup: Setup, repeats: int) -> list[Row]:
    """Recompute and Store against `jax.checkpoint` with the same names."""
    saveable = jax.checkpoint_policies.save_only_these_names
    rows = []
    for label, names in (("recompute", ()), ("store", NAMES)):
        policy = Policy(dict.fromkeys(names, Store()))
        reference = functools.partial(jax.checkpoint, policy=saveable(*names))
        for layout, stack, ours, theirs in (
            ("scanned", setup.stack, setup.scanned(policy), setup.scanned_by_jax(reference)),
            ("unrolled", setup.list, setup.unrolled(remat(policy)), setup.unrolled(reference)),
        ):
            both = [
                setup.gradient(run, stack, trained=layout == "scanned") for run in (ours, theirs)
            ]
            mine, reference_bytes = map(temp, both)
            row = {
                "bench": "parity with jax.checkpoint",
                "case": f"{label}, {layout}",
                "temp_bytes": mine,
                "reference_bytes": reference_bytes,
                "memory_ratio": mine / reference_bytes,
                "same_operations": operations(both[0]) == operations(both[1]),
                "goal": "memory_ratio within 1 %; time within 3 %",
            }
            rows.append(row | _times(setup, stack, ours, theirs, repeats))
    return rows


def bench_compression(
    setup: Setup,
    repeats: int,
    codecs: Sequence[str] = CODECS,
    layouts: Sequence[str] = LAYOUTS,
) -> list[Row]:
    """Compress against storing the same names, scanned and unrolled."""
    rows = []
    exact = Policy(dict.fromkeys(NAMES, Store()))
    for layout, stack, build in (
        ("scanned", setup.stack, setup.scanned),
        ("unrolled", setup.list, lambda policy: setup.unrolled(remat(policy))),
    ):
        if layout not in layouts:
            continue
        stored = temp(setup.gradient(build(exact), stack, trained=False))
        for codec in codecs:
            lossy = {name: Compress(codec) for name in ("mlp_gate", "mlp_up", "v", "attn_out")}
            policy = Policy({**dict(exact.actions), **lossy})
            compressed = temp(setup.gradient(build(policy), stack, trained=False))
            saved = setup.explain_savings(policy)
            row = {
                "bench": "compress against store",
                "case": f"{codec}, {layout}",
                "temp_bytes": compressed,
                "reference_bytes": stored,
                "explained_savings": saved,
                "share_of_savings": (stored - compressed) / saved,
                "goal": "share_of_savings >= 0.9",
            }
            rows.append(row | _times(setup, stack, build(policy), build(exact), repeats))
    return rows


def bench_segments(setup: Setup, counts: Sequence[int] = (2, 3, 5)) -> list[Row]:
    """Cost in temporaries of holding one policy's blocks in several stacks."""
    weights = sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(setup.stack))
    rows = []
    n = setup.blocks
    for trained in (True, False):
        run = setup.scanned(Policy({"mlp_gate": Store(), "mlp_up": Compress()}))
        one = temp(setup.gradient(run, setup.stack, trained=trained))
        for count in counts:
            lengths = [n // count + (i < n % count) for i in range(count)]
            several = temp(setup.gradient(run, setup.split(lengths), trained=trained))
            rows.append(
                {
                    "bench": "segments",
                    "case": f"{count} segments, {'trained' if trained else 'frozen'}",
                    "temp_bytes": several,
                    "reference_bytes": one,
                    "share_of_weights": (several - one) / weights,
                    "goal": "share_of_weights <= 0.02",
                }
            )
    return rows


def _times(setup: Setup, stack: Any, ours: Callable, theirs: Callable, repeats: int) -> Row:
    if setup.sharding is not None or repeats == 0:  # a target that is not here cannot be timed
        return {}
    arguments = setup.arguments(stack)
    runs = {
        name: functools.partial(setup.update(run, stack), *arguments)
        for name, run in (("ours", ours), ("theirs", theirs))
    }
    seconds = interleaved(runs, repeats)
    return {"time_ratio": ratio(seconds["ours"], seconds["theirs"])._asdict()}
