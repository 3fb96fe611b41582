"""Public datasheet facts of GPUs and TPUs, and XLA's description of a GPU that is not here.

Rates are dense (no structured sparsity), FLOP/s or int8 OP/s. "float32" is the rate of the matrix
multiplication that JAX does by default: TF32 on these GPUs, bfloat16 passes on TPUs. A link is one
direction of what one device has to its neighbours, half of the "bidirectional" figure that
datasheets print. Memory is the nominal size read as GiB: driver, context and ECC hold a part of it,
so a budget should stay a GiB or more below.
"""

from dataclasses import dataclass

GIB = 2**30
TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True)
class Facts:
    """What a roofline and a budget need to know of one device.

    Attributes:
        memory: bytes.
        flops: dense peak FLOP/s by dtype.
        bandwidth: bytes/s of device memory.
        link: bytes/s to other devices, one direction.
        host_link: bytes/s to host memory, one direction; 0 where none is published.
    """

    memory: int
    flops: tuple[tuple[str, float], ...]
    bandwidth: float
    link: float
    host_link: float


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU: datasheet facts, and the architecture that XLA compiles for.

    Attributes:
        facts: the datasheet's figures.
        kind: the name that the driver reports.
        capability: CUDA compute capability.
        cores: streaming multiprocessors.
        fpus: float32 lanes of a multiprocessor.
        threads: resident threads of a multiprocessor.
        shared: bytes of shared memory of a multiprocessor.
        shared_optin: bytes of shared memory that one block may ask for.
        l2: bytes of the level-2 cache.
        clock: boost clock, GHz.
        reported: bytes of device memory that XLA is told; it schedules within them.
    """

    facts: Facts
    kind: str
    capability: tuple[int, int]
    cores: int
    fpus: int
    threads: int
    shared: int
    shared_optin: int
    l2: int
    clock: float
    reported: int

    def description(self) -> str:
        """XLA's `GpuTargetConfigProto` in text form.

        Example:
            >>> print(GPUS["l40s-48"].description().splitlines()[1].strip())
            cuda_compute_capability { major: 8 minor: 9 }
        """
        major, minor = self.capability
        return f"""gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared}
  shared_memory_per_block_optin: {self.shared_optin}
  threads_per_core_limit: {self.threads}
  core_count: {self.cores}
  fpus_per_core: {self.fpus}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(self.facts.bandwidth)}
  l2_cache_size: {self.l2}
  clock_rate_ghz: {self.clock}
  device_memory_size: {self.reported}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.kind}"
"""


_Tera = float | int


def _rates(
    float32: _Tera, half: _Tera, narrow: _Tera | None, int8: _Tera
) -> tuple[tuple[str, float], ...]:
    rates = {"float32": float32, "bfloat16": half, "float16": half, "float8": narrow, "int8": int8}
    return tuple((name, rate * TERA) for name, rate in rates.items() if rate is not None)


_HOPPER = {
    "capability": (9, 0),
    "cores": 132,
    "fpus": 128,
    "threads": 2048,
    "shared": 233472,
    "shared_optin": 232448,
    "clock": 1.98,
}
_ADA = {
    "capability": (8, 9),
    "fpus": 128,
    "threads": 1536,
    "shared": 102400,
    "shared_optin": 101376,
    "clock": 2.52,
}
_HOPPER_RATES = _rates(494.7, 989.4, 1978.9, 1978.9)

GPUS: dict[str, Gpu] = {
    # SXM, NVLink 4 (900 GB/s both ways), PCIe 5 x16.
    "h200": Gpu(
        Facts(141 * GIB, _HOPPER_RATES, 4.8 * TERA, 450 * GIGA, 64 * GIGA),
        kind="NVIDIA H200",
        l2=60 * 2**20,
        reported=150_000_000_000,
        **_HOPPER,
    ),
    "h100-80": Gpu(
        Facts(80 * GIB, _HOPPER_RATES, 3.35 * TERA, 450 * GIGA, 64 * GIGA),
        kind="NVIDIA H100 80GB HBM3",
        l2=50 * 2**20,
        reported=80 * GIB,
        **_HOPPER,
    ),
    # SXM, NVLink 3 (600 GB/s both ways), PCIe 4 x16; no float8 units.
    "a100-80": Gpu(
        Facts(80 * GIB, _rates(156, 312, None, 624), 2.039 * TERA, 300 * GIGA, 32 * GIGA),
        kind="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        cores=108,
        fpus=64,
        threads=2048,
        shared=167936,
        shared_optin=166912,
        l2=40 * 2**20,
        clock=1.41,
        reported=80 * GIB,
    ),
    # No NVLink: devices talk over PCIe 4 x16.
    "l40s-48": Gpu(
        Facts(48 * GIB, _rates(183, 362.05, 733, 733), 864 * GIGA, 32 * GIGA, 32 * GIGA),
        kind="NVIDIA L40S",
        cores=142,
        l2=96 * 2**20,
        reported=48 * GIB,
        **_ADA,
    ),
    # Rates with float32 accumulation, which is what XLA asks for.
    "rtx4090-24": Gpu(
        Facts(24 * GIB, _rates(82.6, 165.2, 330.3, 660.6), 1008 * GIGA, 32 * GIGA, 32 * GIGA),
        kind="NVIDIA GeForce RTX 4090",
        cores=128,
        l2=72 * 2**20,
        reported=24 * GIB,
        **_ADA,
    ),
}
"""Named GPUs, by what follows `"cuda:"`."""


@dataclass(frozen=True)
class Tpu:
    """One TPU chip, the name that jax reports, and the smallest slice libtpu compiles for."""

    facts: Facts
    kind: str
    slice: str


def _tpu_rates(bfloat16: _Tera, int8: _Tera) -> tuple[tuple[str, float], ...]:
    return _rates(bfloat16, bfloat16, None, int8)


# Nothing is published about the host's side: host_link 0.
TPUS: dict[str, Tpu] = {
    "v5e": Tpu(
        Facts(16 * GIB, _tpu_rates(197, 393), 819 * GIGA, 200 * GIGA, 0.0),
        kind="TPU v5 lite",
        slice="2x2",
    ),
    "v5p": Tpu(
        Facts(95 * GIB, _tpu_rates(459, 918), 2765 * GIGA, 600 * GIGA, 0.0),
        kind="TPU v5",
        slice="2x2x1",
    ),
    "v6e": Tpu(
        Facts(32 * GIB, _tpu_rates(918, 1836), 1638 * GIGA, 400 * GIGA, 0.0),
        kind="TPU v6 lite",
        slice="2x2",
    ),
}
"""Named TPUs, by what follows `"tpu:"`."""
