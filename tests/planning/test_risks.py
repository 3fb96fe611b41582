"""The shipped table: what it says, what it forbids, and that the experiment made it."""

import json
import math
from pathlib import Path

import pytest

from hilore_jax import codecs
from hilore_jax.actions import Compress
from hilore_jax.planning import risks
from hilore_jax.planning.risks import default_risk, known, recommended_codecs, table

NAMES = "q k v attn_out attn_norm attn_residual mlp_norm mlp_gate mlp_up mlp_act".split()
EXPERIMENTS = Path(__file__).parents[2] / "experiments" / "results"


def test_a_block_takes_the_root_share_of_the_measured_error():
    row = next(r for r in table()["rows"] if r["name"] == "mlp_gate" and r["codec"] == "int8")
    compress = Compress(row["codec"], row["axis"], row["tile"])
    assert default_risk("mlp_gate", compress) == pytest.approx(row["error"] / math.sqrt(30))
    every_block = [default_risk("mlp_gate", compress)] * 30
    assert math.hypot(*every_block) == pytest.approx(row["error"])


def test_what_was_not_measured_may_not_be_used():
    assert default_risk("mlp_gate", Compress("fp8_e5m2", tile=7)) == math.inf
    assert default_risk("block_in", Compress()) == math.inf
    with pytest.raises(ValueError, match=r"mlp_gate.*Measured: int8:axis=") as error:
        default_risk("mlp_gate", Compress("int8", tile=7), strict=True)
    assert "int8:axis=-1:tile=7" in str(error.value) and "default_risks.py" in str(error.value)
    with pytest.raises(ValueError, match=r"none for that name; names known:.*'mlp_up'"):
        default_risk("my_name", Compress(), strict=True)


def test_a_users_codec_is_not_taken_for_a_built_in_of_its_name():
    own = codecs.Codec("int8", "int8", 3.0, direct=False)
    assert default_risk("mlp_up", Compress(own)) == math.inf
    built_in = Compress(codecs.BUILT_IN["int8"])
    assert default_risk("mlp_up", built_in) == default_risk("mlp_up", Compress("int8")) < 1


def test_both_spellings_of_an_axis():
    for last, same in ((-1, 2), (1, -2)):
        assert default_risk("q", Compress(axis=last, tile=32)) == default_risk(
            "q", Compress(axis=same, tile=32)
        )


@pytest.mark.parametrize("name", NAMES)
def test_known_has_the_best_axis_first(name):
    found = known(name)
    figures = [default_risk(name, c) for c in found]
    assert figures == sorted(figures) and figures[0] > 0 and math.isfinite(figures[-1])
    # Scales per feature, over tokens, suit most; least of all the residual stream, whose first
    # token is enormous.
    best = next(c for c in found if c.codec == "int8" and c.tile is not None)
    assert best.axis == (-1 if name in ("v", "mlp_act", "attn_residual") else 1)


def test_non_finite_measurements_are_forbidden(monkeypatch):
    body = {"schema": 1, "blocks": 4, "rows": [
        {"name": "a", "codec": "int8", "axis": -1, "tile": 128, "error": None},
        {"name": "a", "codec": "int8", "axis": -1, "tile": 32, "error": 0.02},
        {"name": "a", "codec": "int8", "axis": 1, "tile": 128, "error": 0.03},
        {"name": "a", "codec": "int8", "axis": 1, "tile": None, "error": 0.001},
        {"name": "b", "codec": "int4", "axis": 1, "tile": 32, "error": 0.5},
    ]}  # fmt: skip
    for cached in (risks._risks, recommended_codecs):
        cached.cache_clear()
    monkeypatch.setattr(risks, "table", lambda: body)
    try:
        assert default_risk("a", Compress("int8")) == math.inf
        assert known("a") == tuple(
            Compress("int8", axis, tile) for axis, tile in ((1, None), (-1, 32), (1, 128))
        )
        # A whole axis's error depends on its length; int4 is too risky even for one block; 1:128
        # is hardly smaller than -1:32 and worse.
        assert recommended_codecs() == (Compress("int8", -1, 32),)
    finally:
        for cached in (risks._risks, recommended_codecs):
            cached.cache_clear()


def test_recommended_codecs_are_few_and_each_best_for_a_name():
    offered = recommended_codecs()
    assert Compress("int8", axis=1, tile=32) in offered and 2 <= len(offered) <= 6
    assert not [c for c in offered if str(c.codec).startswith("fp8")]  # int8 is better at a byte
    for compress in offered:
        assert any(default_risk(name, compress) <= 0.015 for name in NAMES)


def test_the_shipped_table_is_the_experiments():
    measured = json.loads((EXPERIMENTS / "default_risks.json").read_text())
    assert measured["complete"]
    shipped = table()
    key = lambda row: json.dumps(row, sort_keys=True)  # noqa: E731
    isolated = [row for row in measured["rows"] if "name" in row]
    assert sorted(isolated, key=key) == sorted(shipped["rows"], key=key)
    assert shipped["model"] == "smollm2-135m-instruct" and shipped["versions"]["jax"]
    assert {row["name"] for row in shipped["rows"]} == set(NAMES)


def test_errors_add_as_squares():
    """Names compressed together, measured, against the root of their summed squares."""
    measured = json.loads((EXPERIMENTS / "default_risks.json").read_text())
    best = Compress("int8", axis=1, tile=32)
    blocks = math.sqrt(measured["blocks"])
    together = {r["combined"]: r["error"] for r in measured["rows"] if "combined" in r}
    names = {
        "gate_up": ("mlp_gate", "mlp_up"),
        "gate_up_q_v_out": ("mlp_gate", "mlp_up", "q", "v", "attn_out"),
    }
    assert set(together) == set(names)
    for label, error in together.items():
        predicted = math.hypot(*(default_risk(name, best) for name in names[label])) * blocks
        assert error == pytest.approx(predicted, rel=0.15)
