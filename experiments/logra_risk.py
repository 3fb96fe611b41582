"""Does a sketched gradient suffer less from compressed activations than a dense one?

The sketch of a linear map's gradient is `S = sum g (A x)^T`. Where a policy keeps `A x`
(`sketch_hidden`), what it does to x reaches S only through the cotangents g; the dense gradient
`sum g x^T` reads the decoded x itself. On SmolLM2 and real text, under equal policies, the error
of all linear maps' gradients is measured three ways: dense, sketched with `A x` recomputed from
the decoded x (`tainted_matmuls`), and sketched with `A x` kept.

    python experiments/logra_risk.py             # a quarter of an hour on two cores
    python experiments/logra_risk.py --quick     # a small random model, to see that it works
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import default_risks
import jax
import optax
import tyro
from tqdm import tqdm

import hilore_jax as hl
from hilore_jax.logra.sketches import Sketches
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.models.sketched import sketched_config, sketched_stacks, stacked
from hilore_jax.planning.memory_cache import write_whole
from hilore_jax.training.abstract import AbstractUpdate
from hilore_jax.training.batch import Batch
from hilore_jax.training.gradients import make_gradients
from hilore_jax.training.logra_state import init_logra_state
from hilore_jax.training.logra_update import make_sketch_gradients
from hilore_jax.training.step import init_state, make_score
from hilore_jax.training.trainer import versions

OUT = Path(__file__).parent / "results" / "logra_risk.json"
INT8, INT4 = (hl.Compress(codec, axis=1, tile=32) for codec in ("int8", "int4"))
KEPT, RECOMPUTED, DENSE = "sketched, A x kept", "sketched, A x of decoded x", "dense"
MLP, ATTENTION = ("mlp_gate", "mlp_up"), ("q", "k", "v", "attn_out")
# None of these recomputes a matmul; the last keeps no activation exactly but the residual stream.
TOGETHER: dict[str, dict[str, hl.Compress]] = {
    "gate, up, v, attn_out int8": dict.fromkeys((*MLP, "v", "attn_out"), INT8),
    "all matmuls int8": dict.fromkeys((*MLP, *ATTENTION), INT8),
    "gate, up int4": dict.fromkeys(MLP, INT4),
    "gate, up int4, rest int8": dict.fromkeys(MLP, INT4) | dict.fromkeys(ATTENTION, INT8),
    "all matmuls int4": dict.fromkeys((*MLP, *ATTENTION), INT4),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Error of dense and of sketched gradients under equal policies."""

    microbatches: int = 2
    """Sets of 16 rows of 34 tokens; at most 2."""
    rank: int = 64
    """Of the sketches; SmolLM2's smallest side is 192."""
    quick: bool = False
    """A random model of two blocks, two policies."""
    out: str = str(OUT)
    """JSON file; the picture goes beside it."""


def policies(settings: Settings) -> dict[str, dict[str, hl.Compress]]:
    """What is compressed, by label."""
    single = {f"{name} int8": {name: INT8} for name in default_risks.NAMES}
    found = single | TOGETHER
    return dict(list(found.items())[:2]) if settings.quick else found


def actions(way: str, compressed: dict[str, hl.Compress]) -> hl.Policy:
    """The policy of a way: all else stored, but for what follows from the compressed values."""
    made = dict(default_risks.policy_of(compressed).actions)
    if way == KEPT:
        made["sketch_hidden"] = hl.Store()
    # A x is a matmul: unless told otherwise, backward would recompute it from the exact x.
    return hl.Policy(made, tainted_matmuls=way == RECOMPUTED)


def linears(gradient: Any, names: tuple[str, ...]) -> dict[str, jax.Array]:
    """The kernels' part of a dense gradient."""
    kernels = stacked(gradient, "kernel")
    return {name: kernels[name] for name in names}


