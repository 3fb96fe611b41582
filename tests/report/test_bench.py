"""The benches run, and what they claim of memory holds, on CPU and on a GPU target."""

import dataclasses
import json

import pytest

from hilore_jax.models.config import DecoderConfig
from hilore_jax.report import bench
from hilore_jax.report.bench_decode import bench_decode
from hilore_jax.report.bench_remat import Setup, bench_compression, bench_parity, bench_segments

TINY = DecoderConfig(
    vocab_size=64,
    d_model=64,
    d_ff=192,
    n_layers=6,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
)
TARGETS = [None, pytest.param("h200", marks=pytest.mark.gpu_target)]


@pytest.fixture(params=TARGETS, ids=["cpu", "h200"])
def setup(request):
    if request.param is None:
        return Setup(TINY, 2, 2, 64, None)
    half = dataclasses.replace(TINY, dtype="bfloat16", param_dtype="bfloat16")
    return Setup(half, 2, 2, 64, request.getfixturevalue(request.param))


def test_memory_equals_that_of_jax_checkpoint(setup):
    rows = bench_parity(setup, repeats=0)  # two blocks: unrolled, each one is compiled apart
    assert [row["case"] for row in rows] == [
        "recompute, scanned",
        "recompute, unrolled",
        "store, scanned",
        "store, unrolled",
    ]
    for row in rows:
        assert row["memory_ratio"] == pytest.approx(1, abs=0.01), row
        assert row["same_operations"], row  # hence the time differs by noise only
    by = {row["case"]: row["temp_bytes"] for row in rows}
    for layout in ("scanned", "unrolled"):  # the witness that the policies differ
        assert by[f"recompute, {layout}"] < by[f"store, {layout}"]


def test_compression_frees_what_explain_says():
    # Scanned, so that 30 blocks compile as fast as one: the transients of one block are small then.
    setup = Setup(TINY, 30, 2, 64, None)
    for row in bench_compression(setup, repeats=0, codecs=("int4",), layouts=("scanned",)):
        assert row["share_of_savings"] >= 0.9, row


def test_segments_cost_no_copy_of_the_weights():
    for row in bench_segments(Setup(TINY, 6, 2, 16, None), counts=(3,)):
        assert row["share_of_weights"] <= 0.02, row


def test_times_are_paired():
    rows = bench_compression(
        Setup(TINY, 2, 1, 16, None), repeats=1, codecs=("int8",), layouts=("scanned",)
    )
    assert set(rows[0]["time_ratio"]) == {"median", "low", "high"}
    decode = bench_decode(dataclasses.replace(TINY, n_layers=2), rows=2, prompt=8, new=3, repeats=1)
    assert decode["same_tokens"] and decode["time_ratio"]["median"] > 0


def test_the_command_writes_its_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "family", lambda name, **kw: dataclasses.replace(TINY, **kw))
    monkeypatch.setattr(bench, "bench_segments", lambda setup: bench_segments(setup, (5,)))
    out = tmp_path / "bench.json"
    argv = ["--only", "segments", "--blocks", "5", "--rows", "1", "--seq", "8", "--out", str(out)]
    assert bench.main(argv) == 0
    saved = json.loads(out.read_text())
    assert saved["target"] == "cpu" and len(saved["rows"]) == 2
    printed = capsys.readouterr().out
    assert "segments: 5 segments, frozen" in printed and "share_of_weights <= 0.02" in printed
    with pytest.raises(ValueError, match=r"unknown benches \['speed'\]"):
        list(bench.run(bench.BenchConfig(only="speed")))


def test_files_are_checked_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "bench_parity", lambda *args: pytest.fail("too late"))
    with pytest.raises(ValueError, match=r"--out .*none/b\.json: the folder .*none does not exist"):
        bench.main(["--out", str(tmp_path / "none" / "b.json")])
    with pytest.raises(FileNotFoundError, match="--gpu-target none: no such file"):
        bench.main(["--gpu-target", "none"])
