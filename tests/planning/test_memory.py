import importlib.util
import json
import logging
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hilore_jax.planning import memory as memory_module
from hilore_jax.planning import memory_cache
from hilore_jax.planning.memory import Memory, TargetMemoryError, compiled_memory
from hilore_jax.planning.memory_cache import Cache, write_whole
from hilore_jax.planning.target import parse_target

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason="libtpu not installed")


@pytest.fixture(scope="module")
def cpu():
    return parse_target("cpu")


@pytest.fixture(scope="module")
def two():
    return parse_target("cpux2")


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


@pytest.fixture
def compilations(monkeypatch):
    """A list that grows by one with every compilation."""
    done = []
    real = memory_module.compile_for
    monkeypatch.setattr(memory_module, "compile_for", lambda *args: done.append(1) or real(*args))
    return done


def shape(*sizes, dtype=jnp.float32, **kwargs):
    return jax.ShapeDtypeStruct(sizes, dtype, **kwargs)


def abstract_mesh(sizes, names):
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def product(x, w):
    return x @ w


X, W = shape(64, 128), shape(128, 32)
PRODUCT = {"arguments": 4 * (64 * 128 + 128 * 32), "outputs": 4 * 64 * 32}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# What is reported


def test_a_products_bytes(cpu):
    memory = compiled_memory(product, X, W, target=cpu, cache=None)
    assert memory.arguments == PRODUCT["arguments"] == 49152
    assert memory.outputs == PRODUCT["outputs"] == 8192
    assert memory.aliased == memory.host == 0
    assert memory.peak == 49152 + 8192 + memory.temporaries
    assert memory.xla_peak >= memory.arguments


def test_temporaries_are_what_lies_between(cpu):
    def chain(x, w):
        return jnp.sin(x @ w) @ w.T

    size = shape(128, 128)
    between = compiled_memory(chain, size, size, target=cpu, cache=None).temporaries
    single = compiled_memory(product, size, size, target=cpu, cache=None).temporaries
    assert between - single >= 4 * 128 * 128


def test_donated_arguments_hold_the_outputs(cpu):
    def update(state, batch):
        return jax.tree.map(lambda s: s + batch.sum(), state), batch.mean()

    state = {"a": shape(16, 8), "b": shape(5)}
    free = compiled_memory(update, state, shape(8), target=cpu, cache=None)
    donated = compiled_memory(update, state, shape(8), target=cpu, donate=(0,), cache=None)
    assert free.aliased == 0
    assert donated.aliased == 4 * (16 * 8 + 5)
    assert donated.arguments == free.arguments == 4 * (16 * 8 + 5 + 8)
    assert free.peak - donated.peak == donated.aliased


def test_peak_by_hand():
    memory = Memory(arguments=100, outputs=30, aliased=20, temporaries=7, host=1000, xla_peak=1)
    assert memory.peak == 117


def test_memory_round_trips():
    memory = Memory(1, 2, 3, 4, 5, 6)
    assert Memory.from_dict(json.loads(json.dumps(memory.to_dict()))) == memory
    with pytest.raises(ValueError, match=r"fields \['arguments'\], expected"):
        Memory.from_dict({"arguments": 1})
    for bad in (-1, 1.5, "1", True):
        with pytest.raises(ValueError, match=f"host is {bad!r}, expected a number of bytes"):
            Memory.from_dict({**memory.to_dict(), "host": bad})


def test_cpu_programs_keep_their_barriers(cpu):
    # Without the target's compiler options, jax 0.10's backend undoes the rematerialization.
    def block(x, w):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return x

    def blocks(x, w):
        for _ in range(6):
            x = jax.checkpoint(block)(x, w)
        return x.sum()

    memory = compiled_memory(
        jax.grad(blocks), shape(1024, 64), shape(64, 64), target=cpu, cache=None
    )
    every_activation = 6 * 4 * 1024 * 64 * 4
    assert memory.temporaries < every_activation / 2


# Placement


