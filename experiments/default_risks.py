"""Default risks: what compressing one activation does to the gradient of a real model.

One name at a time is kept in low precision in all 30 blocks of SmolLM2-135M, and the gradient of a
GRPO loss on real text is compared with the exact one. Every other name is stored, except what
follows elementwise from the compressed one: backward recomputes that from the decoded value, as it
will under a plan. Written are `results/default_risks.json` and the table that the package ships.

    python experiments/default_risks.py             # half an hour on two CPU cores; resumes
    python experiments/default_risks.py --quick     # a small random model, to see that it works
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from tqdm import tqdm

import hilore_jax as hl
from hilore_jax.models import tokenizer, weights
from hilore_jax.models.config import DecoderConfig
from hilore_jax.models.decoder import Decoder
from hilore_jax.training.batch import Batch
from hilore_jax.training.gradients import make_gradients
from hilore_jax.training.step import init_state, make_score
from hilore_jax.training.trainer import versions

MODEL = "smollm2-135m-instruct"
SHIPPED = Path(__file__).parents[1] / "hilore_jax" / "planning" / "default_risks.json"
NAMES = (
    *("mlp_gate", "mlp_up", "q", "k", "v", "attn_out", "mlp_act"),
    *("mlp_norm", "attn_norm", "attn_residual"),
)
# What follows elementwise from a name, and is recomputed with it.
FOLLOWS = {"mlp_gate": ("mlp_act",), "mlp_up": ("mlp_act",), "attn_residual": ("mlp_norm",)}
CODECS = (
    hl.Compress("int8", axis=-1, tile=128),
    hl.Compress("int8", axis=1, tile=32),
    hl.Compress("int8", axis=-1, tile=32),
    hl.Compress("int4", axis=-1, tile=32),
    hl.Compress("int8", axis=-1, tile=64),
    hl.Compress("int8", axis=1, tile=None),
    hl.Compress("fp8_e4m3", axis=-1, tile=128),
    hl.Compress("int4", axis=1, tile=32),
)
BEST = hl.Compress("int8", axis=1, tile=32)
# Several names at once: how well the root of the summed squares predicts them.
COMBINED = {
    "gate_up": dict.fromkeys(("mlp_gate", "mlp_up"), BEST),
    "gate_up_q_v_out": dict.fromkeys(("mlp_gate", "mlp_up", "q", "v", "attn_out"), BEST),
}
ROWS, PROMPT, COMPLETION = 16, 17, 17  # 34 tokens a row
FACTS = """Paris is the capital of France and lies on the river Seine
water boils at one hundred degrees Celsius at sea level
twelve times eleven is one hundred and thirty two
the moon goes around the earth in about twenty seven days
a triangle with three equal sides is called equilateral
photosynthesis turns light, water and carbon dioxide into sugar
the first ten prime numbers add up to one hundred twenty nine
Shakespeare wrote Hamlet, Macbeth and many sonnets in London
to sort a list in Python, call sorted or the method sort
if two apples cost three dollars, then six cost nine dollars
penguins live in the southern half of the world and cannot fly
a byte has eight bits, and a kilobyte has a thousand bytes
the train left at nine and arrived four hours later, at one
gold is heavier than silver, and lead is heavier than iron
the heart pumps blood through arteries and veins all day
in spring the days become longer and the trees grow leaves
half of eighty four is forty two, and a third of it is fourteen
the Pacific is the largest ocean, larger than all land together
bread is made from flour, water, salt and yeast, then baked
the speed of light is about three hundred thousand km a second
Mozart was born in Salzburg and wrote more than forty symphonies
a leap year has three hundred sixty six days, one more than usual
the square root of one hundred and forty four is twelve
volcanoes form where molten rock rises through the crust
the opposite of ancient is modern, and of shallow it is deep
seven plus eight is fifteen, minus six leaves nine
bees collect nectar from flowers and turn it into honey
the Nile flows north through Egypt into the Mediterranean
to boil an egg, put it in hot water for about eight minutes
Newton described gravity, and Einstein described it again
a decade is ten years, a century is a hundred, and so on
the cat slept on the warm roof while the dog guarded the door""".split("\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Relative gradient error by compressed name, codec, axis and tile."""

    microbatches: int = 2
    """Sets of 16 rows, each compared on its own; at most 2."""
    quick: bool = False
    """A random model of two blocks, two names, two codecs; nothing is shipped."""
    out: str = ""
    """JSON file; when empty, `results/default_risks.json` beside this script, or
    `runs/default_risks_quick.json` for a quick run."""
    ship: bool = True
    """Also write the package's table, after a complete run."""


