"""Decoding with the KV cache against running the forward again for every token."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hilore_jax.compiler import compiler_options
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.planning.timing import interleaved, ratio


def bench_decode(
    config: DecoderConfig, *, rows: int = 32, prompt: int = 64, new: int = 16, repeats: int = 3
) -> dict[str, Any]:
    """Seconds a token of both ways, greedy, interleaved.

    Args:
        config: the model's shape; its weights are random.
        rows: sequences.
        prompt: tokens before the first decoded one.
        new: decoded tokens of each sequence; both ways pay for all of them.
        repeats: timed pairs.

    Returns:
        A row with `time_ratio` (forward again over cache: how many times faster the cache is).
    """
    graph, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(1), (rows, prompt), 0, config.vocab_size)
    mask = jnp.ones((rows, prompt), bool)

    def pick(hidden: Any, model: Decoder) -> Any:
        return jnp.argmax(hidden @ model.unembedding().T, -1).astype(jnp.int32)

    def cached(state: Any, tokens: Any, mask: Any) -> Any:
        model = nnx.merge(graph, state)
        hidden, cache = model.prefill(tokens, mask, prompt + new)

        def step(carry: Any, _: Any) -> Any:
            hidden, cache = carry
            token = pick(hidden, model)
            return model.decode(token, cache), token

        return jax.lax.scan(step, (hidden, cache), None, length=new)[1].T

    def again(state: Any, tokens: Any, mask: Any) -> Any:
        model = nnx.merge(graph, state)
        room = jnp.zeros((rows, prompt + new), jnp.int32).at[:, :prompt].set(tokens)

        def step(room: Any, i: Any) -> Any:
            hidden = model.hidden(room)
            token = pick(jax.lax.dynamic_index_in_dim(hidden, i - 1, 1, keepdims=False), model)
            return jax.lax.dynamic_update_index_in_dim(room, token, i, 1), token

        return jax.lax.scan(step, room, prompt + jnp.arange(new))[1].T

    jitted = [jax.jit(f, compiler_options=compiler_options()) for f in (again, cached)]
    runs = {
        name: functools.partial(f, state, tokens, mask)
        for name, f in zip(("again", "cached"), jitted, strict=True)
    }
    same = bool(jnp.all(runs["again"]() == runs["cached"]()))
    seconds = interleaved(runs, repeats)
    return {
        "bench": "decode",
        "case": f"{rows} sequences, {prompt} + {new} tokens, cache against forward again",
        "same_tokens": same,
        "time_ratio": ratio(seconds["again"], seconds["cached"])._asdict(),
        "goal": "time_ratio >= 5",
    }
