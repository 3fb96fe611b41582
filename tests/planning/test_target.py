import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from hilore_jax.planning import present, topology
from hilore_jax.planning.memory import compiled_memory, memory_of
from hilore_jax.planning.target import Target, known_targets, parse_target, platform_of
from hilore_jax.planning.target_data import GPUS, TPUS
from hilore_jax.planning.target_file import load_target

GIB = 2**30
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
CUDA = [name for name in known_targets() if name.startswith("cuda")]
TPU = [name for name in known_targets() if name.startswith("tpu")]


@pytest.mark.parametrize(
    ("name", "memory", "bfloat16", "float32", "bandwidth", "link", "host"),
    [
        ("cuda:h200", 141, 989.4, 494.7, 4800, 450, 64),
        ("cuda:h100-80", 80, 989.4, 494.7, 3350, 450, 64),
        ("cuda:a100-80", 80, 312.0, 156.0, 2039, 300, 32),
        ("cuda:l40s-48", 48, 362.05, 183.0, 864, 32, 32),
        ("cuda:rtx4090-24", 24, 165.2, 82.6, 1008, 32, 32),
        ("tpu:v5e", 16, 197.0, 197.0, 819, 200, 0),
        ("tpu:v5p", 95, 459.0, 459.0, 2765, 600, 0),
        ("tpu:v6e", 32, 918.0, 918.0, 1638, 400, 0),
    ],
)
def test_datasheet_figures(name, memory, bfloat16, float32, bandwidth, link, host):
    target = parse_target(name)
    assert target.name == name and target.count == 1 and target.source == "datasheet"
    assert target.memory == memory * GIB
    assert target.flops_of("bfloat16") == pytest.approx(bfloat16 * 1e12)
    assert target.flops_of(jnp.float32) == pytest.approx(float32 * 1e12)
    assert target.bandwidth == pytest.approx(bandwidth * 1e9)
    assert (target.link, target.host_link) == pytest.approx((link * 1e9, host * 1e9))


def test_every_named_target_is_in_the_table_above():
    assert len(known_targets()) == 2 + len(GPUS) + len(TPUS) == 10


def test_h200_description_is_the_one_that_was_tried():
    tried = (Path(__file__).parents[1] / "data" / "h200.txtpb").read_text()
    assert parse_target("cuda:h200").description.split() == tried.split()


@pytest.mark.parametrize(
    ("text", "count", "description"),
    [
        ("cuda:h100-80x8", 8, GPUS["h100-80"].description()),
        ("cuda:rtx4090-24x2", 2, GPUS["rtx4090-24"].description()),
        ("tpu:v5e", 1, "v5e:2x2"),
        ("tpu:v5e:2x4", 8, "v5e:2x4"),
        ("tpu:v5p:2x2x4", 16, "v5p:2x2x4"),
        ("tpu:v6e:1x1", 1, "v6e:2x2"),
        ("cpux2", 2, ""),
        ("devicex2", 2, ""),
    ],
)
def test_counts_and_slices(text, count, description):
    target = parse_target(text)
    assert (target.name, target.count, target.description) == (text, count, description)
    assert parse_target(target) is target


@pytest.mark.parametrize(
    "text", ["h200", "cuda:h100", "cuda:h200x0", "cuda:h200x", "tpu:v4", "tpu:v5ex4", "tpu:v5e:8",
             "tpu:v5e:0x4", "cuda", "", "gpu", "CPU"]
)  # fmt: skip
def test_unknown_names_list_the_known_ones(text):
    with pytest.raises(ValueError, match="unknown target") as caught:
        parse_target(text)
    assert repr(text) in str(caught.value)
    assert all(name in str(caught.value) for name in known_targets())


def test_dtypes_without_units_have_the_rate_of_what_they_are_computed_in():
    a100, h100 = parse_target("cuda:a100-80"), parse_target("cuda:h100-80")
    assert a100.flops_of("float8_e4m3fn") == a100.flops_of("bfloat16") == 312e12
    assert h100.flops_of(jnp.float8_e5m2) == pytest.approx(1978.9e12)
    assert a100.flops_of("int4") == a100.flops_of(np.uint8) == 624e12
    assert a100.flops_of(np.dtype("float16")) == 312e12
    with pytest.raises(ValueError, match=r"no peak FLOP/s for float64.*float32"):
        a100.flops_of("float64")


def test_cpu_is_measured_once(monkeypatch):
    calls = []
    real = present._seconds
    monkeypatch.setattr(present, "_seconds", lambda *a, **k: calls.append(1) or real(*a, **k))
    present.measured_facts.cache_clear()
    first, second = parse_target("cpu"), parse_target("cpux2")
    assert len(calls) == 5  # four dtypes and the bandwidth
    assert first.source == "measured" and first.platform == "cpu" and first.host_link == 0
    assert first.flops == second.flops and first.bandwidth == second.bandwidth > 1e8
    assert all(rate > 1e8 for _, rate in first.flops)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert first.memory == total // len(jax.devices("cpu"))


def test_device_is_the_default_device():
    target = parse_target("device")
    assert target.devices() == jax.devices()[:1]
    assert target.sharding() == SingleDeviceSharding(jax.devices()[0])