def policy_of(actions: dict[str, hl.Compress]) -> hl.Policy:
    """These names compressed, what follows from them recomputed, all others stored."""
    recomputed = {name for compressed in actions for name in FOLLOWS.get(compressed, ())}
    stored = {name: hl.Store() for name in (*NAMES, "attn_lse") if name not in recomputed}
    return hl.Policy({**stored, **actions})


def real_model() -> tuple[Decoder, list[list[int]]]:
    """SmolLM2 in float32 and the tokens of 32 sentences."""
    text = tokenizer.load(MODEL)
    encoded = [
        text.encode(f"Question: is the next sentence true or not?\n{fact}.\nAnswer: yes, {fact}")
        for fact in FACTS
    ]
    return weights.load(MODEL, dtype="float32"), encoded


def small_model() -> tuple[Decoder, list[list[int]]]:
    """A random decoder of two blocks, and random tokens."""
    config = DecoderConfig(
        vocab_size=64, d_model=64, d_ff=96, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=32
    )
    tokens = np.random.default_rng(0).integers(3, 64, (len(FACTS), PROMPT + COMPLETION))
    return Decoder(config, rngs=nnx.Rngs(0)), tokens.tolist()


def batches(encoded: list[list[int]], count: int, score: Callable[..., Any]) -> list[Batch]:
    """Microbatches with the model's own log-probs as old ones and advantages of both signs."""
    made, rng = [], np.random.default_rng(0)
    for first in range(0, count * ROWS, ROWS):
        rows = encoded[first : first + ROWS]
        short = [len(row) for row in rows if len(row) < PROMPT + COMPLETION]
        if short:
            raise ValueError(f"a text has {min(short)} tokens, expected {PROMPT + COMPLETION}.")
        tokens = jnp.array([row[: PROMPT + COMPLETION] for row in rows], jnp.int32)[None]
        real = jnp.ones_like(tokens, bool)
        rewards = rng.random((ROWS // 8, 8), np.float32)
        made.append(
            Batch(
                tokens=tokens,
                attention_mask=real,
                completion_mask=real[..., PROMPT:],
                logp_old=score(tokens, real),
                logp_ref=None,
                advantages=hl.grpo.group_advantages(jnp.asarray(rewards)).reshape(1, ROWS),
            )
        )
    return made


@jax.jit
def squares(found: Any, exact: Any) -> tuple[jax.Array, jax.Array]:
    """Squared norms of the difference and of the exact gradient."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True))
    error = sum((jnp.sum((f - e) ** 2) for f, e in pairs), jnp.float32(0))
    return error, sum((jnp.sum(e**2) for _, e in pairs), jnp.float32(0))


def prober(settings: Settings) -> tuple[int, Callable[[hl.Policy], list[float]]]:
    """Number of blocks, and the errors of a policy, one a microbatch."""
    decoder, encoded = small_model() if settings.quick else real_model()
    blocks = decoder.config.n_layers
    graphdef, state = init_state(decoder, optax.identity(), jax.random.key(0))
    scored = make_score(graphdef)

    def score(tokens: jax.Array, mask: jax.Array) -> jax.Array:
        return scored(state.params, state.frozen, tokens, mask, completion=COMPLETION)

    data = batches(encoded, settings.microbatches, score)
    compiled = jax.jit(
        make_gradients(graphdef, beta=0.0),
        static_argnums=0,
        compiler_options=hl.compiler_options(),
    )

    def gradients(policy: hl.Policy, batch: Batch) -> Any:
        return compiled((policy,) * blocks, state, batch)[0]

    exact = [gradients(hl.Policy(default=hl.Store()), batch) for batch in data]

    def probe(policy: hl.Policy) -> list[float]:
        pairs = (squares(gradients(policy, b), e) for b, e in zip(data, exact, strict=True))
        return [float(jnp.sqrt(error / norm)) for error, norm in pairs]

    return blocks, probe


def wanted(settings: Settings) -> Iterator[tuple[dict[str, Any], dict[str, hl.Compress]]]:
    """Every row to measure: what identifies it, and the compressed names."""
    names, codecs = (NAMES[:2], CODECS[:2]) if settings.quick else (NAMES, CODECS)
    for codec in codecs:
        for name in names:
            key = {"name": name, "codec": codec.codec, "axis": codec.axis, "tile": codec.tile}
            yield key, {name: codec}
    for label, actions in COMBINED.items():
        if not settings.quick:
            yield {"combined": label}, actions


def finite(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def measure(
    settings: Settings, rows: list[dict[str, Any]], save: Callable[[int], None], bar: tqdm
) -> int:
    """Appends what `rows` lacks, saving after each; returns the number of blocks."""
    blocks, probe = prober(settings)
    for key, actions in wanted(settings):
        if not any(key.items() <= row.items() for row in rows):
            bar.set_postfix_str(" ".join(map(str, key.values())))
            errors = probe(policy_of(actions))
            mean = math.sqrt(statistics.fmean(e * e for e in errors))
            spread = (max(errors) - min(errors)) / 2
            rows.append({**key, "error": finite(mean), "spread": finite(spread)})
            save(blocks)
        bar.update()
    return blocks


def write(path: Path, value: Any) -> None:
    """Writes JSON, one row a line, or nothing."""
    rows = ",\n".join("  " + json.dumps(row) for row in value["rows"])
    head = json.dumps({**value, "rows": []}, indent=1)
    assert head.count('"rows": []') == 1
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(head.replace('"rows": []', f'"rows": [\n{rows}\n ]') + "\n")
    os.replace(partial, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what is missing and writes both files; 130 after an interruption."""
    argv = list(sys.argv[1:] if argv is None else argv)
    settings = tyro.cli(Settings, args=argv, prog="default_risks.py", description=__doc__)
    beside = Path(__file__).parent / "results" / "default_risks.json"
    path = Path(settings.out or ("runs/default_risks_quick.json" if settings.quick else beside))
    began, rows, before = time.perf_counter(), [], 0.0
    identity = {
        "schema": 1,
        "model": "random" if settings.quick else MODEL,
        "what": "relative error of the whole gradient, the name compressed in all blocks; root "
        "mean square over microbatches, and half their range",
        "rows_by_tokens": [ROWS, PROMPT + COMPLETION],
        "dtype": "float32",
        "microbatches": settings.microbatches,
        "versions": {k: v for k, v in versions().items() if k in ("jax", "jaxlib", "hilore_jax")},
        "device": jax.devices()[0].device_kind,
    }
    if path.is_file():
        earlier = json.loads(path.read_text())
        if all(earlier.get(key) == value for key, value in identity.items()):
            rows, before = earlier["rows"], earlier["minutes"]

    def save(blocks: int, complete: bool = False) -> None:
        minutes = round(before + (time.perf_counter() - began) / 60, 1)
        command = " ".join(["python experiments/default_risks.py", *argv])
        about = {"command": command, "complete": complete, "blocks": blocks, "minutes": minutes}
        write(path, {**identity, **about, "rows": rows})

    complete, total = False, sum(1 for _ in wanted(settings))
    with (
        contextlib.suppress(KeyboardInterrupt),
        tqdm(total=total, unit="policy", disable=None) as bar,
    ):
        blocks = measure(settings, rows, save, bar)
        save(blocks, complete=True)
        complete = True
    if complete and settings.ship and not settings.quick:
        ship(path, SHIPPED)
    print(f"{len(rows)} of {total} rows: {path.name}")
    return 0 if complete else 130


def ship(measured: Path, shipped: Path) -> None:
    """The package's table: the isolated rows, in the order of names and then of error."""
    body = json.loads(measured.read_text())
    rows = [row for row in body["rows"] if "name" in row]
    rows.sort(
        key=lambda r: (NAMES.index(r["name"]), math.inf if r["error"] is None else r["error"])
    )
    write(shipped, {**{k: v for k, v in body.items() if k != "minutes"}, "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
