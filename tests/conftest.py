"""What every test runs under: two CPU devices, type-checked arrays, no hidden downloads.

Warnings are errors (pyproject.toml). Two of JAX's strict modes stay off: rank promotion and dtype
promotion both reject `scale[d_model] * x[batch, seq, d_model]` and `bfloat16 * float32` in the
functions that users write and hand to `hl.remat`, and those must keep working. No compilation cache
is configured, so that a test which counts compilations counts the same on every machine; to rerun
faster, set JAX_COMPILATION_CACHE_DIR yourself.
"""

import importlib.util
import os
from pathlib import Path

# Before jax is imported by anything. Each is a default: an explicit setting, such as
# JAX_PLATFORMS=cuda on a machine that has a GPU, is kept.
#
# LLVM optimizes no code: most of a test is compilation, of programs that run for a moment. What
# they compute, keep and recompute is decided before LLVM, and is the same.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0 "
    f"{os.environ.get('XLA_FLAGS', '')}".strip()
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# With this, jax's CUDA plugin loads where there is no GPU, and compiles for one (gpu_target).
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# torch's threads and XLA's would fight over two cores: forwards take ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis
import jaxtyping
import pytest

# Kept alive for the session: every array annotation of the package is checked on every call.
_type_checking = jaxtyping.install_import_hook("hilore_jax", "beartype.beartype")
# Before pytest imports a file of it for its examples alone, which would be a second copy.
import hilore_jax as hl  # noqa: E402

# Fresh examples on a developer's machine; the same ones in CI, where a change must not fail for a
# corner of code that it did not touch. No deadline: the first example pays for compilation.
hypothesis.settings.register_profile(
    "hilore", deadline=None, max_examples=25, print_blob=True, derandomize=bool(os.getenv("CI"))
)
hypothesis.settings.load_profile("hilore")

# marker -> (modules it needs, how they are installed)
NEEDS = {
    "reference": (("torch", "transformers", "accelerate"), 'pip install "hilore_jax[reference]"'),
    "gpu_target": (
        ("jax_cuda13_plugin", "jax_plugins.xla_cuda13", "nvidia.cudnn"),
        'pip install "hilore_jax[plan-gpu]"',
    ),
}


def missing(modules: tuple[str, ...]) -> list[str]:
    """Those of `modules` that are not installed; none of them is imported."""

    def absent(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is None
        except ModuleNotFoundError:  # the parent package of a dotted name
            return True

    return [module for module in modules if absent(module)]


def public_names() -> tuple[str, ...]:
    """Full names of what users call: `hl.plan` is `hilore_jax.planning.solve.plan`."""
    rooms = (hl, hl.grpo)
    found = [getattr(room, name) for room in rooms for name in room.__all__]
    more = ("memory.compiled_memory", "profile.profile_plan", "accept.accept")
    named = [f"{o.__module__}.{o.__qualname__}" for o in found if hasattr(o, "__qualname__")]
    return (*named, *(f"hilore_jax.planning.{name}" for name in more))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips, with its reason, a marked test whose optional dependencies are not installed.

    And public examples run as a user pastes them: their module's names, with which pytest runs
    examples, are taken away.
    """
    pasted = public_names()
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.name.startswith(pasted):
            item.dtest.globs = {"__name__": "__main__"}
    for marker, (modules, remedy) in NEEDS.items():
        if not (absent := missing(modules)):
            continue
        skip = pytest.mark.skip(reason=f"{marker}: {', '.join(absent)} not installed ({remedy})")
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(skip)


@pytest.fixture
def float64():
    """Arrays are float64 in the test: two programs of one function agree to `blocks.ROUNDING`.

    In float32 they differ by what each fuses, which is another thing on another processor, and
    in a deep block by more than a fault may be allowed to.
    """
    import jax

    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def h200():
    """Sharding on an H200 that is not there, for a `ShapeDtypeStruct` to compile with."""
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    description = (Path(__file__).parent / "data" / "h200.txtpb").read_text()
    topology = topologies.get_topology_desc(
        "", platform="cuda", topology="1x1x1", target_config=description
    )
    return SingleDeviceSharding(topology.devices[0])