def measures(settings: Settings, decoder: Decoder, encoded: list[list[int]]) -> dict[str, Callable]:
    """For each way the function from a policy to its errors, one a microbatch."""
    plain, key = decoder.config, jax.random.key(0)
    shape = sketched_config(plain, Sketches(rank=settings.rank, dtype=plain.dtype))
    segments = decoder.segment_lengths
    names = tuple(stack.name for stack in sketched_stacks(shape, segments))
    graphdef, dense = init_state(decoder, optax.identity(), key)
    _, sketched = init_logra_state(decoder, shape, key)
    scored = make_score(graphdef)

    def score(tokens: jax.Array, mask: jax.Array) -> jax.Array:
        shape = {"completion": default_risks.COMPLETION}
        return scored(dense.params, dense.frozen, tokens, mask, **shape)

    data = default_risks.batches(encoded, settings.microbatches, score)
    compiled = functools.partial(jax.jit, static_argnums=0, compiler_options=hl.compiler_options())
    whole = compiled(make_gradients(graphdef, beta=0.0))
    small = compiled(make_sketch_gradients(shape, segments, beta=0.0))

    def gradient(way: str, policy: hl.Policy, batch: Batch) -> Any:
        every = (policy,) * plain.n_layers
        if way == DENSE:
            return linears(whole(every, dense, batch)[0], names)
        return stacked(small(every, sketched, batch)[0], "slot")

    def errors(way: str, exact: list[Any], policy: hl.Policy) -> list[float]:
        pairs = zip(data, exact, strict=True)
        found = [default_risks.squares(gradient(way, policy, b), e) for b, e in pairs]
        return [math.sqrt(error / norm) for error, norm in found]

    found = {}
    for way in (DENSE, RECOMPUTED, KEPT):
        exact = [gradient(way, hl.Policy(default=hl.Store()), batch) for batch in data]
        found[way] = functools.partial(errors, way, exact)
    return found


def kept_bytes(config: DecoderConfig, policy: hl.Policy) -> int:
    """Of one block and microbatch, counted."""
    rows, seq = default_risks.ROWS, default_risks.PROMPT + default_risks.COMPLETION
    update = AbstractUpdate(
        config, micro=1, rows=rows, seq=seq, completion=seq // 2, optimizer=optax.identity()
    )
    blocks = update.blocks()
    return hl.explain(policy, blocks.fn, *blocks.args, argnums=blocks.argnums).kept_bytes


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A dot for each way, a line for each policy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.28 * len(rows) + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    ax, at = figure.subplots(), range(len(rows))
    marks = {DENSE: ("o", "#0072b2"), RECOMPUTED: ("x", "#000000"), KEPT: ("D", "#e69f00")}
    for way, (marker, colour) in marks.items():
        values = [100 * row["error"][way] for row in rows]
        ax.plot(values, at, marker, color=colour, label=way, alpha=0.8)
    for y, row in enumerate(rows):
        if row["error"][KEPT] == 0:  # has no place on a log axis
            label = f"{KEPT}: 0"
            ax.text(0.98, y, label, transform=ax.get_yaxis_transform(), ha="right", va="center")
    ax.set_yticks(list(at), [row["compressed"] for row in rows])
    ax.invert_yaxis()
    ax.set(xscale="log", xlabel="error of the linear maps' gradients, %")
    ax.set_title("What compression does to dense and to sketched gradients")
    ax.grid(alpha=0.3)
    ax.legend()
    figure.savefig(path, dpi=120)


def main(settings: Settings) -> int:
    """Measures, writes JSON and picture."""
    if settings.quick and settings.out == str(OUT):
        settings = dataclasses.replace(settings, out="runs/logra_risk_quick.json")
    decoder, encoded = (default_risks.small_model if settings.quick else default_risks.real_model)()
    if settings.quick:
        settings = dataclasses.replace(settings, rank=8, microbatches=1)
    found, rows = measures(settings, decoder, encoded), []
    shape = sketched_config(
        decoder.config, Sketches(rank=settings.rank, dtype=decoder.config.dtype)
    )
    for label, compressed in tqdm(policies(settings).items(), unit="policy", disable=None):
        errors = {way: measure(actions(way, compressed)) for way, measure in found.items()}
        rows.append(
            {
                "compressed": label,
                "error": {way: statistics.fmean(values) for way, values in errors.items()},
                "by_microbatch": errors,
                "kept_bytes_of_a_block": {
                    way: kept_bytes(
                        decoder.config if way == DENSE else shape, actions(way, compressed)
                    )
                    for way in found
                },
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    result = {
        "command": "python experiments/logra_risk.py" + (" --quick" if settings.quick else ""),
        "versions": versions(),
        "settings": {k: v for k, v in dataclasses.asdict(settings).items() if k != "out"},
        "what": "norm of the error over the norm of the exact gradient, over all linear maps: of "
        "G for dense, of S = G A^T for sketched; mean of microbatches, measured. Everything else "
        "is stored, but for what follows elementwise from a compressed value",
        "rows": rows,
    }
    path = Path(settings.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result, indent=1) + "\n")
    draw(rows, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
