"""`hl.plan` for devices that are not here: a mesh of GPUs, host memory, a TPU."""

import dataclasses
import importlib.util
import itertools
import logging

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import hilore_jax as hl
from blocks import mlp, params
from hilore_jax.planning.memory import Memory
from hilore_jax.planning.search import check_offload
from hilore_jax.planning.target import parse_target

D, F, N = 128, 512, 24
ONE = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16), jax.eval_shape(lambda: params(d=D, f=F))
)
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None


def x_of(rows):
    return jax.ShapeDtypeStruct((rows, 256, D), jnp.bfloat16)


def update(policies, stack, x):
    def loss(stack):
        out = hl.scan_blocks(mlp, stack, x, policies)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    return jax.tree.map(lambda a, g: a - 0.1 * g, stack, jax.grad(loss)(stack)), {}


def plan(target, memory, rows, place=None, data=None, **options):
    def arguments(policies):
        lengths = [len(list(run)) for _, run in itertools.groupby(policies)]
        stacks = tuple(
            jax.tree.map(lambda s, n=n: s.update(shape=(n, *s.shape), sharding=place), ONE)
            for n in lengths
        )
        return stacks, x_of(rows).update(sharding=data)

    return hl.plan(
        update,
        arguments,
        blocks=hl.Blocks(mlp, (ONE, x_of(rows)), N),
        budget=hl.Budget(memory),
        target=target,
        **options,
    )


@pytest.mark.gpu_target
def test_devices_of_a_mesh_divide_what_blocks_keep():
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
    places = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    found = plan("cuda:h100-80x4", "1.5x gc", 8, *places)
    kept = sum(entry.nbytes for entry in found.entries)
    above = found.memory.peak - found.gc.peak
    assert 0 < above < 0.5 * kept  # a quarter each, not the whole
    assert found.memory.peak <= found.budget and len(found.trials) <= 8
    assert found.predicted == pytest.approx(found.memory.peak, rel=0.03)
    # Bytes of all devices would not have fit.
    assert found.gc.peak + kept > found.budget
    everything = plan("cuda:h100-80x4", "4x gc", 8, *places)
    assert everything.removed_flops == 1


@pytest.mark.gpu_target
def test_a_plan_that_offloads_keeps_bytes_on_the_host():
    # A link so fast that offloading pays for these small matmuls too.
    h200 = dataclasses.replace(parse_target("cuda:h200"), host_link=1e15)
    without = plan(h200, "1.3x gc", 8, codecs=())
    found = plan(h200, "1.3x gc", 8, codecs=(), offload=True)
    names = {name for policy in found.policies for name in policy.names(hl.Offload)}
    assert names and found.memory.host > 0 == without.memory.host
    assert found.memory.peak <= found.budget
    assert found.recompute_seconds < without.recompute_seconds
    assert " O " in found.explain()


def test_nothing_is_offloaded_where_the_target_has_no_host_memory_and_that_is_said(caplog):
    with caplog.at_level(logging.WARNING, "hilore_jax"):
        found = plan("cpu", "1.0x gc", 8, codecs=(), offload=True)
    assert "offload" in caplog.text and "'cpu'" in caplog.text
    assert not any(entry.policy.names(hl.Offload) for entry in found.menu)


def test_a_program_that_offloads_nothing_is_refused():
    policies = (hl.Policy({"gate": hl.Offload()}), hl.Policy({}))
    with pytest.raises(ValueError, match=r"gate should be kept in host memory.*has none"):
        check_offload(policies, Memory(1, 1, 0, 1, 0, 0))
    check_offload(policies, Memory(1, 1, 0, 1, 8, 0))
    check_offload((hl.Policy({}),), Memory(1, 1, 0, 1, 0, 0))


@pytest.mark.skipif(not HAS_LIBTPU, reason="libtpu not installed (hilore_jax[plan-tpu])")
@pytest.mark.slow
def test_a_plan_for_a_tpu_that_is_not_here():
    # Large enough that activations leave the chip's own 128 MiB; two compilations, of 20 s each.
    found = plan("tpu:v5e", "12x gc", 256, codecs=())
    assert found.target == "tpu:v5e" and found.gc.temporaries > 0
    assert 2 * found.gc.peak < found.memory.peak <= found.budget
    assert found.removed_flops == 1 and 2 <= len(found.trials) <= 3