def test_shardings_over_an_abstract_mesh_count_one_devices_bytes(two):
    mesh = abstract_mesh((2,), ("data",))
    x = shape(64, 128, sharding=NamedSharding(mesh, P("data", None)))

    def run(x, w):
        # The function's own constraint finds the mesh by its axis names.
        return jax.lax.with_sharding_constraint(x @ w, P("data", None))

    memory = compiled_memory(run, x, W, target=two, cache=None)
    assert memory.arguments == 4 * (32 * 128 + 128 * 32)  # half of x, all of w
    assert memory.outputs == 4 * 32 * 32


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_what_is_not_sharded_joins_the_others_mesh(two, kind):
    mesh = AbstractMesh((2,), ("data",), axis_types=(kind,))
    x = shape(64, 128, sharding=NamedSharding(mesh, P("data", None)))
    for args in ((x, W), (W.update(shape=(64, 64)), x)):
        memory = compiled_memory(product, *args, target=two, cache=None)
        assert memory.arguments == 4 * (32 * 128 + args[0 if args[1] is x else 1].size)


def test_shardings_over_the_targets_own_mesh(two):
    x = shape(64, 128, sharding=NamedSharding(two.mesh("data"), P(None, "data")))
    w = shape(128, 32, sharding=NamedSharding(two.mesh("data"), P("data", None)))
    memory = compiled_memory(product, x, w, target=two, cache=None)
    assert memory.arguments == PRODUCT["arguments"] // 2


def test_without_shardings_every_device_has_a_copy(two):
    assert compiled_memory(product, X, W, target=two, cache=None).arguments == 49152


def test_arrays_and_scalars_are_placed_wherever_they_lie(two):
    x = jax.device_put(jnp.ones((64, 128)), jax.devices("cpu")[1])
    memory = compiled_memory(lambda x, w, n: n * (x @ w), x, np.ones((128, 32), "f"), 2, target=two,
                             cache=None)  # fmt: skip
    assert memory.arguments == 49152 + 4


def test_keys_are_arguments(cpu):
    key = jax.eval_shape(lambda: jax.random.key(0))
    memory = compiled_memory(lambda k: jax.random.normal(k, (4,)), key, target=cpu, cache=None)
    assert (memory.arguments, memory.outputs) == (8, 16)


def test_what_cannot_be_placed(cpu, two):
    wide = NamedSharding(AbstractMesh((4,), ("data",)), P("data"))
    with pytest.raises(ValueError, match=r"argument\[0\]\['x'\].*4 devices; target 'cpux2' has 2"):
        compiled_memory(lambda t: t["x"], {"x": shape(8, sharding=wide)}, target=two, cache=None)
    other = NamedSharding(Mesh(np.array(jax.devices("cpu")[:2]), ("data",)), P("data"))
    with pytest.raises(ValueError, match=r"2 devices.*not those of target 'cpu'.*AbstractMesh"):
        compiled_memory(jnp.sin, shape(8, sharding=other), target=cpu, cache=None)
    with pytest.raises(TypeError, match=r"argument\[1\] is a str.*functools.partial"):
        compiled_memory(lambda x, mode: x, shape(8), "fast", target=cpu, cache=None)
    with pytest.raises(ValueError, match="takes no array"):
        compiled_memory(lambda: jnp.ones(3), target=cpu, cache=None)


# The cache


def test_a_hit_neither_compiles_nor_with_a_key_traces(cpu, cache, compilations):
    traces = []

    def traced(x, w):
        traces.append(1)
        return x @ w

    def memory(key):
        return compiled_memory(traced, X, W, target=cpu, key=key, cache=cache)

    first = memory("gc")
    assert memory("gc") == first and len(compilations) == 1 and len(traces) == 1
    memory(None)
    assert len(compilations) == 2
    jax.clear_caches()
    assert memory(None) == first
    assert len(compilations) == 2  # found by its text, for which it was traced
    assert len(traces) == 2
    assert len(files(cache.folder)) == 2


def test_without_a_cache_every_call_compiles(cpu, compilations):
    for _ in range(2):
        compiled_memory(product, X, W, target=cpu, key="k", cache=None)
    assert len(compilations) == 2


