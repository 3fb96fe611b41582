"""Threefry-2x32 with 20 rounds: random words from a key and a counter, and from nothing else.

Pinned here, since jax's own generators may change between versions and depend on flags: the words
of a projection must be the same for a trainer and for whoever receives its packets.
"""

import jax.numpy as jnp
from jaxtyping import Array, UInt32

GENERATOR = "threefry2x32-20"
"""What packets and checkpoints name; another generator is refused there."""

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry2x32(
    key0: UInt32[Array, "*#n"],
    key1: UInt32[Array, "*#n"],
    count0: UInt32[Array, "*#n"],
    count1: UInt32[Array, "*#n"],
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Two random words for each counter (Salmon et al. 2011, "Parallel Random Numbers").

    Args:
        key0: first word of the key, uint32; all four broadcast.
        key1: second word of the key.
        count0: first word of the counter.
        count1: second word of the counter.

    Returns:
        Two uint32 arrays of the broadcast shape.

    Example:
        >>> zero = jnp.uint32(0)
        >>> [hex(word) for word in threefry2x32(zero, zero, zero, zero)]
        ['0x6b200159', '0x99ba4efe']
    """
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(_PARITY))
    x0, x1 = count0 + key0, count1 + key1
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << rotation) | (x1 >> (32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1
