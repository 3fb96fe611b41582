"""`hl.explain`: a table that agrees with what autodiff keeps and what the gradient computes."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import hilore_jax as hl
from blocks import D, F, inputs, mlp, params
from hilore_jax import tracing
from hilore_jax.explain import format_bytes
from hilore_jax.models.config import DecoderConfig
from hilore_jax.training.report import block_and_arguments
from hilore_jax.work import Work

X = inputs()
P = params()
FULL = 3 * 5 * F * 4  # bytes of gate, up or act
GATE_FLOPS = 2 * 3 * 5 * D * F


def rows(policy, block=mlp):
    explanation = hl.explain(policy, block, P, X)
    return explanation, {row.name: row for row in explanation.rows}


@pytest.mark.newest
def test_recompute_says_what_storing_each_name_would_spare():
    explanation, by = rows(hl.Policy({}))
    assert list(by) == ["norm", "gate", "up", "act"]
    assert explanation.recomputed == Work(2, 2 * GATE_FLOPS)
    assert by["gate"].recomputed == Work(1, GATE_FLOPS)
    assert by["norm"].recomputed == by["act"].recomputed == Work(0, 0)
    assert explanation.kept_bytes == 0
    assert by["gate"].exact_bytes == FULL and by["gate"].shape == (3, 5, F)
    assert explanation.input_bytes == 4 * (3 * D * F + 3 * 5 * D)


@pytest.mark.newest
@pytest.mark.parametrize("codec", ["int8", "int4", "fp8_e4m3"])
def test_bytes_are_those_that_autodiff_keeps(codec):
    policy = hl.Policy({"gate": hl.Compress(codec), "up": hl.Store(), "act": hl.Compress(codec)})
    explanation, by = rows(policy)
    kept = tracing.saved_residuals(hl.remat(policy)(mlp), P, X)
    assert explanation.kept_bytes == sum(r.nbytes for r in kept if "argument" not in r.origin)
    payload = FULL // 8 if codec == "int4" else FULL // 4
    assert by["gate"].kept_bytes == by["act"].kept_bytes == payload + 3 * 5 * 2
    assert explanation.saved_bytes_by_action == {
        "store": FULL,
        "compress": 2 * (payload + 30),
        "offload": 0,
        "recompute": 0,
    }
    assert explanation.compression_savings == 2 * (FULL - payload - 30)
    assert explanation.recomputed.matmuls == 0


def test_elementwise_taint_is_listed():
    explanation, by = rows(hl.Policy({"gate": hl.Compress(), "up": hl.Store()}))
    assert [name for name, row in by.items() if row.tainted] == ["act"]
    assert "tainted" in str(explanation)
    _, by = rows(hl.Policy({"gate": hl.Compress(), "up": hl.Store(), "act": hl.Store()}))
    assert not any(row.tainted for row in by.values())


def test_matmuls_recomputed_to_stay_exact_are_counted():
    def deep(p, x):
        h = checkpoint_name(jnp.sin(x @ p["gate"]), "h")
        return jnp.sin(checkpoint_name(h @ p["down"], "out"))

    compressed = {"h": hl.Compress()}
    careful = hl.explain(hl.Policy(compressed), deep, P, X)
    loose = hl.explain(hl.Policy(compressed, tainted_matmuls=True), deep, P, X)
    # `out` is recomputed; exactly, it needs the exact h, hence x @ gate again. (The sine's own
    # derivative needs x @ gate in any case: h names its output, not its input.)
    assert careful.recomputed.matmuls == loose.recomputed.matmuls == 2
    named_input = hl.explain(
        hl.Policy({"pre": hl.Compress()}),
        lambda p, x: jnp.sin(jnp.sin(checkpoint_name(x @ p["gate"], "pre")) @ p["down"]),
        P,
        X,
    )
    assert named_input.recomputed.matmuls == 2
    assert any("1 of the recomputed matmuls" in note for note in named_input.notes)


def test_a_name_off_every_gradient_path_is_pointed_out():
    def unused(p, x):
        h = x @ p["gate"]
        checkpoint_name(h, "ghost")
        return jnp.sin(h)

    for action in (hl.Store(), hl.Compress()):
        explanation = hl.explain(hl.Policy({"ghost": action}), unused, P, X)
        assert explanation.rows[0].kept_bytes == 0
        assert any("'ghost' is not read by any gradient" in note for note in explanation.notes)


def test_bytes_kept_inside_a_loop_are_said_not_to_be_counted():
    def block(p, x):
        step = lambda c, _: (jnp.tanh(checkpoint_name(c @ p["gate"] @ p["down"], "a")), None)  # noqa: E731
        return jnp.sin(jax.lax.scan(step, x, None, length=5)[0])

    explanation = hl.explain(hl.Policy({"a": hl.Store()}), block, P, X)
    assert explanation.rows[0].looped
    (note,) = explanation.notes
    assert note.startswith("'a' is named inside a loop or branch") and "not counted" in note
    assert not any("not read by any gradient" in note for note in explanation.notes)


def test_no_rematerialization_and_repeated_names():
    explanation, _ = rows(hl.Policy(default=hl.Store()))
    assert explanation.recomputed == Work(0, 0)

    def twice(p, x):
        y = checkpoint_name(jnp.sin(x) @ p["gate"], "h")
        return jnp.sin(checkpoint_name(jnp.sin(y) @ p["down"], "h")) @ p["up"]

    explanation = hl.explain(hl.Policy({"h": hl.Compress()}), twice, P, X)
    assert explanation.rows[0].sites == 2 and "h x2" in str(explanation)
    assert explanation.rows[0].kept_bytes == 15 * F + 15 * D + 2 * 30


@pytest.mark.newest
def test_table_and_abstract_arguments():
    shapes = jax.eval_shape(lambda: (P, X))
    policy = hl.Policy({"gate": hl.Compress("int8", axis=1, tile=32), "act": hl.Store()})
    text = str(hl.explain(policy, mlp, *shapes))
    assert text == str(hl.explain(policy, mlp, P, X))
    lines = text.splitlines()
    assert lines[0].split() == "name shape dtype action kept exact matmuls GFLOP decoded".split()
    assert lines[2].split()[:5] == ["gate", "3x5x12", "float32", "int8:axis=1:tile=32", "252"]
    assert "backward recomputes 1 matmul, 0.000 GFLOP; a row's" in text and "not add up" in text
    assert "recomputes 2 matmuls," in str(hl.explain(hl.Policy({}), mlp, *shapes))


@pytest.mark.newest
def test_a_real_block_recomputes_no_matmul_once_its_products_are_kept():
    config = DecoderConfig(
        vocab_size=8, d_model=16, d_ff=24, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8
    )
    block, arguments = block_and_arguments(config, 2, 4)

    def matmuls(policy, argnums=(0, 1)):
        explanation = hl.explain(hl.parse_policy(policy), block, *arguments, argnums=argnums)
        return explanation.recomputed.matmuls

    kept = "q=int8,v=int8,attn_out=int8,mlp_gate=int8,mlp_up=int8,k=store,attn_lse=store"
    # q, k, v, o, gate, up, and the attention's two products; never down, whose output is the end.
    assert matmuls("gc") == 8
    # The residual stream after attention: o reads the decoded output, or the attention, with q and
    # v before it, runs again so that o need not.
    assert matmuls(kept + ",tainted_matmuls") == 1
    assert matmuls(kept) == 5
    assert matmuls(kept + ",attn_residual=store") == 0
    assert matmuls("attn_out=store,attn_lse=store") == 6  # the attention is not run again
    # The angles' own derivative reads q and k before their rotation.
    assert matmuls(kept + ",attn_residual=store", argnums=None) == 2


def test_wrong_policies_are_refused():
    with pytest.raises(ValueError, match=r"\['gaet'\] not found"):
        hl.explain(hl.Policy({"gaet": hl.Store()}), mlp, P, X)
    with pytest.raises(ValueError, match="takes no NNX modules"):
        hl.explain(
            hl.Policy({}), lambda m, x: m(x), nnx.Linear(8, 8, rngs=nnx.Rngs(0)), X, argnums=(0,)
        )
    with pytest.raises(TypeError, match=r"hl\.explain takes an hl\.Policy.*parse_policy\('gc'\)"):
        hl.explain("gc", mlp, P, X)


def test_format_bytes():
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 << 20, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "3.00 MiB",
        "5120.00 GiB",
    ]


def tanh_block(w, x):
    return jnp.sin(checkpoint_name(x @ w, "h"))


class Module(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return jnp.sin(checkpoint_name(self.linear(x), "h"))

    def run(self, x):
        return self(x)


class InBody(Module):
    __call__ = hl.remat(hl.Policy({"h": hl.Compress()}))(Module.__call__)


W8, X8 = jnp.ones((8, 8)), jnp.ones((2, 8))
INT8 = hl.Policy({"h": hl.Compress()})


@pytest.mark.parametrize("own", [INT8, hl.Policy({}), hl.Policy({"h": hl.Store()})], ids=str)
@pytest.mark.parametrize("policy", [INT8, hl.Policy({})], ids=str)
def test_a_decorated_block_is_explained_as_if_it_were_not(policy, own):
    explain = lambda *args: str(hl.explain(policy, *args))  # noqa: E731
    plain, decorated = Module(nnx.Rngs(0)), hl.remat(own)(Module)(nnx.Rngs(0))
    assert explain(hl.remat(own)(tanh_block), W8, X8) == explain(tanh_block, W8, X8)
    partial = functools.partial(hl.remat(own)(tanh_block), W8)
    assert explain(partial, X8) == explain(lambda x: tanh_block(W8, x), X8)
    assert explain(decorated, X8) == explain(plain, X8)
    assert explain(hl.remat(own)(plain), X8) == explain(plain, X8)
    assert explain(hl.remat(own)(plain.run), X8) == explain(plain, X8)
    call = lambda m, x: m(x)  # noqa: E731
    assert explain(call, decorated, X8) == explain(call, plain, X8)
    assert explain(call, InBody(nnx.Rngs(0)), X8) == explain(call, plain, X8)
    assert explain(InBody(nnx.Rngs(0)).__call__, X8) == explain(plain, X8)
    # Explaining changed neither module.
    assert type(decorated).__call__ is not Module.__call__
    kept = tracing.saved_residuals(lambda x: decorated(x), X8)
    assert any("int8" in r.dtype for r in kept) == (own == INT8)


def test_a_name_of_an_inner_decorated_function_is_left_to_it():
    inner = hl.remat(INT8)(lambda x: jnp.sin(checkpoint_name(x @ W8, "h")))
    explanation = hl.explain(hl.Policy({}), lambda x: inner(x) + x, X8)
    assert explanation.rows[0].recomputed == Work(0, 0)
    assert any("'h' is named inside an inner function" in note for note in explanation.notes)
    with pytest.raises(ValueError, match="leave the name out of this one"):
        hl.explain(INT8, lambda x: inner(x) + x, X8)
