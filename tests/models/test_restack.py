"""Blocks held in other stacks are the same blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.models.restack import restack

CONFIG = DecoderConfig(
    vocab_size=8, d_model=4, d_ff=6, n_layers=4, n_heads=1, n_kv_heads=1, head_dim=4, max_seq=8
)


def filled(lengths):
    """A decoder whose every number is another one, in stacks of some lengths."""
    abstract = nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    whole = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), abstract)
    return restack(whole, lengths)


def joined(decoder):
    stacks = [nnx.state(stack) for stack in decoder.segments]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *stacks)


@pytest.mark.parametrize("lengths", [(4,), (1, 3), (2, 1, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("before", [(4,), (2, 2)])
def test_blocks_keep_their_order_in_other_stacks(before, lengths):
    start = filled(before)
    found = restack(start, lengths)
    assert found.segment_lengths == lengths and start.segment_lengths == before
    jax.tree.map(np.testing.assert_array_equal, joined(found), joined(start))
    # Witness: blocks differ, so that another order would show.
    kernels = joined(start)["q_proj"]["kernel"].get_value()
    assert not np.array_equal(kernels[0], kernels[1])


def test_stacks_that_fit_are_shared():
    start = filled((1, 3))
    found = restack(start, (1, 2, 1))
    kernel = lambda decoder: decoder.segments[0].q_proj.kernel.get_value()  # noqa: E731
    assert kernel(found) is kernel(start)


@pytest.mark.parametrize("lengths", [(3,), (5,), (4, 0), (5, -1)])
def test_lengths_that_are_not_the_blocks_are_refused(lengths):
    with pytest.raises(ValueError, match="lengths that sum to n_layers"):
        restack(filled((4,)), lengths)
