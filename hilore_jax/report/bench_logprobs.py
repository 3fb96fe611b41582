"""Memory and time of `token_logprobs` against a plain log-softmax, value and gradient."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hilore_jax.compiler import compiler_options
from hilore_jax.grpo.logprobs import token_logprobs
from hilore_jax.grpo.whole import whole_logprobs


def bench_logprobs(
    *,
    batch: int = 16,
    seq: int = 128,
    vocab: int = 49152,
    d_model: int = 576,
    repeats: int = 5,
    chunk: int | None = None,
) -> list[dict[str, Any]]:
    """Measure both heads, frozen and trained, in one interleaved run on the default device.

    Args:
        batch: Sequences.
        seq: Positions of each; `batch * seq` tokens.
        vocab: Rows of the unembedding.
        d_model: Width of the hidden states, float32.
        repeats: Timed pairs; ours and plain take turns and the ratio is the median of the pairs'.
        chunk: As in `token_logprobs`.

    Returns:
        A row a head: `head`, `temp_bytes`, `plain_temp_bytes`, `head_gradient_bytes` (0 where
        frozen), `temp_ratio` (ours beyond the head's gradient over plain's), `seconds`,
        `plain_seconds` (medians), `time_ratio`, and `largest_difference` (over the value and the
        gradients, relative to the largest entry of each).

    Example:
        >>> rows = bench_logprobs(batch=2, seq=4, vocab=32, d_model=8, repeats=1)
        >>> [row["head"] for row in rows]
        ['frozen', 'trained']
    """
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (batch, seq, d_model))
    unembedding = jax.random.normal(keys[1], (vocab, d_model)) / jnp.sqrt(d_model)
    targets = jax.random.randint(keys[2], (batch, seq), 0, vocab)
    coefficients = jax.random.normal(keys[3], (batch, seq)) / (batch * seq)
    arguments = (hidden, unembedding, targets, coefficients)
    ours = partial(token_logprobs, chunk=chunk)
    return [
        {"head": head, **_compare(ours, argnums, arguments, repeats)}
        for head, argnums in (("frozen", (0,)), ("trained", (0, 1)))
    ]


def _compare(
    ours: Callable, argnums: tuple[int, ...], arguments: tuple, repeats: int
) -> dict[str, Any]:
    compiled = [_compile(function, argnums, arguments) for function in (ours, whole_logprobs)]
    outputs = [jax.block_until_ready(c(*arguments)) for c in compiled]
    pairs = [[_seconds(c, arguments) for c in compiled] for _ in range(repeats)]
    temp, plain_temp = (c.memory_analysis().temp_size_in_bytes for c in compiled)
    head_bytes = arguments[1].nbytes if 1 in argnums else 0
    seconds, plain_seconds = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "temp_bytes": temp,
        "plain_temp_bytes": plain_temp,
        "head_gradient_bytes": head_bytes,
        "temp_ratio": max(0, temp - head_bytes) / plain_temp,
        "seconds": seconds,
        "plain_seconds": plain_seconds,
        "time_ratio": statistics.median(a / b for a, b in pairs),
        "largest_difference": max(
            float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))
            for a, b in zip(*map(jax.tree.leaves, outputs), strict=True)
        ),
    }


def _compile(function: Callable, argnums: tuple[int, ...], arguments: tuple) -> Any:
    def objective(hidden, unembedding, targets, coefficients):
        return jnp.vdot(coefficients, function(hidden, unembedding, targets))

    step = jax.jit(
        jax.value_and_grad(objective, argnums=argnums), compiler_options=compiler_options()
    )
    return step.lower(*arguments).compile()


def _seconds(compiled: Any, arguments: tuple) -> float:
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    return time.perf_counter() - start
