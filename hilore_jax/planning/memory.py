"""Bytes of a compiled program, as the target compiler's own buffer assignment says."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import jax

from hilore_jax.planning.memory_cache import Cache, library_version
from hilore_jax.planning.placement import describe_arguments, place
from hilore_jax.planning.target import Target
from hilore_jax.planning.topology import versions

DEFAULT_CACHE = Cache()
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# What changes a program without showing in its key or its arguments.
_CONFIG = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_remat3",
    "jax_use_shardy_partitioner",
)
_COMPILERS = {
    "cpu": ("jax", "jaxlib"),
    "cuda": ("jax", "jaxlib", "jax-cuda13-pjrt", "nvidia-cudnn-cu13"),
    "tpu": ("jax", "jaxlib", "libtpu"),
}


class TargetMemoryError(RuntimeError):
    """The target's compiler gave up: the program needs more memory than one device has."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one compiled program on one device of its target.

    Attributes:
        arguments: of all inputs.
        outputs: of all outputs, those in the space of donated inputs included.
        aliased: of outputs that lie in donated inputs.
        temporaries: of everything in between.
        host: in host memory: inputs, outputs not aliased, and temporaries.
        xla_peak: the compiler's own peak of device memory, for comparison; 0 where it gives none.

    Example:
        >>> Memory(arguments=10, outputs=4, aliased=4, temporaries=5, host=0, xla_peak=15).peak
        15
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    host: int
    xla_peak: int

    @property
    def peak(self) -> int:
        """Arguments + outputs - aliased + temporaries: what the device must have free."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def to_dict(self) -> dict[str, int]:
        """The fields, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Memory:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a field is missing, unknown, or not a number of bytes.
        """
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            raise ValueError(f"fields {sorted(values)}, expected {sorted(names)}.")
        for name, value in values.items():
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} is {value!r}, expected a number of bytes.")
        return cls(**values)


def compiled_memory(
    fn: Callable,
    *abstract_args: Any,
    target: Target,
    donate: tuple[int, ...] = (),
    key: str | None = None,
    cache: Cache | None = DEFAULT_CACHE,
    inspect: Callable[[Any], None] | None = None,
) -> Memory:
    """Bytes that a function's program needs on a target, which need not be here.

    The program is compiled once, and its memory kept on disk, by what the compiler is given: the
    program's text, target, versions and flags. With a `key` it is not even traced again: then
    key, arguments' shapes and shardings, and this library's source stand for the text.

    Args:
        fn: function of arrays, static arguments already bound.
        *abstract_args: its arguments: pytrees of `ShapeDtypeStruct`s (or arrays, of which only
            the shapes count). Those without a sharding are placed by `target.sharding()`.
        target: what to compile for.
        donate: positions of arguments whose memory the outputs may use.
        key: text that identifies the function with all it has bound, such as policies.
        cache: where results are kept; None keeps nothing and reads nothing.
        inspect: looks at the function's jaxpr before it is compiled, and may refuse it; not called
            where nothing is traced, as what was kept under a `key` is found.

    Returns:
        Bytes a device.

    Raises:
        ImportError: the target needs an extra that is not installed.
        TargetMemoryError: the compiler refuses a program that is larger than the device (TPU).
        ValueError: an argument cannot be placed on the target.

    Example:
        >>> import jax.numpy as jnp
        >>> from hilore_jax.planning.target import parse_target
        >>> x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
        >>> memory = compiled_memory(
        ...     lambda x: x + 1, x, target=parse_target("cpu"), donate=(0,), cache=None
        ... )
        >>> memory.arguments, memory.outputs, memory.aliased, memory.peak
        (512, 512, 512, 512)
    """
    facts = _facts(target, abstract_args, donate)
    lowered = None
    if key is None and cache is not None:
        lowered = lower_for(fn, *abstract_args, target=target, donate=donate, inspect=inspect)
        facts["program"] = hashlib.sha256(lowered.as_text().encode()).hexdigest()
    elif cache is not None:
        facts |= {"key": key, "library": library_version(), "config": _config()}
    if cache is not None and (found := cache.get(facts)) is not None:
        return Memory.from_dict(found)
    if lowered is None:
        lowered = lower_for(fn, *abstract_args, target=target, donate=donate, inspect=inspect)
    memory = memory_of(compile_for(lowered, target))
    if cache is not None:
        cache.put(facts, memory.to_dict())
    return memory


def lower_for(
    fn: Callable,
    *abstract_args: Any,
    target: Target,
    donate: tuple[int, ...] = (),
    inspect: Callable[[Any], None] | None = None,
) -> jax.stages.Lowered:
    """A function's program before compilation, its arguments placed on a target.

    Args:
        fn: as for `compiled_memory`.
        *abstract_args: as for `compiled_memory`.
        target: what it will be compiled for.
        donate: positions of donated arguments.
        inspect: looks at the function's jaxpr before it is lowered, and may refuse it.

    Returns:
        The lowered program; `compile_for` compiles it.
    """
    args, mesh = place(abstract_args, target)
    # Where shardings named an abstract mesh, so may the function's own constraints.
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        try:
            traced = jax.jit(fn, donate_argnums=donate).trace(*args)
            if inspect is not None:
                inspect(traced.jaxpr.jaxpr)
            return traced.lower()
        except RuntimeError as error:
            _explain_cudnn(error, target)
            raise


def compile_for(lowered: jax.stages.Lowered, target: Target) -> jax.stages.Compiled:
    """Compiles a program of `lower_for` with the options that the target needs."""
    try:
        return lowered.compile(compiler_options=target.compiler_options())
    except RuntimeError as error:
        _explain_cudnn(error, target)
        if "RESOURCE_EXHAUSTED" in str(error):
            raise TargetMemoryError(
                f"the program does not fit one device of {target.name!r} "
                f"({target.memory / 2**30:.1f} GiB): {str(error).splitlines()[0]}"
            ) from error
        raise


def memory_of(compiled: jax.stages.Compiled) -> Memory:
    """Reads the buffer assignment of a compiled program."""
    stats = compiled.memory_analysis()
    if stats is None:
        raise RuntimeError("this backend reports no memory of its compiled programs.")
    host = (
        stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes
    )
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        host=host,
        xla_peak=getattr(stats, "peak_memory_in_bytes", 0),
    )


def _facts(target: Target, args: tuple[Any, ...], donate: tuple[int, ...]) -> dict[str, Any]:
    """What identifies a compilation, beside the function."""
    kind = "" if target.description else target.devices()[0].device_kind
    return {
        "arguments": [_ADDRESS.sub("", line) for line in describe_arguments(args)],
        "donate": list(donate),
        "target": [target.platform, target.count, target.description, kind],
        "options": {name: str(value) for name, value in target.compiler_options().items()},
        "versions": versions(*_COMPILERS[target.platform]),
        "flags": os.environ.get("XLA_FLAGS", ""),
    }


def _config() -> dict[str, str]:
    return {name: str(getattr(jax.config, name, None)) for name in _CONFIG}


def _explain_cudnn(error: RuntimeError, target: Target) -> None:
    """Names the missing extra where the compiler only says that cuDNN is not there."""
    if target.platform != "cuda" or "cudnn" not in str(error).lower():
        return
    try:
        found = importlib.util.find_spec("nvidia.cudnn") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ImportError(
            f"compiling cuDNN attention for {target.name!r} needs the module 'nvidia.cudnn', which "
            'is not installed. Install the extra that brings it: pip install "hilore_jax[plan-gpu]"'
            " (or give the model XLA's attention)."
        ) from error