@pytest.mark.parametrize("key", ["k", None])
def test_what_makes_another_program_makes_another_entry(cpu, two, cache, compilations, key):
    split = NamedSharding(AbstractMesh((2,), ("data",)), P("data"))
    variants = [
        {},
        {"args": (shape(64, 128), shape(128, 16))},
        {"args": (shape(64, 128, dtype=jnp.bfloat16), shape(128, 32, dtype=jnp.bfloat16))},
        {"donate": (0,), "args": (shape(64, 64), shape(64, 64))},
        {"donate": (1,), "args": (shape(64, 64), shape(64, 64))},
        {"target": two},
        {"target": two, "args": (shape(64, 128, sharding=split), W)},
    ]
    for n, variant in enumerate(variants, start=1):
        options = {"target": cpu, "args": (X, W), **variant}
        args = options.pop("args")
        for _ in range(2):
            compiled_memory(product, *args, key=key, cache=cache, **options)
        assert len(compilations) == n, variant
    assert len(files(cache.folder)) == len(variants)


def test_functions_are_told_apart_by_key_and_by_text(cpu, cache, compilations):
    for key, fn in (("sin", jnp.sin), ("cos", jnp.cos), (None, jnp.sin), (None, jnp.cos)):
        for _ in range(2):
            compiled_memory(fn, X, target=cpu, key=key, cache=cache)
    assert len(compilations) == 4


def test_library_and_flags_are_part_of_a_key(cpu, cache, compilations, monkeypatch):
    def run():
        compiled_memory(jnp.sin, X, target=cpu, key="k", cache=cache)

    run()
    run()
    assert len(compilations) == 1
    monkeypatch.setattr(memory_module, "library_version", lambda: "other")
    run()
    assert len(compilations) == 2
    with jax.default_matmul_precision("float32"):
        run()
    assert len(compilations) == 3
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_cpu_enable_fast_math=false")
    run()
    assert len(compilations) == 4


def test_the_default_cache_is_in_the_librarys_folder(cpu, tmp_path, monkeypatch):
    monkeypatch.setenv("HILORE_CACHE", str(tmp_path))
    compiled_memory(jnp.sin, X, target=cpu)
    assert len(files(tmp_path / "plans")) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace(f'"outputs": {4 * 64 * 128}', '"outputs": 1'),
        lambda text: text.replace('"schema": 1', '"schema": 2'),
        lambda text: "[]",
        lambda text: "{}",
    ],
    ids=["empty", "cut", "another number", "another schema", "a list", "no fields"],
)
def test_a_damaged_entry_is_rebuilt(cpu, cache, compilations, caplog, damage):
    def run():
        return compiled_memory(jnp.sin, X, target=cpu, key="k", cache=cache)

    good = run()
    (path,) = cache.folder.iterdir()
    broken = damage(path.read_text())
    assert broken != path.read_text()
    path.write_text(broken)
    with caplog.at_level(logging.WARNING, "hilore_jax"):
        assert run() == good
    assert "will be rebuilt" in caplog.text and path.name in caplog.text
    caplog.clear()
    assert run() == good and len(compilations) == 2 and not caplog.text


def test_undecodable_bytes_are_rebuilt(cpu, cache, compilations, caplog):
    compiled_memory(jnp.sin, X, target=cpu, key="k", cache=cache)
    (path,) = cache.folder.iterdir()
    path.write_bytes(b"\xff\xfe\x00")
    compiled_memory(jnp.sin, X, target=cpu, key="k", cache=cache)
    assert len(compilations) == 2 and "will be rebuilt" in caplog.text


def test_an_entry_under_anothers_name_is_not_used(cache, caplog):
    cache.put({"program": "a"}, {"temporaries": 1})
    os.replace(cache.path({"program": "a"}), cache.path({"program": "b"}))
    assert cache.get({"program": "b"}) is None
    assert "checksum is wrong" in caplog.text