def test_attached_gpu_of_a_known_kind_has_the_datasheets_figures():
    class Attached:
        device_kind = "NVIDIA L40S"
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 40 * GIB}

    facts = present.known_facts(Attached())
    assert facts is not None
    assert facts.memory == 40 * GIB and facts.bandwidth == pytest.approx(864e9)
    assert present.known_facts(jax.devices("cpu")[0]) is None


def test_too_few_devices_says_how_to_get_more():
    with pytest.raises(ValueError, match=r"99 cpu devices wanted.*device_count=99"):
        parse_target("cpux99")


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        *((name, name.partition(":")[0]) for name in (*CUDA, *TPU)),
        *(("cuda:h100-80x8", "cuda"), ("tpu:v5e:2x4", "tpu")),
        *((name, "cpu") for name in ("cpu", "cpux1", "cpux16", "device", "devicex4")),
        *((name, None) for name in ("half", "cpux0", "cpus", "my cuda:h200", "devices", "")),
    ],
)
def test_a_platform_is_known_by_the_targets_name(name, platform):
    assert platform_of(name) == platform


def test_a_device_of_this_process_has_its_own_platform(monkeypatch):
    for own, platform in (("gpu", "cuda"), ("cuda", "cuda"), ("tpu", "tpu")):
        monkeypatch.setattr(jax, "devices", lambda own=own: [types.SimpleNamespace(platform=own)])
        assert platform_of("device") == platform_of("devicex2") == platform
        assert platform_of("cpux2") == "cpu"


def test_meshes_hold_the_targets_devices():
    target = parse_target("cpux2")
    assert dict(target.mesh("data").shape) == {"data": 2}
    mesh = target.mesh(("data", "fsdp"), (1, 2))
    assert dict(mesh.shape) == {"data": 1, "fsdp": 2}
    assert list(mesh.devices.flat) == jax.devices("cpu")[:2]
    assert target.sharding() == NamedSharding(target.mesh(), PartitionSpec())
    for axes, shape in (("data", (4,)), (("a", "b"), None), (("a", "b"), (2, 2))):
        with pytest.raises(ValueError, match="does not hold the 2 devices of target 'cpux2'"):
            target.mesh(axes, shape)


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [("cuda:h200", "jax_cuda13_plugin", "plan-gpu"), ("tpu:v5e", "libtpu", "plan-tpu")],
)
def test_missing_extras_are_named(monkeypatch, name, module, extra):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == module else real(n, *a)
    )
    topology.absent_devices.cache_clear()
    with pytest.raises(ImportError, match=re.escape(f'pip install "hilore_jax[{extra}]"')):
        parse_target(name).devices()


def written(tmp_path, fields) -> Path:
    path = tmp_path / "mine.json"
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return path


MINE = {
    "platform": "cuda",
    "memory": "16GiB",
    "flops": {"bfloat16": "97.5TFLOP/s", "int8": "390 TOP/s", "float32": 48.7e12},
    "bandwidth": "736GB/s",
    "host_link": "32GB/s",
    "description_file": "mine.txtpb",
    "count": 2,
}


def test_a_target_file(tmp_path):
    (tmp_path / "mine.txtpb").write_text("gpu_device_info {}")
    target = parse_target(str(written(tmp_path, MINE)))
    assert target == Target(
        name="mine",
        platform="cuda",
        count=2,
        memory=16 * GIB,
        flops=(("bfloat16", 97.5e12), ("int8", 390e12), ("float32", 48.7e12)),
        bandwidth=736e9,
        link=0.0,
        host_link=32e9,
        description="gpu_device_info {}",
        source="file",
    )


def test_a_target_file_may_build_on_a_known_one(tmp_path):
    target = load_target(written(tmp_path, {"like": "cuda:h100-80x8", "memory": 70 * GIB}))
    known = parse_target("cuda:h100-80x8")
    assert target.memory == 70 * GIB and target.name == "mine" and target.source == "file"
    assert (target.flops, target.count) == (known.flops, 8)
    assert target.description == known.description


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": None}, r"lacks \['memory'\].*'platform', 'memory', 'flops', 'bandwidth'"),
        ({"memory": "16"}, "'memory' is '16', expected a size with its unit"),
        ({"memory": 16}, "'memory' is 16, expected a size with its unit"),
        ({"bandwidth": "736"}, "'bandwidth' is '736', expected text with its unit"),
        ({"bandwidth": 736}, "'bandwidth' is 736, expected"),
        ({"bandwidth": "736TFLOP/s"}, "'bandwidth' is '736TFLOP/s', expected"),
        ({"bandwidth": True}, "'bandwidth' is True"),
        ({"flops": {"bfloat16": "97GB/s"}}, "'flops' of bfloat16 is '97GB/s'.*165TFLOP/s"),
        ({"flops": {}}, "'flops' is {}, expected dense peaks by dtype"),
        ({"link": "-1GB/s"}, "'link' is '-1GB/s'"),
        ({"platform": "gpu"}, "'platform' is 'gpu', expected 'cpu', 'cuda' or 'tpu'"),
        ({"count": 0}, "'count' is 0"),
        ({"bandwith": "1GB/s"}, r"unknown fields \['bandwith'\]"),
        ({"description": "x"}, "give one"),
        ({"description_file": "none.txtpb"}, "no description file"),
        ({"like": 3}, "'like' is 3"),
        ({"like": "cuda:h300"}, "unknown target 'cuda:h300'"),
    ],
)
def test_bad_target_files(tmp_path, change, message):
    (tmp_path / "mine.txtpb").write_text("")
    fields = {k: v for k, v in {**MINE, **change}.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        load_target(written(tmp_path, fields))


def test_target_files_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="not JSON"):
        load_target(written(tmp_path, "{"))
    with pytest.raises(ValueError, match="holds a list, not an object"):
        load_target(written(tmp_path, "[]"))
    with pytest.raises(FileNotFoundError, match=r"no target file .*cuda:h200"):
        parse_target(str(tmp_path / "none.json"))


