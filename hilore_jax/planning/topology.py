"""Devices to compile for: those of this process, or a compiler's picture of absent ones."""

import contextlib
import functools
import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
from jax.experimental import topologies

from hilore_jax._extras import require

# jax.Device, which type checkers do not take for a class.
Device: TypeAlias = Any

_SKIP = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


def present_devices(platform: str, count: int) -> list[Device]:
    """The first `count` devices of this process on a platform.

    Args:
        platform: `"cpu"`, `"cuda"` or `"tpu"`.
        count: how many.

    Returns:
        The devices.

    Raises:
        ValueError: there are fewer, or none; the message says how to get more.
    """
    try:
        found = jax.devices("gpu" if platform == "cuda" else platform)
    except RuntimeError as error:
        raise ValueError(
            f"this process has no {platform} device ({error}). For one that is not here, name it: "
            f"'cuda:h200', 'tpu:v5e'. JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')!r}."
        ) from error
    if len(found) < count:
        more = ""
        if platform == "cpu":
            more = f" Start with XLA_FLAGS=--xla_force_host_platform_device_count={count}."
        raise ValueError(f"{count} {platform} devices wanted, this process has {len(found)}.{more}")
    return found[:count]


# Cached: two pictures of the same device are unequal, and one program may not mix them.
@functools.lru_cache
def absent_devices(platform: str, count: int, description: str) -> Sequence[Device]:
    """Compile-only devices of a target that is not here.

    Args:
        platform: `"cuda"` or `"tpu"`.
        count: how many; fewer than a TPU slice holds are its first ones.
        description: XLA's target text (cuda), or the name of a slice such as `"v5e:2x2"` (tpu).

    Returns:
        Devices that `jax.jit(...).lower(...).compile()` accepts in shardings, and nothing else.

    Raises:
        ImportError: the extra `plan-gpu` or `plan-tpu` is missing.
        ValueError: the compiler refuses the description.
    """
    find = {"cuda": _cuda_devices, "tpu": _tpu_devices}.get(platform)
    if find is None:
        raise ValueError(f"platform {platform!r} cannot be compiled for when absent: cuda or tpu.")
    devices = find(count, description)
    if len(devices) < count:
        raise ValueError(
            f"the {platform} topology {description!r} has {len(devices)} devices, {count} wanted."
        )
    return tuple(devices[:count])


def _cuda_devices(count: int, description: str) -> list[Device]:
    def find() -> list[Device]:
        return topologies.get_topology_desc(
            "", platform="cuda", topology=f"1x1x{count}", target_config=description
        ).devices

    why = "compiling for a CUDA target"
    require("jax_cuda13_plugin", "plan-gpu", why)
    plugin = require("jax_plugins.xla_cuda13", "plan-gpu", why)
    try:
        with _without_constraints_check():
            try:
                return find()
            except NotImplementedError:
                # JAX's backends were initialized before the variable was set, so that the plugin
                # refused to register. It still can: only jax's choice of devices is past.
                plugin.initialize()
                return find()
    except Exception as error:
        raise ValueError(
            f"jax's CUDA plugin does not compile for this target: {error}. Versions: "
            f"{versions('jax', 'jaxlib', 'jax-cuda13-plugin', 'jax-cuda13-pjrt')} (all must be "
            f"equal). If the plugin did not register, set {_SKIP}=1 before jax starts. "
            f"Target description:\n{description}"
        ) from error


@contextlib.contextmanager
def _without_constraints_check() -> Iterator[None]:
    """Lets the plugin register without NVIDIA's libraries, unless a driver is here to use them."""
    if _SKIP in os.environ or Path("/proc/driver/nvidia").exists():
        yield
        return
    os.environ[_SKIP] = "1"
    try:
        yield
    finally:
        del os.environ[_SKIP]


def _tpu_devices(count: int, description: str) -> list[Device]:
    del count  # the slice's
    require("libtpu", "plan-tpu", "compiling for a TPU target")
    try:
        return topologies.get_topology_desc(description, platform="tpu").devices
    except Exception as error:
        raise ValueError(
            f"{versions('libtpu')} knows no slice {description!r}: {error}. Expected a "
            "family and chips by axis that whole hosts of 2x2 chips make up, such as 'v5e:2x4'."
        ) from error


def versions(*distributions: str) -> str:
    """Versions of installed distributions, for errors and for cache keys."""
    found = []
    for name in distributions:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)
