"""Small blocks that the remat tests share."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from hilore_jax import codecs

D, F = 8, 12
# Relative distance of equal functions compiled differently, in float64: some 1e-15 of rounding.
ROUNDING = 1e-12


def params(seed=0, d=D, f=F):
    """Parameters of `mlp`."""
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "gate": jax.random.normal(keys[0], (d, f)) / d**0.5,
        "up": jax.random.normal(keys[1], (d, f)) / d**0.5,
        "down": jax.random.normal(keys[2], (f, d)) / f**0.5,
    }


def inputs(seed=1, shape=(3, 5, D)):
    """Activations for `mlp`."""
    return jax.random.normal(jax.random.key(seed), shape)


def mlp(p, x):
    """A gated block that names norm, gate, up and act."""
    h = checkpoint_name(x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6), "norm")
    gate = checkpoint_name(h @ p["gate"], "gate")
    up = checkpoint_name(h @ p["up"], "up")
    act = checkpoint_name(jax.nn.silu(gate) * up, "act")
    return x + act @ p["down"]


def mlp_by_hand(p, x, g, decode_gate, decode_up):
    """Cotangents of `mlp` written out, with gate and up decoded wherever backward reads them.

    The activation is recomputed from the decoded gate and up; the norm is exact.
    """
    r = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    h = x * r
    gate, up = decode_gate(h @ p["gate"]), decode_up(h @ p["up"])
    s = jax.nn.sigmoid(gate)
    act = gate * s * up
    rows = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
    d_act = g @ p["down"].T
    d_gate = d_act * up * s * (1 + gate * (1 - s))
    d_up = d_act * gate * s
    d_h = d_gate @ p["gate"].T + d_up @ p["up"].T
    d_x = g + d_h * r - x * r**3 * jnp.mean(d_h * x, -1, keepdims=True)
    grads = {
        "gate": rows(h).T @ rows(d_gate),
        "up": rows(h).T @ rows(d_up),
        "down": rows(act).T @ rows(g),
    }
    return grads, d_x


def decoder(codec, axis=-1, tile=128):
    """`decode(encode(.))` of one codec."""
    return lambda value: codecs.round_trip(value, codec, axis=axis, tile=tile)


def temp_bytes(compiled):
    """Bytes of temporaries in XLA's buffer assignment."""
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def wide(tree):
    """`tree` in float64, where the fixture `float64` is on."""
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), tree)


def relative(tree, reference):
    """Relative L2 distance of two pytrees."""
    pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True))
    error = sum(float(jnp.sum((a - b) ** 2)) for a, b in pairs)
    return (error / sum(float(jnp.sum(b**2)) for _, b in pairs)) ** 0.5
