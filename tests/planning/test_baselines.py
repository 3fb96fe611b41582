"""Baselines choose what their papers say, on a real decoder block and on one by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from hilore_jax.actions import Compress, Policy, Store
from hilore_jax.models.config import DecoderConfig
from hilore_jax.planning.baselines import BASELINES, Block, baseline, tensor_error
from hilore_jax.training.report import block_and_arguments

GC, NONE = Policy({}), Policy(default=Store())
CONFIG = DecoderConfig(
    vocab_size=32, d_model=64, d_ff=192, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16
)


class Toy:
    bandwidth, host_link = 1e9, 0.0

    def flops_of(self, dtype):
        return 1e9


@pytest.fixture(scope="module")
def decoder() -> Block:
    fn, args = block_and_arguments(CONFIG, 2, 64)
    return Block(fn, args, Toy(), argnums=(0, 1))


def plain(w, x):
    """A cheap wide value, then a dear narrow one."""
    wide = checkpoint_name(x @ w["wide"], "wide")
    narrow = checkpoint_name(jnp.sin(wide) @ w["narrow"], "narrow")
    return x + jnp.sin(narrow) @ w["out"]


@pytest.fixture(scope="module")
def toy() -> Block:
    w = {"wide": (8, 64), "narrow": (64, 16), "out": (16, 8)}
    w = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in w.items()}
    return Block(plain, (w, jax.ShapeDtypeStruct((10, 8), jnp.float32)), Toy())


def test_unknown_names_are_listed(toy):
    with pytest.raises(ValueError, match="no baseline 'sqr': expected one of gc, none, sqrt"):
        baseline("sqr", toy, 3, 0)
    with pytest.raises(ValueError, match="count=0"):
        baseline("gc", toy, 0, 0)


@pytest.mark.parametrize("name", BASELINES)
def test_one_policy_a_block(name, toy):
    found = baseline(name, toy, 5, 10_000)
    assert len(found) == 5 and all(isinstance(policy, Policy) for policy in found)


def test_fixed_ones(toy):
    assert baseline("gc", toy, 3, 0) == (GC,) * 3
    assert baseline("none", toy, 3, 0) == (NONE,) * 3
    kept = [i for i, policy in enumerate(baseline("sqrt", toy, 36, 0)) if policy == NONE]
    assert kept == [5, 11, 17, 23, 29, 35]


def test_dots_and_selective_split_a_decoder_block(decoder):
    (dots,) = set(baseline("dots", decoder, 4, 0))
    assert set(dots) == {"q", "k", "v", "attn_residual", "mlp_gate", "mlp_up"}
    (selective,) = set(baseline("selective", decoder, 4, 0))
    every = {*dots, "attn_norm", "mlp_norm", "mlp_act"}
    assert set(selective) == every  # all but attn_out, attn_lse and the block's own input
    assert all(selective[name] == Store() for name in selective)
    assert 0 < decoder.figures(selective)[1] < decoder.figures([])[1]


def test_greedy_stores_most_flops_a_byte_first(toy):
    # narrow: 20480 FLOPs for 640 bytes; wide: 10240 for 2560.
    narrow, wide = 640, 2560
    assert (
        toy.figures(["narrow"])[0] == narrow and toy.figures(["narrow", "wide"])[0] == narrow + wide
    )
    only, both = Policy({"narrow": Store()}), Policy({"narrow": Store(), "wide": Store()})
    assert baseline("greedy", toy, 4, narrow - 1) == (GC,) * 4
    assert baseline("greedy", toy, 4, 3 * narrow) == (only,) * 3 + (GC,)
    assert baseline("greedy", toy, 4, 4 * narrow + wide) == (both,) + (only,) * 3
    assert baseline("greedy", toy, 4, 10**9) == (both,) * 4


@pytest.mark.parametrize("stored", [[], ["attn_out", "attn_lse"], ["q", "mlp_gate", "mlp_norm"]])
def test_figures_are_those_of_the_real_backward_program(decoder, stored):
    real = decoder.program.figures(Policy({name: Store() for name in stored}))
    nbytes, seconds = decoder.figures(stored)
    assert nbytes == real.nbytes
    assert (seconds > 0) == (real.work.flops > 0)


def test_greedy_keeps_its_budget_and_pairs_names(decoder):
    found = baseline("greedy", decoder, 4, 10**9)
    assert decoder.figures(found[0])[1] == 0
    assert {"attn_out", "attn_lse"} <= set(found[0])  # neither saves attention alone
    for memory in (0, 50_000, 300_000):
        found = baseline("greedy", decoder, 4, memory)
        assert sum(decoder.figures(policy)[0] for policy in found) <= memory


def test_adacc_bounds_the_tensors_error(toy):
    # Enough for every value at one byte, not for one exact wide value.
    exact, memory = 2560, 4 * 900
    assert all(p == GC for p in baseline("adacc", toy, 4, 0))
    found = baseline("adacc", toy, 4, memory, error=0.01)
    assert any(policy.names(Compress) for policy in found)
    tight = baseline("adacc", toy, 4, memory, error=0.0)
    assert not any(policy.names(Compress) for policy in tight)
    assert memory < 4 * exact


def test_tensor_error_is_the_codecs():
    eight, four = Compress("int8", tile=32), Compress("int4", tile=32)
    assert 0.003 < tensor_error("a", eight) < 0.006 < 0.07 < tensor_error("b", four) < 0.12
