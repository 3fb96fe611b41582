"""Default risks: the gradient error of compressing one activation of one block, measured once.

Until a model has its own calibration, these figures stand in. `experiments/default_risks.py`
measured them on a real model with every block compressed at once; errors of different blocks add as
squares, so that one of `n` equal blocks takes `error / sqrt(n)`.
"""

import functools
import importlib.resources
import json
import math
from typing import Any

from hilore_jax import codecs
from hilore_jax.actions import Compress

_SCHEMA = 1
_TABLE = "default_risks.json"
_ACCEPTED = 0.015  # the paper's bound on an update's relative gradient error


@functools.cache
def table() -> dict[str, Any]:
    """The shipped measurements: model, versions, command, and one row a name and codec.

    Returns:
        `rows` have `name`, `codec`, `axis`, `tile`, `error` (relative error of the whole gradient
        with that name compressed in all `blocks` blocks; None: not finite) and `spread`.

    Example:
        >>> table()["blocks"]
        30
    """
    text = importlib.resources.files("hilore_jax.planning").joinpath(_TABLE).read_text("utf-8")
    body = json.loads(text)
    if body.get("schema") != _SCHEMA:
        raise ValueError(f"{_TABLE} has schema {body.get('schema')!r}, expected {_SCHEMA}.")
    return body


@functools.cache
def _risks() -> dict[str, dict[tuple[str, int, int | None], float]]:
    body = table()
    found: dict[str, dict[tuple[str, int, int | None], float]] = {}
    for row in body["rows"]:
        error = math.inf if row["error"] is None else row["error"]
        key = row["codec"], row["axis"], row["tile"]
        found.setdefault(row["name"], {})[key] = error / math.sqrt(body["blocks"])
    return found


def _key(compress: Compress) -> tuple[str, int, int | None]:
    # Activations are [batch, seq, features]: two spellings of each of the two axes.
    axis = {2: -1, -2: 1}.get(compress.axis, compress.axis)
    codec = compress.codec
    known = isinstance(codec, str) or codecs.BUILT_IN.get(codec.name) is codec
    return (codecs.get_codec(codec).name if known else "", axis, compress.tile)


def default_risk(name: str, compress: Compress, *, strict: bool = False) -> float:
    """Relative gradient error of keeping one activation of one block in low precision.

        risk_u = ||g_L - g|| / ||g||,   over n equal blocks sqrt(n) risk_u

    Args:
        name: activation name, one of `hilore_jax.models.names.NAMES`.
        compress: how it is kept.
        strict: raise where nothing was measured, instead of returning infinity.

    Returns:
        The risk; infinite, which forbids the use, where it was not measured or not finite.

    Raises:
        ValueError: not measured, and `strict`; lists what was.

    Example:
        >>> 0 < default_risk("mlp_up", Compress("int8", axis=1, tile=32)) < 0.002
        True
        >>> default_risk("my_own_name", Compress())
        inf
    """
    risks = _risks().get(name, {})
    key = _key(compress)
    if key not in risks and strict:
        names = sorted(_risks())
        allowed = ", ".join(map(str, known(name))) or f"none for that name; names known: {names}"
        raise ValueError(
            f"no risk was measured for {name!r} kept as {compress}. Measured: {allowed}. Pass "
            "risks=your_function, or measure with experiments/default_risks.py."
        )
    return risks.get(key, math.inf)


def known(name: str) -> tuple[Compress, ...]:
    """What was measured for a name and stayed finite, the least risk (its best axis) first.

    Example:
        >>> known("q")[0].axis, known("my_own_name")
        (1, ())
    """
    risks = _risks().get(name, {})
    finite = sorted((key for key in risks if math.isfinite(risks[key])), key=lambda k: risks[k])
    return tuple(Compress(*key) for key in finite)


@functools.cache
def recommended_codecs() -> tuple[Compress, ...]:
    """What a menu should offer: codecs that are the best at their size for some name.

    The best has the least risk among those of no more than 1.05 times its bytes, so that a handful
    remains. Scales over a whole axis are left out: their error depends on the axis's length, which
    is not the measurement's; so is what one block alone may not have.

    Example:
        >>> Compress("int8", axis=1, tile=32) in recommended_codecs()
        True
    """
    chosen: set[Compress] = set()
    for name in _risks():
        usable = [c for c in known(name) if c.tile is not None]  # the least risk first
        usable = [c for c in usable if default_risk(name, c) <= _ACCEPTED]
        for place, option in enumerate(usable):
            size = 1.05 * _bytes_per_value(option)
            if not any(_bytes_per_value(better) <= size for better in usable[:place]):
                chosen.add(option)
    return tuple(sorted(chosen, key=lambda c: (_bytes_per_value(c), str(c))))


def _bytes_per_value(compress: Compress) -> float:
    values = 1 << 12
    tile = min(compress.tile, values) if compress.tile else compress.tile
    return codecs.nbytes((values, values), compress.codec, axis=-1, tile=tile) / values**2
