"""A checkpoint written over four devices is read onto four, two and one, in the shardings asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The number of virtual devices is set before jax starts, so another process is needed.
SCRIPT = """
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hilore_jax.training import checkpoint
from hilore_jax.training.saver import Saver

SPECS = {"rows": PartitionSpec("fsdp"), "columns": PartitionSpec(None, "fsdp")}
SPECS |= {"whole": PartitionSpec(), "key": PartitionSpec()}


def shardings(devices):
    mesh = jax.make_mesh((devices,), ("fsdp",), devices=jax.devices()[:devices])
    return {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}


def state(seed, devices):
    rng = np.random.default_rng(seed)
    tree = {
        "rows": jnp.asarray(rng.normal(size=(8, 6)), jnp.float32),
        "columns": jnp.asarray(rng.normal(size=(6, 8)), jnp.bfloat16),
        "whole": jnp.int32(seed),
        "key": jax.random.key(seed),
    }
    return jax.device_put(tree, shardings(devices))


def plain(leaf):
    key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if key else leaf)


assert jax.device_count() == 4
folder = Path(sys.argv[1])
written = state(5, 4)
assert len(written["rows"].addressable_shards) == 4
with Saver(folder) as saver:
    saver.save(5, written, {"fingerprint": {}})
for devices in (4, 2, 1):
    asked, target = shardings(devices), state(0, devices)
    abstract = jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=asked["rows"])
    found, _ = checkpoint.restore(folder, target | {"rows": abstract}, {})
    for name, leaf in found.items():
        assert leaf.dtype == written[name].dtype, name
        assert leaf.sharding.is_equivalent_to(asked[name], leaf.ndim), (name, leaf.sharding)
        np.testing.assert_array_equal(plain(leaf), plain(written[name]), err_msg=name)
print("same on 4, 2 and 1")
"""


@pytest.mark.slow
def test_four_devices_to_two_and_one(tmp_path):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "same on 4, 2 and 1" in done.stdout
