"""Menus: equal to brute force over every policy, and sensible for a real block."""

import dataclasses
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import hilore_jax as hl
from hilore_jax.models import shapes
from hilore_jax.models.block import Block
from hilore_jax.models.config import LoraConfig
from hilore_jax.models.linear import Dense
from hilore_jax.models.lora import LoraDense
from hilore_jax.planning import menu as menus
from hilore_jax.planning.backward import block_program
from hilore_jax.planning.cost import Roofline
from hilore_jax.planning.menu import block_menu
from hilore_jax.planning.options import block_options
from planner_blocks import (
    CASES,
    INT4,
    INT8,
    MLP,
    Device,
    X,
    all_policies,
    evaluated,
    policy_risk,
    risk,
    shape,
    undominated,
)


def menu_of(case, **kwargs):
    block, args, argnums, codecs = CASES[case]
    return block_menu(
        block,
        *args,
        **{"codecs": codecs, "risks": risk, "target": Device(), "argnums": argnums, **kwargs},
    )


@pytest.fixture(autouse=True)
def backward_is_traced_once(monkeypatch):
    """Menus of the shared cases take the figures that brute force has traced."""

    def program(block_fn, *args, argnums=None):
        for case, found in CASES.items():
            if found[:3] == (block_fn, args, argnums):
                return evaluated(case)[0]
        return block_program(block_fn, *args, argnums=argnums)

    monkeypatch.setattr(menus, "block_program", program)


def figures_of(menu):
    return [(e.nbytes, e.seconds, e.risk) for e in menu]


@pytest.mark.parametrize("case", CASES)
def test_a_menu_is_the_pareto_set_of_all_policies(case, monkeypatch):
    monkeypatch.setattr(menus, "_log_once", pytest.fail)  # the graph predicts the program's bytes
    program, found = evaluated(case)
    roofline = Roofline(Device())
    best = undominated(
        (figures.nbytes, roofline.backward(program, policy, figures), policy_risk(policy))
        for policy, figures in found
    )
    menu = menu_of(case, limit=1000)
    mine = undominated(figures_of(menu))
    assert len(menu) == len(mine) == len(best) > 1
    np.testing.assert_allclose(mine, best, rtol=1e-9)


def test_little_risk_beside_much_is_not_lost():
    """Risks so far apart that the squares of the small ones vanish beside the large."""
    sizes = {"a": 16, "b": 32, "c": 64}

    def block(params, x):
        for name in sizes:
            x += jnp.sin(checkpoint_name(x @ params[name], name)) @ params[f"{name} down"]
        return x

    shape = lambda *axes: jax.ShapeDtypeStruct(axes, jnp.float32)  # noqa: E731
    params = {name: shape(8, n) for name, n in sizes.items()}
    params |= {f"{name} down": shape(n, 8) for name, n in sizes.items()}
    args, codecs = (params, shape(256, 8)), (INT8, INT4)
    far = lambda name, action: {"int8": 0.0003, "int4": 0.5}[action.codec]  # noqa: E731
    program, roofline = block_program(block, *args), Roofline(Device())
    best = undominated(
        (
            (figures := program.figures(policy)).nbytes,
            roofline.backward(program, policy, figures),
            math.hypot(*(far(name, policy[name]) for name in policy.names(hl.Compress))),
        )
        for policy in all_policies(program.graph, codecs)
    )
    menu = block_menu(block, *args, codecs=codecs, risks=far, target=Device(), limit=1000)
    np.testing.assert_allclose(undominated(figures_of(menu)), best, rtol=1e-9)
    assert {e.policy for e in menu if not e.risk} >= {
        hl.Policy(dict.fromkeys(names, hl.Store())) for names in ("a", "ab", "abc")
    }


@pytest.mark.parametrize("case", ["mlp", "residual, frozen weights"])
def test_the_search_for_larger_blocks_finds_points_of_the_same_set(case, monkeypatch):
    whole = undominated(figures_of(menu_of(case, limit=1000)))
    monkeypatch.setattr(menus, "_EXACT", 0)
    menu = menu_of(case)
    found = undominated(figures_of(menu))
    assert len(found) == len(menu) > len(whole) // 3
    for point in found:
        assert np.isclose(whole, point, rtol=1e-9).all(1).any(), point
    assert found[0] == pytest.approx(whole[0])
    assert min(f[1] for f in found) == pytest.approx(min(f[1] for f in whole))


