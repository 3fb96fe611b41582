"""Small named blocks, a toy device and brute force, for the planner's tests."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import hilore_jax as hl
from blocks import mlp, params
from hilore_jax.planning.backward import BlockProgram, block_program

INT8 = hl.Compress("int8", tile=None)
INT4 = hl.Compress("int4", tile=None)


@dataclasses.dataclass(frozen=True)
class Device:
    """A device on which a small matmul takes as long as a few of its bytes."""

    bandwidth: float = 1e9
    host_link: float = 1e8
    peak: float = 4e8

    def flops_of(self, dtype):
        return self.peak


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def attention(p, x):
    """Softmax attention of one head, its scores and probabilities without names."""
    q = checkpoint_name(x @ p["q"], "q")
    k = checkpoint_name(x @ p["k"], "k")
    v = checkpoint_name(x @ p["v"], "v")
    out = checkpoint_name(jax.nn.softmax(q @ k.mT) @ v, "out")
    return x + out @ p["o"]


def twice(p, x):
    """One name for two activations of different sizes, and another between them."""
    h = checkpoint_name(jnp.sin(x) @ p["gate"], "h")
    mid = checkpoint_name(jnp.tanh(h) @ p["down"], "mid")
    return jnp.sin(checkpoint_name(jnp.exp(mid), "h")) @ p["up"]


def dropout(p, x, key):
    """Dropout between two matmuls: the mask comes from a key and is replayed."""
    h = checkpoint_name(x @ p["gate"], "h")
    keep = jax.random.bernoulli(key, 0.5, h.shape)
    dropped = checkpoint_name(jnp.where(keep, jax.nn.relu(h) * 2, 0.0), "dropped")
    return x + checkpoint_name(dropped @ p["down"], "back")


def residual(p, x):
    """A residual stream, whose decoded value would taint the matmuls after it."""
    mid = checkpoint_name(x + jnp.sin(x @ p["gate"]) @ p["down"], "mid")
    norm = checkpoint_name(mid * jax.lax.rsqrt(jnp.mean(mid * mid, -1, keepdims=True)), "norm")
    gate = checkpoint_name(norm @ p["gate"], "gate")
    return mid + jnp.tanh(gate) @ p["down"]


def looped(p, x):
    """A loop with matmuls inside, whose backward needs what the loop made on its way."""

    def step(h, _):
        return jnp.sin(h @ p["square"]), None

    start = checkpoint_name(x @ p["gate"] @ p["down"], "start")
    end = checkpoint_name(jax.lax.scan(step, start, length=3)[0], "end")
    return checkpoint_name(jnp.tanh(end), "out") @ p["gate"]


@jax.custom_vjp
def kernel(a, b):
    """A user's product with its own rule, which keeps what its forward made."""
    return jnp.tanh(a @ b)


def _kernel_forward(a, b):
    product = a @ b
    return jnp.tanh(product), (a, b, product)


def _kernel_backward(kept, g):
    a, b, product = kept
    g = g * (1 - jnp.tanh(product) ** 2)
    return g @ b.mT, jnp.einsum("...i,...j->ij", a, g)


kernel.defvjp(_kernel_forward, _kernel_backward)


def own_rules(p, x):
    """Functions with derivative rules of their own, and a frozen branch."""
    h = checkpoint_name(kernel(x, p["gate"]), "h")
    act = checkpoint_name(jax.nn.silu(jax.nn.relu(h)), "act")
    still = checkpoint_name(jax.lax.stop_gradient(act @ p["down"]), "still")
    return still * kernel(act, p["down"])


def routed(p, x):
    """A choice by value: the order of a named activation's features steers the rest."""
    h = checkpoint_name(x @ p["gate"], "h")
    first = checkpoint_name(jnp.argsort(h, axis=-1), "order")
    picked = jnp.take_along_axis(h, first, axis=-1)
    return checkpoint_name(jnp.cos(picked), "act") @ p["down"]


def searched(p, x):
    """A loop of unknown length, through which no gradient goes, finds a scale by halving."""
    gate = checkpoint_name(x @ p["gate"], "gate")

    def too_large(scale):
        return jnp.max(jnp.abs(gate)) * scale > 2.0

    scale = jax.lax.stop_gradient(jax.lax.while_loop(too_large, lambda s: s / 2, jnp.mean(gate)))
    return x + checkpoint_name(jnp.sin(gate * scale), "act") @ p["down"]


X = shape(3, 5, 8)
MLP = jax.eval_shape(params)
HEADS = {name: shape(8, 8) for name in "qkvo"}
KEY = jax.eval_shape(lambda: jax.random.key(0))
# name -> block, arguments, differentiated positions, codecs
CASES = {
    "mlp": (mlp, (MLP, X), None, (INT8,)),
    "mlp, frozen weights": (mlp, (MLP, X), (1,), (INT8,)),
    "attention": (attention, (HEADS, X), None, (INT8,)),
    "attention, frozen weights": (attention, (HEADS, X), (1,), (INT8,)),
    "twice": (twice, (MLP, X), None, (INT8, INT4)),
    "dropout": (dropout, (MLP, X, KEY), (0, 1), (INT8,)),
    "residual": (residual, (MLP, X), None, (INT8,)),
    "residual, frozen weights": (residual, (MLP, X), (1,), (INT8,)),
    "looped": (looped, ({**MLP, "square": shape(8, 8)}, X), None, (INT8,)),
    "own rules": (own_rules, (MLP, X), None, (INT8,)),
    "routed": (routed, (MLP, X), None, (INT8,)),
    "searched": (searched, (MLP, X), None, (INT8,)),
}


def risk(name, action):
    """An invented table: each name its own risk, four bits ten times as much."""
    base = 0.001 * (1 + sum(map(ord, name)) % 7)
    return base * (10 if action.codec == "int4" else 1)


def all_policies(graph, codecs, names=None):
    """Every policy over the names of a block, or some of them; integers never compressed."""
    choices = {}
    for name in graph.sites if names is None else names:
        places = graph.sites[name]
        dtype = graph.avals[graph.nodes[places[0]].outputs[0]].dtype
        choices[name] = [hl.Recompute(), hl.Store()]
        choices[name] += [c for c in codecs if jnp.issubdtype(dtype, jnp.floating)]
    for actions in itertools.product(*choices.values()):
        yield hl.Policy(dict(zip(choices, actions, strict=True)))


@dataclasses.dataclass(frozen=True)
class Remembering(BlockProgram):
    """A block's program that traces backward under a policy once."""

    seen: dict = dataclasses.field(default_factory=dict, compare=False)

    def figures(self, policy):
        if policy not in self.seen:
            self.seen[policy] = super().figures(policy)
        return self.seen[policy]


@functools.cache
def evaluated(case):
    """The program of a case's block, and every policy with the figures of its real backward."""
    block, args, argnums, codecs = CASES[case]
    program = Remembering(**vars(block_program(block, *args, argnums=argnums)))
    return program, [(p, program.figures(p)) for p in all_policies(program.graph, codecs)]


def policy_risk(policy):
    return math.sqrt(
        math.fsum(
            risk(name, policy[name]) ** 2
            for name in policy
            if isinstance(policy[name], hl.Compress)
        )
    )


def undominated(triples):
    """Distinct triples that no other one is as small as in all three places."""
    found = []
    for t in sorted({tuple(round(x, 12) for x in t) for t in triples}):
        if not any(all(a <= b + 1e-12 for a, b in zip(f, t, strict=True)) for f in found):
            found.append(t)
    return found