def test_an_interruption_leaves_nothing_half_written(cpu, cache, monkeypatch):
    cache.put({"program": "a"}, {"temporaries": 1})

    def interrupted(*args):
        raise KeyboardInterrupt

    before = files(cache.folder)
    monkeypatch.setattr(memory_cache.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.put({"program": "a"}, {"temporaries": 2})
    with pytest.raises(KeyboardInterrupt):
        compiled_memory(jnp.sin, X, target=cpu, cache=cache)
    assert files(cache.folder) == before
    assert cache.get({"program": "a"}) == {"temporaries": 1}


def test_a_file_is_never_seen_half_written(tmp_path, monkeypatch):
    path = tmp_path / "entry.json"
    write_whole(path, "old")
    seen = []
    real = os.replace
    monkeypatch.setattr(
        memory_cache.os,
        "replace",
        lambda a, b: seen.append((Path(a).read_text(), path.read_text())) or real(a, b),
    )
    write_whole(path, "new")
    assert seen == [("new", "old")] and path.read_text() == "new"


def test_a_folder_that_cannot_be_written_costs_only_the_cache(cpu, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file")
    memory = compiled_memory(product, X, W, target=cpu, cache=cache)
    assert memory.arguments == 49152
    assert "is not kept" in caplog.text


# Targets that are not here


@pytest.mark.gpu_target
def test_donation_and_sharding_on_absent_gpus():
    eight = parse_target("cuda:h100-80x8")
    mesh = abstract_mesh((2, 4), ("data", "fsdp"))
    w = shape(256, 64, dtype=jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp", None)))
    x = shape(32, 256, dtype=jnp.bfloat16, sharding=NamedSharding(mesh, P("data", None)))

    def update(w, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.sin(x @ w).astype(jnp.float32)))(w)
        return jax.lax.with_sharding_constraint(w - gradient, P("fsdp", None))

    memory = compiled_memory(update, w, x, target=eight, donate=(0,), cache=None)
    assert memory.arguments == 2 * (64 * 64 + 16 * 256)
    assert memory.outputs == memory.aliased == 2 * 64 * 64


@pytest.mark.gpu_target
def test_offloaded_residuals_are_host_bytes():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def layer(x, w):
        return jnp.sin(checkpoint_name(jnp.sin(x @ w), "h") @ w), None

    def loss(policy, w, x):
        return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)[0].sum()

    def memory(policy):
        gradient = jax.grad(lambda w, x: loss(policy, w, x))
        return compiled_memory(
            gradient, shape(4, 64, 64), shape(256, 64), target=parse_target("cuda:h200"), cache=None
        )

    assert memory(policy).host == 4 * 256 * 64 * 4
    assert memory(None).host == 0


@pytest.mark.gpu_target
def test_targets_are_told_apart_in_the_cache(cache, compilations):
    for name in ("cuda:h200", "cuda:l40s-48", "cuda:h200x2", "cuda:h200"):
        compiled_memory(product, X, W, target=parse_target(name), key="k", cache=cache)
    assert len(compilations) == 3


@pytest.mark.gpu_target
def test_missing_cudnn_is_named(monkeypatch):
    target = parse_target("cuda:h200")
    target.devices()
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "nvidia.cudnn" else real(n, *a)
    )

    def attention(x):
        raise RuntimeError("cuDNN not found.")  # what jax says while tracing its attention

    with pytest.raises(ImportError, match=r"cuDNN attention for 'cuda:h200'.*plan-gpu"):
        compiled_memory(attention, X, target=target, cache=None)


@needs_libtpu
def test_tpu_memory_with_donation_and_sharding():
    four = parse_target("tpu:v5e:2x2")
    mesh = abstract_mesh((4,), ("data",))
    x = shape(512, 256, sharding=NamedSharding(mesh, P("data", None)))
    memory = compiled_memory(lambda x: x + 1, x, target=four, donate=(0,), cache=None)
    assert memory.arguments == memory.outputs == memory.aliased == 4 * 128 * 256


@needs_libtpu
def test_a_program_too_large_for_a_tpu():
    big = shape(2**16, 2**16)
    with pytest.raises(TargetMemoryError, match=r"one device of 'tpu:v5e' \(16.0 GiB\)"):
        compiled_memory(product, big, big, target=parse_target("tpu:v5e"), cache=None)