@pytest.mark.parametrize("case", ["mlp", "residual", "twice"])
def test_a_budget_is_met_to_the_byte(case):
    """Budgets that a policy uses up to its last byte and its last risk, and a byte less."""
    block, args, argnums, codecs = CASES[case]
    program, roofline = block_program(block, *args, argnums=argnums), Roofline(Device())
    options = block_options(program, roofline, codecs, risk, False)
    points = menus._Points(program.graph, roofline, options)
    every = {points.point(policy) for policy in all_policies(program.graph, codecs, options)}
    corners = sorted(every, key=lambda p: p.figures())
    for corner in corners[:: max(1, len(corners) // 12)]:
        for less in (0, 1):
            bounds = max(0, corner.nbytes - less), corner.squared
            within = [p for p in every if p.nbytes <= bounds[0] and p.squared <= bounds[1]]
            found = points._solve(nbytes=bounds[0], squared=bounds[1])
            assert (found is None) == (not within)
            if found is not None:
                assert found.nbytes <= bounds[0] and found.squared <= bounds[1] * (1 + 1e-9)
                assert found.seconds == pytest.approx(min(p.seconds for p in within), rel=1e-9)


@pytest.mark.newest
def test_entries_remove_the_matmuls_that_they_say():
    menu = menu_of("mlp")
    block, args, argnums, _ = CASES["mlp"]
    for entry in menu[::4]:
        explanation = hl.explain(entry.policy, block, *args, argnums=argnums)
        assert explanation.recomputed == (entry.matmuls, entry.flops)
        assert explanation.kept_bytes == entry.nbytes
        assert all(row.kept_bytes for row in explanation.rows if row.name in entry.policy)
        assert entry.risk == pytest.approx(policy_risk(entry.policy))
    assert {entry.matmuls for entry in menu} == {0, 1, 2}
    assert any(entry.policy.names(hl.Compress) for entry in menu)


def test_a_thinned_menu_keeps_its_ends_and_its_order():
    whole, menu = menu_of("mlp", limit=1000), menu_of("mlp", limit=6)
    assert len(whole) > len(menu) == 6
    assert [e.nbytes for e in menu] == sorted(e.nbytes for e in menu)
    assert {e.policy for e in menu} <= {e.policy for e in whole}
    assert menu[0].policy == hl.Policy({}) and menu[0].nbytes == 0
    assert min(e.seconds for e in menu) == min(e.seconds for e in whole)
    exact = [e.seconds for e in whole if not e.risk]
    assert min(e.seconds for e in menu if not e.risk) == min(exact)


def test_what_a_risk_forbids_is_not_offered():
    def cautious(name, action):
        return math.inf if name == "gate" else risk(name, action)

    menu = menu_of("mlp", risks=cautious)
    compressed = {name for e in menu for name in e.policy.names(hl.Compress)}
    assert compressed and "gate" not in compressed
    assert not any(e.risk for e in menu_of("mlp", risks=lambda n, a: math.inf))
    assert not any(e.risk for e in menu_of("mlp", codecs=()))
    with pytest.raises(ValueError, match=r"risk of norm=.* is -1"):
        menu_of("mlp", risks=lambda n, a: -1)
    with pytest.raises(ValueError, match="limit=1"):
        menu_of("mlp", limit=1)


@pytest.mark.newest
def test_integers_loops_and_short_axes_are_never_compressed():
    def block(p, x):
        h = checkpoint_name(x @ p["gate"], "h")
        order = checkpoint_name(jnp.argsort(x @ p["gate"], axis=-1).astype(jnp.int8), "order")
        scale = checkpoint_name(jnp.mean(h * h), "scalar")

        def step(c, _):
            return checkpoint_name(jnp.sin(c @ p["square"]), "inner"), None

        looped, _ = jax.lax.scan(step, x, length=2)
        return (jnp.sin(h) * order * jnp.sin(scale)) @ p["down"] + looped

    codecs = [INT8, INT4, hl.Compress("int8", axis=2, tile=4)]
    params = {**MLP, "square": shape(8, 8)}
    menu = block_menu(
        block, params, X, codecs=codecs, risks=lambda n, a: 1e-4, target=Device(), limit=1000
    )
    actions = {(name, type(e.policy[name])) for e in menu for name in e.policy}
    assert actions <= {("h", hl.Store), ("h", hl.Compress), ("order", hl.Store)} | {
        ("scalar", hl.Store)
    }
    assert {("h", hl.Compress), ("order", hl.Store)} <= actions


def test_blocks_with_nothing_to_choose_are_refused():
    def call(block, *args, **kwargs):
        return block_menu(block, *args, codecs=[INT8], risks=risk, target=Device(), **kwargs)

    with pytest.raises(ValueError, match="names no activation"):
        call(lambda x: jnp.sin(x), X)
    with pytest.raises(ValueError, match=r"in loop or branch bodies only .*'h': 'scan'"):
        call(lambda x: jax.lax.scan(lambda c, _: (checkpoint_name(c, "h"), None), x, length=2), X)
    with pytest.raises(ValueError, match=r"no gradient of the block reads .*'h'"):
        call(lambda x: checkpoint_name(x * 2, "h"), X)
    with pytest.raises(TypeError, match="NNX module"):
        call(lambda m, x: m(x), nnx.Linear(8, 8, rngs=nnx.Rngs(0)), X)


@pytest.mark.newest
def test_offload_is_offered_on_request_where_there_is_host_memory():
    fast = Device(host_link=1e10)
    menu = menu_of("dropout", target=fast, offload=True, limit=1000)
    entry = min((e for e in menu if e.policy.names(hl.Offload)), key=lambda e: e.nbytes)
    assert entry.nbytes == 0 and entry.seconds < 0.9 * max(e.seconds for e in menu_of("dropout"))
    nowhere = Device(host_link=0.0)
    for quiet in (menu_of("dropout"), menu_of("dropout", target=nowhere, offload=True)):
        assert not any(e.policy.names(hl.Offload) for e in quiet)


def test_a_wrong_prediction_is_logged_and_the_program_is_right(caplog, monkeypatch):
    honest = menu_of("twice")
    monkeypatch.setattr(
        menus._Points,
        "point",
        lambda self, policy, point=menus._Points.point: dataclasses.replace(
            found := point(self, policy), nbytes=found.nbytes + 1
        ),
    )
    menus._log_once.cache_clear()
    with caplog.at_level(logging.WARNING, "hilore_jax"):
        menu = menu_of("twice")
    assert "where its graph predicts" in caplog.text
    assert {e.nbytes for e in menu} <= {e.nbytes for e in honest}
    menus._log_once.cache_clear()


class NamedLora(LoraDense):
    """An adapter that names its low-rank product, which its own gradient reads."""

    def __call__(self, x):
        a, b = self.lora_a[...].astype(x.dtype), self.lora_b[...].astype(x.dtype)
        return Dense.__call__(self, x) + (checkpoint_name(x @ a, "low_rank") @ b) * self.scale


RISKS = {
    "q": 0.0098, "k": 0.014, "v": 0.0061, "attn_out": 0.0035, "attn_norm": 0.0167,
    "mlp_norm": 0.0081, "mlp_gate": 0.008, "mlp_up": 0.0051, "mlp_act": 0.0039,
}  # fmt: skip


def measured(name, action):
    """Gradient errors of one block of thirty, int8, as measured on a small real model."""
    return RISKS.get(name, math.inf) / 30**0.5 * (1.3 if action.axis == -1 else 1.0)


@dataclasses.dataclass(frozen=True)
class H200:
    bandwidth: float = 4.8e12
    host_link: float = 5.5e10

    def flops_of(self, dtype):
        return {"bfloat16": 989e12, "float32": 67e12}[dtype]


def qwen_block(adapter, tokens=2048, **kwargs):
    """Qwen2.5-3B's block, two sequences, its base weights frozen: adapters and x move."""
    config = shapes.family(
        "qwen2.5-3b", lora=LoraConfig(rank=16), dtype="bfloat16", param_dtype="bfloat16", **kwargs
    )

    def linear(name, config, *, rngs):
        return adapter(name, config, rngs=rngs)

    abstract = nnx.eval_shape(lambda: Block(config, linear=linear, rngs=nnx.Rngs(0)))
    graphdef, lora, frozen = nnx.split(abstract, nnx.LoRAParam, ...)
    half = shape(2, tokens, config.head_dim // 2)
    x = shape(2, tokens, config.d_model, dtype=jnp.bfloat16)
    mask = shape(2, tokens, dtype=jnp.bool_)

    def block(lora, frozen, x, cos, sin, mask):
        return nnx.merge(graphdef, lora, frozen)(x, cos, sin, mask)

    return block, (lora, frozen, x, half, half, mask)


CODECS = (hl.Compress(), hl.Compress("int8", axis=1, tile=32))


def within(menu, nbytes, risk=math.inf):
    """The fastest entry within two budgets."""
    return min((e for e in menu if e.nbytes <= nbytes and e.risk <= risk), key=lambda e: e.seconds)


MIB = 2**20


def test_the_menu_of_a_real_block_has_the_obvious_points():
    block, args = qwen_block(NamedLora)
    menu = block_menu(block, *args, codecs=CODECS, risks=measured, target=H200(), argnums=(0, 2))
    assert 20 <= len(menu) <= 40
    nothing = menu[0]
    assert nothing.policy == hl.Policy({}) and 0.45e12 < nothing.flops < 0.5e12
    # Attention's output and log-sum-exp first: no attention runs again.
    first = within(menu, 18 * MIB)
    assert set(first.policy.names(hl.Store)) >= {"attn_out", "attn_lse"}
    assert first.seconds < 0.7 * nothing.seconds
    # No matmul again, at half of the bytes of the exact names that do the same.
    none = [e for e in menu if e.matmuls == 0]
    compressed = min(none, key=lambda e: e.nbytes)
    assert {"mlp_gate", "mlp_up", "q", "attn_out"} <= set(compressed.policy.names(hl.Compress))
    assert {"k", "attn_residual"} <= set(compressed.policy.names(hl.Store))
    exact = min((e for e in none if not e.risk), key=lambda e: e.nbytes)
    assert compressed.nbytes < 130 * MIB < 200 * MIB < exact.nbytes
    assert 0 < compressed.risk < 0.015 / 36**0.5 * 1.5
    # Everything exact recomputes next to nothing.
    assert max(menu, key=lambda e: e.nbytes).seconds < 0.02 * nothing.seconds


def test_without_a_name_on_the_low_rank_product_compression_spares_no_big_matmul():
    def unnamed(name, config, *, rngs):
        return UnnamedLora(name, config, rngs=rngs)

    class UnnamedLora(LoraDense):
        def __call__(self, x):
            a, b = self.lora_a[...].astype(x.dtype), self.lora_b[...].astype(x.dtype)
            return Dense.__call__(self, x) + ((x @ a) @ b) * self.scale

    block, args = qwen_block(unnamed, tokens=256)
    menu = block_menu(block, *args, codecs=CODECS, risks=measured, target=H200(), argnums=(0, 2))
    # The adapter's gradient reads x A: a matmul, recomputed from the exact x, hence gate and up.
    assert not any(e.policy.names(hl.Compress) for e in menu)
    assert min(e.matmuls for e in menu) == 7


@pytest.mark.gpu_target
def test_cudnn_attention_is_an_opaque_kernel_whose_flops_count():
    block, args = qwen_block(NamedLora, attention="cudnn")
    graph = block_program(block, *args, argnums=(0, 2)).graph
    seconds = Roofline(H200()).nodes(graph)
    (place,) = graph.sites["attn_lse"]
    (kernel,) = [
        i
        for i, node in enumerate(graph.nodes)
        if node.kind == "heavy" and node.eqn.primitive.name != "dot_general"
    ]
    causal = 4 * 2 * 16 * 2048**2 * 128 / 2 / 989e12  # its two products at the peak
    assert kernel < place and seconds[kernel] == pytest.approx(causal)
    menu = block_menu(block, *args, codecs=CODECS, risks=measured, target=H200(), argnums=(0, 2))
    assert min(e.matmuls for e in menu) == 0
    # Cheap attention: gate or up in int8 comes before its output.
    small = within(menu, 64 * MIB).policy
    assert {"mlp_gate", "mlp_up"} & set(small.names(hl.Compress)), str(small)
