"""Compiled memory and update time of remat policies against `jax.checkpoint` on a real block."""

import functools
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
from hilore_jax.remat import remat
from hilore_jax.report.timing import interleaved, ratio
from hilore_jax.segments import scan_blocks

Row = dict[str, Any]
NAMES = ("q", "k", "v", "attn_out", "attn_lse", "mlp_gate", "mlp_up")
CODECS = ("int8", "fp8_e4m3", "fp8_e5m2", "int4")


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
        return self.blocks * explain(policy, self.block, *arguments).compression_savings

    def scanned(self, policy: Policy) -> Callable:
        """All blocks through `hl.scan_blocks`, equal policies."""

        def run(stack: Any, x: Any, cos: Any, sin: Any) -> Any:
            return scan_blocks(self.block, stack, x, (policy,) * self.blocks, cos, sin)

        return run

    def unrolled(self, wrap: Callable) -> Callable:
        """All blocks in a Python loop, each wrapped."""

        def run(stack: Any, x: Any, cos: Any, sin: Any) -> Any:
            block = wrap(self.block)
            for i in range(self.blocks):
                x = block(jax.tree.map(lambda a, i=i: a[i], stack), x, cos, sin)
            return x

        return run

    def scanned_by_jax(self, wrap: Callable) -> Callable:
        """All blocks through `jax.lax.scan`, each wrapped: the reference."""

        def run(stack: Any, x: Any, cos: Any, sin: Any) -> Any:
            block = wrap(self.block)
            return jax.lax.scan(lambda x, p: (block(p, x, cos, sin), None), x, stack)[0]

        return run

    def compile(self, run: Callable, *, stack: Any = None, trained: bool = True) -> Any:
        """One compiled update: forward, backward, AdamW on the weights (or d loss / dx alone)."""
        stack = self.stack if stack is None else stack
        optimizer = optax.adamw(1e-6)
        place = functools.partial(jax.ShapeDtypeStruct, sharding=self.sharding)
        moments = jax.tree.map(
            lambda s: place(s.shape, s.dtype), jax.eval_shape(optimizer.init, stack)
        )

        def loss(stack: Any, x: Any, cos: Any, sin: Any) -> Any:
            return jnp.sum(jnp.sin(run(stack, x, cos, sin)).astype(jnp.float32))

        def update(stack: Any, moments: Any, x: Any, cos: Any, sin: Any) -> Any:
            if not trained:
                return jax.value_and_grad(loss, argnums=1)(stack, x, cos, sin)
            value, grads = jax.value_and_grad(loss)(stack, x, cos, sin)
            step, moments = optimizer.update(grads, moments, stack)
            return value, optax.apply_updates(stack, step), moments

        target = None if self.sharding is None else "gpu"
        lowered = jax.jit(update).lower(stack, moments, self.x, self.angles, self.angles)
        return lowered.compile(compiler_options=compiler_options(target))

    def arguments(self) -> tuple[Any, ...]:
        """Random arguments of a compiled update."""
        keys = iter(jax.random.split(jax.random.key(0), 1000))

        def draw(s: Any) -> jax.Array:
            return 0.02 * jax.random.normal(next(keys), s.shape, s.dtype)

        stack = jax.tree.map(draw, self.stack)
        ones = jnp.ones(self.angles.shape)
        return stack, optax.adamw(1e-6).init(stack), draw(self.x) * 50, ones, 0 * ones


def temp(compiled: Any) -> int:
    """Bytes of temporaries in XLA's buffer assignment."""
    return compiled.memory_analysis().temp_size_in_bytes


def bench_parity(setup: Setup, repeats: int) -> list[Row]:
    """Recompute and Store against `jax.checkpoint` with the same names."""
    saveable = jax.checkpoint_policies.save_only_these_names
    rows = []
    for label, names in (("recompute", ()), ("store", NAMES)):
        policy = Policy(dict.fromkeys(names, Store()))
        reference = functools.partial(jax.checkpoint, policy=saveable(*names))
        for layout, ours, theirs in (
            ("scanned", setup.scanned(policy), setup.scanned_by_jax(reference)),
            ("unrolled", setup.unrolled(remat(policy)), setup.unrolled(reference)),
        ):
            pair = [setup.compile(run) for run in (ours, theirs)]
            row = {
                "bench": "parity with jax.checkpoint",
                "case": f"{label}, {layout}",
                "temp_bytes": temp(pair[0]),
                "reference_bytes": temp(pair[1]),
                "memory_ratio": temp(pair[0]) / temp(pair[1]),
                "goal": "memory_ratio within 1 %; time within 3 %",
            }
            rows.append(row | _times(pair, setup, repeats))
    return rows


def bench_compression(setup: Setup, repeats: int) -> list[Row]:
    """Compress against storing the same names, scanned and unrolled."""
    rows = []
    exact = Policy(dict.fromkeys(NAMES, Store()))
    layouts = (
        ("scanned", setup.scanned),
        ("unrolled", lambda policy: setup.unrolled(remat(policy))),
    )
    for layout, build in layouts:
        stored = setup.compile(build(exact))
        for codec in CODECS:
            lossy = {name: Compress(codec) for name in ("mlp_gate", "mlp_up", "v", "attn_out")}
            policy = Policy({**dict(exact.actions), **lossy})
            compiled = setup.compile(build(policy))
            saved = setup.explain_savings(policy)
            row = {
                "bench": "compress against store",
                "case": f"{codec}, {layout}",
                "temp_bytes": temp(compiled),
                "reference_bytes": temp(stored),
                "explained_savings": saved,
                "share_of_savings": (temp(stored) - temp(compiled)) / saved,
                "goal": "share_of_savings >= 0.9",
            }
            rows.append(row | _times([compiled, stored], setup, repeats))
    return rows


def bench_segments(setup: Setup) -> list[Row]:
    """Cost in temporaries of holding one policy's blocks in several stacks."""
    weights = sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(setup.stack))
    rows = []
    n = setup.blocks
    for trained in (True, False):
        run = setup.scanned(Policy({"mlp_gate": Store(), "mlp_up": Compress()}))
        one = temp(setup.compile(run, trained=trained))
        for count in (2, 3, 5):
            lengths = [n // count + (i < n % count) for i in range(count)]
            parts = setup.split(lengths)
            several = temp(setup.compile(run, stack=parts, trained=trained))
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


def _times(pair: list[Any], setup: Setup, repeats: int) -> Row:
    if setup.sharding is not None or repeats == 0:  # a target that is not here cannot be timed
        return {}
    arguments = setup.arguments()
    runs = {name: functools.partial(c, *arguments) for name, c in zip("ab", pair, strict=True)}
    seconds = interleaved(runs, repeats)
    return {"time_ratio": ratio(seconds["a"], seconds["b"])._asdict()}
