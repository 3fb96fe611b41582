"""`hilore bench`: the library's own claims, measured on this machine, as a table and JSON."""

import dataclasses
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax

from hilore_jax.models.shapes import family
from hilore_jax.planning.bounds import Real, Whole, number_faults, refuse_faults
from hilore_jax.planning.files import check_output
from hilore_jax.report.bench_decode import bench_decode
from hilore_jax.report.bench_logprobs import bench_logprobs
from hilore_jax.report.bench_remat import Setup, bench_compression, bench_parity, bench_segments

ALL = ("parity", "compression", "segments", "logprobs", "decode")


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """Memory and speed against jax.checkpoint and plain code, in one interleaved run."""

    model: str = "smollm2-135m"
    """Shape of the blocks (weights are random)."""
    blocks: int = 30
    """Blocks of the remat benches."""
    rows: int = 4
    """Sequences of the remat benches."""
    seq: int = 128
    """Tokens a sequence of the remat benches."""
    repeats: int = 5
    """Timed turns of each program."""
    only: str = ",".join(ALL)
    """Benches to run, separated by commas."""
    gpu_target: str = ""
    """XLA GPU target description; compiles the remat benches for it, and times nothing."""
    out: str = ""
    """JSON file to write."""

    BOUNDS: ClassVar[dict[str, Whole | Real]] = dict.fromkeys(
        ("blocks", "rows", "seq", "repeats"), Whole()
    )


def run(config: BenchConfig) -> Iterator[dict[str, Any]]:
    """The rows of the chosen benches, each as soon as it is measured."""
    wanted = [name.strip() for name in config.only.split(",")]
    unknown = sorted(set(wanted) - set(ALL))
    if unknown:
        raise ValueError(f"unknown benches {unknown}; expected some of {list(ALL)}")
    sharding = _gpu_sharding(config.gpu_target) if config.gpu_target else None
    dtype = "bfloat16" if config.gpu_target else "float32"
    shape = family(config.model, dtype=dtype, param_dtype=dtype)
    setup = Setup(shape, config.blocks, config.rows, config.seq, sharding)
    if "parity" in wanted:
        yield from bench_parity(setup, config.repeats)
    if "compression" in wanted:
        yield from bench_compression(setup, config.repeats)
    if "segments" in wanted:
        yield from bench_segments(setup)
    if "logprobs" in wanted and sharding is None:
        for row in bench_logprobs(repeats=config.repeats):
            yield {"bench": "token_logprobs", "case": row.pop("head") + " head", **row}
    if "decode" in wanted and sharding is None:
        yield bench_decode(shape, repeats=max(1, config.repeats // 2))


def _gpu_sharding(path: str) -> Any:
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    if not Path(path).is_file():
        raise FileNotFoundError(
            f"--gpu-target {path}: no such file; expected XLA's description of a GPU, a "
            "GpuTargetConfigProto as text."
        )
    description = Path(path).read_text()
    try:
        topology = topologies.get_topology_desc(
            "", platform="cuda", topology="1x1x1", target_config=description
        )
    except Exception as error:
        raise ImportError(
            f"compiling for a GPU target needs jax's CUDA plugin wheels ({error}); "
            'pip install "hilore_jax[plan-gpu]" and set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1.'
        ) from error
    return SingleDeviceSharding(topology.devices[0])


def _line(row: dict[str, Any]) -> str:
    cells = []
    for key, value in row.items():
        if key in ("bench", "case", "goal"):
            continue
        if key == "time_ratio" and isinstance(value, dict):
            cells.append("time {median:.3f} ({low:.3f} to {high:.3f})".format(**value))
        elif key.endswith("bytes") or key == "explained_savings":
            cells.append(f"{key.removesuffix('_bytes')} {value / 2**20:.2f} MiB")
        elif isinstance(value, float):
            cells.append(f"{key} {value:.4g}")
        else:
            cells.append(f"{key} {value}")
    goal = f"  [{row['goal']}]" if "goal" in row else ""
    return f"{row['bench']}: {row['case']}: " + ", ".join(cells) + goal


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benches, prints a line for each row, writes the JSON file if asked to."""
    import tyro

    config = tyro.cli(BenchConfig, args=None if argv is None else list(argv), prog="hilore bench")
    refuse_faults(list(number_faults(config).values()))
    if config.out:
        check_output(config.out, "--out")
    backend = jax.default_backend()
    where = f"compiled for {config.gpu_target}" if config.gpu_target else f"measured on {backend}"
    print(f"jax {jax.__version__}, {platform.processor() or platform.machine()}, {where}")
    rows = []
    for row in run(config):
        rows.append(row)
        print(_line(row), flush=True)
    if config.out:
        about = {
            "command": "hilore bench " + " ".join(argv if argv is not None else sys.argv[2:]),
            "jax": jax.__version__,
            "backend": backend,
            "target": config.gpu_target or backend,
            "config": dataclasses.asdict(config),
            "rows": rows,
        }
        Path(config.out).write_text(json.dumps(about, indent=1) + "\n")
    return 0