@pytest.mark.gpu_target
@pytest.mark.parametrize("name", CUDA)
def test_named_gpus_compile_and_reduce_over_two(name):
    one, two = parse_target(name), parse_target(name + "x2")
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=one.sharding())
    compiled = jax.jit(lambda x: x @ x).lower(x).compile(compiler_options=one.compiler_options())
    assert memory_of(compiled).arguments == 64 * 64 * 2
    mesh = two.mesh("data")
    rows = jax.ShapeDtypeStruct(
        (8, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data"))
    )
    total = jax.shard_map(
        lambda x: jax.lax.psum(x.sum(0), "data"),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
    )
    compiled = jax.jit(total).lower(rows).compile()
    assert memory_of(compiled).arguments == 4 * 64 * 4
    assert "all-reduce" in str(compiled.as_text())


@pytest.mark.gpu_target
def test_the_cpu_stays_the_default_device():
    device = parse_target("cuda:h200").devices()[0]
    assert device.platform == "gpu" and device.device_kind == "NVIDIA H200"
    assert jax.default_backend() == "cpu"
    assert all(d.platform == "cpu" for d in jax.devices())
    assert (jnp.ones(2) + 1).devices() == {jax.devices("cpu")[0]}


@pytest.mark.gpu_target
def test_a_wrong_description_is_shown():
    with pytest.raises(ValueError, match=r"does not compile for this target.*jax-cuda13-pjrt"):
        topology.absent_devices("cuda", 1, "nonsense {")


LATE = """
import jax, jax.numpy as jnp, json, logging, os
logging.getLogger("jax").setLevel(logging.CRITICAL)  # the plugin's refusal, in full
assert jax.default_backend() == "cpu"  # initialized
from jax.experimental import topologies
try:
    topologies.get_topology_desc("", platform="cuda", topology="1x1x1")
except NotImplementedError:  # the plugin has refused to register
    pass
else:
    raise SystemExit(77)
from hilore_jax.planning.memory import compiled_memory
from hilore_jax.planning.target import parse_target
x = jax.ShapeDtypeStruct((96, 64), jnp.bfloat16)
memory = compiled_memory(
    lambda x: jnp.sin(x @ x.T) @ x, x, target=parse_target("cuda:l40s-48"), cache=None
)
assert (jnp.ones(2) + 1).devices() == {jax.devices("cpu")[0]}
assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ
print(json.dumps(memory.to_dict()))
"""


@pytest.mark.gpu_target
@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="jax would take the GPU here")
def test_a_process_where_it_is_too_late_compiles_the_same_bytes():
    x = jax.ShapeDtypeStruct((96, 64), jnp.bfloat16)
    here = compiled_memory(
        lambda x: jnp.sin(x @ x.T) @ x, x, target=parse_target("cuda:l40s-48"), cache=None
    )
    hidden = ("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "JAX_PLATFORMS")
    env = {k: v for k, v in os.environ.items() if k not in hidden}
    root = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-c", LATE], env=env, capture_output=True, text=True, timeout=240
    )
    if run.returncode == 77:
        pytest.skip("NVIDIA's libraries are installed, so that the plugin registers by itself")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == here.to_dict()


@pytest.mark.skipif(not HAS_LIBTPU, reason='libtpu not installed (pip "hilore_jax[plan-tpu]")')
@pytest.mark.parametrize("name", [*TPU, "tpu:v5e:2x2"])
def test_tpus_compile(name):
    target = parse_target(name)
    assert len(target.devices()) == target.count
    kind = TPUS[name.split(":")[1]].kind
    assert {device.device_kind for device in target.devices()} == {kind}
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=target.sharding())
    compiled = jax.jit(lambda x: x @ x).lower(x).compile()
    assert memory_of(compiled).arguments == 256 * 256 * 2
    assert jax.default_backend() == "cpu"


@pytest.mark.skipif(not HAS_LIBTPU, reason='libtpu not installed (pip "hilore_jax[plan-tpu]")')
def test_a_slice_that_does_not_exist():
    with pytest.raises(ValueError, match=r"knows no slice 'v5e:3x1'.*'v5e:2x4'"):
        parse_target("tpu:v5e:3x1").devices()
