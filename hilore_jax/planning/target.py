"""What a plan is made for: one kind of device, how many, and how to compile for them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from hilore_jax import compiler
from hilore_jax.planning import expect
from hilore_jax.planning.present import known_facts, measured_facts
from hilore_jax.planning.target_data import GPUS, TPUS, Facts
from hilore_jax.planning.topology import Device, absent_devices, present_devices

# A dtype without units of its own is computed in the next one that has them.
_COMPUTED_IN = {
    "int4": "int8",
    "int8": "bfloat16",
    "float8": "bfloat16",
    "float16": "bfloat16",
    "bfloat16": "float32",
}
_OWN = re.compile(r"(cpu|device)(x[1-9][0-9]*)?")  # targets of this process's devices
_MANY = re.compile(r"(?P<name>.+[^x])x(?P<count>[1-9][0-9]*)")


@dataclass(frozen=True)
class Target:
    """One kind of device, and how many of it.

    Attributes:
        name: how it is spelled, such as `"cuda:h100-80x8"`.
        platform: `"cpu"`, `"cuda"` or `"tpu"`.
        count: devices.
        memory: bytes a device. Nominal for a device that is not here: driver and context hold a
            part of it.
        flops: dense peak FLOP/s of a device by dtype; ask `flops_of`. "float32" is what JAX's
            default matmul precision computes in: TF32 on NVIDIA GPUs from Ampere on, bfloat16 on
            TPUs.
        bandwidth: bytes/s of device memory.
        link: bytes/s from one device to the others, one direction; 0: unknown.
        host_link: bytes/s between device and host memory, one direction; 0: none, or unknown.
        description: XLA's target text (cuda) or the name of a slice (tpu); "" for devices of this
            process.
        source: where the figures are from: `"datasheet"`, `"measured"` or `"file"`.

    Example:
        >>> h100 = parse_target("cuda:h100-80x8")
        >>> h100.count, h100.memory // 2**30, h100.flops_of("bfloat16") / 1e12, h100.source
        (8, 80, 989.4, 'datasheet')
    """

    name: str
    platform: str
    count: int
    memory: int
    flops: tuple[tuple[str, float], ...]
    bandwidth: float
    link: float
    host_link: float
    description: str = ""
    source: str = "datasheet"

    def flops_of(self, dtype: Any) -> float:
        """Dense peak FLOP/s of one device for matmuls of a dtype.

        Args:
            dtype: a dtype or its name; every float8 is `"float8"`. A dtype without units of its
                own has the rate of the one that it is converted to, such as bfloat16 for float8 on
                an A100.

        Returns:
            FLOP/s.

        Raises:
            ValueError: the target says nothing that covers the dtype.
        """
        rates = dict(self.flops)
        name = str(np.dtype(dtype)) if not isinstance(dtype, str) else dtype
        wanted: str | None = "float8" if name.startswith("float8") else name.removeprefix("u")
        while wanted is not None:
            if wanted in rates:
                return rates[wanted]
            wanted = _COMPUTED_IN.get(wanted)
        raise ValueError(
            f"target {self.name!r} has no peak FLOP/s for {name}: it lists {sorted(rates)}. "
            f"A target file can add it under 'flops'."
        )

    def devices(self) -> list[Device]:
        """The devices to compile for: this process's, or compile-only ones of an absent target.

        Raises:
            ImportError: an absent target's extra, `plan-gpu` or `plan-tpu`, is missing.
            ValueError: this process has too few devices, or the compiler refuses the description.
        """
        if self.description:
            return list(absent_devices(self.platform, self.count, self.description))
        return present_devices(self.platform, self.count)

    def mesh(self, axes: str | Sequence[str] = "data", shape: Sequence[int] | None = None) -> Mesh:
        """A mesh of all the target's devices.

        Args:
            axes: name of the one axis, or names of several.
            shape: devices along each axis; needed for several.

        Returns:
            The mesh, its axes in automatic mode.

        Raises:
            ValueError: the shape does not hold exactly the target's devices.

        Example:
            >>> dict(parse_target("cpu").mesh("data").shape)
            {'data': 1}
        """
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        sizes = (self.count,) if shape is None else tuple(shape)
        if len(sizes) != len(names) or math.prod(sizes) != self.count:
            raise ValueError(
                f"a mesh of axes {names} and shape {sizes} does not hold the {self.count} devices "
                f"of target {self.name!r}."
            )
        return Mesh(np.array(self.devices(), dtype=object).reshape(sizes), names)

    def sharding(self) -> SingleDeviceSharding | NamedSharding:
        """Where an argument without a sharding goes: the one device, or a copy on each."""
        if self.count == 1:
            return SingleDeviceSharding(self.devices()[0])
        return NamedSharding(self.mesh(), PartitionSpec())

    def compiler_options(self) -> dict[str, str | bool]:
        """Options for `compile`, as `hilore_jax.compiler_options`."""
        return compiler.compiler_options(self.platform)


def known_targets() -> tuple[str, ...]:
    """Names that `parse_target` takes, without counts, slices and files.

    Example:
        >>> known_targets()[:3]
        ('cpu', 'device', 'cuda:h200')
    """
    gpus, tpus = (f"cuda:{name}" for name in GPUS), (f"tpu:{name}" for name in TPUS)
    return ("cpu", "device", *gpus, *tpus)


def parse_target(text: str | Path | Target) -> Target:
    """A target from its spelling.

    Args:
        text: `"cpu"`; `"device"`, the default device of this process; a GPU that need not be here,
            `"cuda:h200"`; several of any of these, `"cuda:h100-80x8"`; a TPU chip or slice,
            `"tpu:v5e"`, `"tpu:v5e:2x4"`; or the path of a target file (see
            `hilore_jax.planning.target_file`). A `Target` is returned as it is.

    Returns:
        The target. The figures of devices of this process are the datasheet's where their kind is
        known, and are measured otherwise (half a second, once).

    Raises:
        TypeError: neither text nor a path nor a `Target`.
        ValueError: unknown name (the known ones are listed), or a bad target file.

    Example:
        >>> parse_target("tpu:v6e:2x4").count
        8
        >>> parse_target("cuda:h300")
        Traceback (most recent call last):
        ...
        ValueError: unknown target 'cuda:h300': expected one of cpu, device, cuda:h200, ...
    """
    if isinstance(text, Target):
        return text
    if not isinstance(text, str | Path):
        expect.refuse("target=...", text, 'a name such as "cuda:h200", a file\'s path, or a Target')
    if isinstance(text, Path) or text.endswith(".json") or "/" in text:
        from hilore_jax.planning.target_file import load_target  # it builds on this file

        return load_target(text)
    if found := _named(text, text, 1):
        return found
    match = _MANY.fullmatch(text)
    if match and (found := _named(text, match["name"], int(match["count"]))):
        return found
    raise ValueError(
        f"unknown target {text!r}: expected one of {', '.join(known_targets())}, several of one "
        "('cuda:h100-80x8'), a TPU slice ('tpu:v5e:2x4'), or the path of a target file (.json)."
    )


def platform_of(name: str) -> str | None:
    """The platform of a target's name, without looking for its devices.

    Args:
        name: as `Target.name` has it.

    Returns:
        "cpu", "cuda" or "tpu"; None of a name that a target file gave.

    Example:
        >>> platform_of("cpux4"), platform_of("cuda:h100-80x8"), platform_of("half")
        ('cpu', 'cuda', None)
    """
    if own := _OWN.fullmatch(name):
        return own[1] if own[1] == "cpu" else _platform(jax.devices()[0])
    platform = name.partition(":")[0]
    return platform if platform in ("cuda", "tpu") else None


def _named(text: str, name: str, count: int) -> Target | None:
    """The target of a name without a count, or None where it has none."""
    platform, _, kind = name.partition(":")
    if name == "cpu":
        return _present(text, present_devices("cpu", count))
    if name == "device":
        return _present(text, present_devices(_platform(jax.devices()[0]), count))
    if platform == "cuda" and kind in GPUS:
        return _absent(text, "cuda", count, GPUS[kind].facts, GPUS[kind].description())
    if platform == "tpu":
        family, _, shape = kind.partition(":")
        # "v5p:2x2x1" also looks like a count of "v5p:2x2"; as a slice it was tried first.
        if family not in TPUS or count != 1 or not re.fullmatch(r"(\d+(x\d+){1,2})?", shape):
            return None
        chips = math.prod(map(int, shape.split("x"))) if shape else 1
        # libtpu compiles for whole hosts only; one chip is the first of the smallest.
        slice_name = f"{family}:{shape if chips > 1 else TPUS[family].slice}"
        return _absent(text, "tpu", chips, TPUS[family].facts, slice_name) if chips else None
    return None


def _absent(name: str, platform: str, count: int, facts: Facts, description: str) -> Target:
    return Target(
        name,
        platform,
        count,
        facts.memory,
        facts.flops,
        facts.bandwidth,
        facts.link,
        facts.host_link,
        description,
    )


def _present(name: str, devices: list[Device]) -> Target:
    first = devices[0]
    facts = known_facts(first)
    source = "datasheet"
    if facts is None:
        facts, source = measured_facts(first), "measured"
    return Target(
        name,
        _platform(first),
        len(devices),
        facts.memory,
        facts.flops,
        facts.bandwidth,
        facts.link,
        facts.host_link,
        source=source,
    )


def _platform(device: Device) -> str:
    return "cuda" if device.platform == "gpu" else device.platform
