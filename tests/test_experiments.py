"""The scripts in experiments/ run, on their smoke settings."""

import dataclasses
import importlib.util
import json
import re
import signal
import sys
from pathlib import Path

import jax
import pytest

import hilore_jax as hl
from hilore_jax.planning.calibration import Measured, model_fingerprint
from hilore_jax.training.abstract import training_update

FOLDER = Path(__file__).parents[1] / "experiments"


@pytest.fixture
def script(monkeypatch):
    """Loads a script of experiments/ as a module."""

    def load(name):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        monkeypatch.syspath_prepend(FOLDER)  # a script's own folder is on its path
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def unoptimized():
    """XLA compiles fast and badly: these programs run for a moment only."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def test_learning_check_quick(script, unoptimized, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    module, out = script("learning_check"), tmp_path / "quick.json"
    assert module.main(["--quick", "--out", str(out)]) == 0
    assert str(FOLDER.parent) not in out.read_text()
    result = json.loads(out.read_text())
    assert result["complete"]
    (run,) = result["runs"]
    assert (run["policy"], run["seed"], len(run["reward"])) == ("int8", 0, 3)
    # A random model guesses: 1/11 with a standard error of 0.01 over an update's 768 letters.
    assert run["reward"][0] == pytest.approx(1 / 11, abs=0.04)
    assert set(run["gradient_error"]) == {"1", "2", "3"}
    assert all(1e-3 < error < 0.1 for error in run["gradient_error"].values())
    kept = result["kept"]["int8"]
    assert kept["vjp_residual_bytes_by_dtype"]["int8"] == 128 * 7 * (64 + 32 + 32 + 64 + 192 + 192)
    assert "int8" not in module.kept_by("gc")["vjp_residual_bytes_by_dtype"]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert "gradient_error_median" in printed.out and printed.err == ""


def test_learning_check_interrupted_keeps_what_it_has(script, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    module, out = script("learning_check"), tmp_path / "out.json"
    out.write_text("an earlier result")

    def interrupted(settings, runs, shown):
        runs.append({"policy": "gc", "seed": 0, "reward": [0.1, 0.2], "gradient_error": {}})
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(module, "run_all", interrupted)
    monkeypatch.setattr(module, "kept_by", lambda policy: {})
    assert module.main(["--out", str(out)]) == 130
    partial = json.loads((tmp_path / "out.partial.json").read_text())
    assert not partial["complete"] and partial["runs"][0]["reward"] == [0.1, 0.2]
    assert (tmp_path / "out.partial.png").exists()
    assert out.read_text() == "an earlier result"


def test_learning_check_result_is_of_this_script(script):
    result = json.loads((FOLDER / "results" / "learning_check.json").read_text())
    module = script("learning_check")
    assert result["complete"]
    assert result["policies"] == module.Settings().policies
    assert set(result["summary"]) == {"gc", "int8", "int4"}
    for label in ("gc", "int8"):
        (final,) = (v for k, v in result["summary"][label].items() if re.match("reward_of_last", k))
        assert result["summary"][label]["reward_at_update_1"] < 0.15 < 0.8 < final


def test_reverse_task_rewards_each_letter(script):
    task = script("learning_check").reverse_task(seed=3)
    item = task.draw(5)
    assert item == task.draw(5) and item.answer == item.question[::-1] and len(item.question) == 3
    assert task.score(item.answer, item) == 1.0
    assert task.score(item.answer[:2], item) == pytest.approx(2 / 3)
    assert task.score(item.answer + "a", item) == pytest.approx(3 / 4)
    assert task.score("zzz", item) == 0.0


def test_zero_rows_quick(script, unoptimized, tmp_path, capsys):
    out = tmp_path / "rows.json"
    assert script("zero_rows").main(["--quick", "--turns", "1", "--out", str(out)]) == 0
    whole, micro, skipped = json.loads(out.read_text())["rows"]
    assert (whole["microbatches"], micro["microbatches"], skipped["microbatches"]) == (4, 4, 2)
    assert (micro["rows_skipped"], skipped["rows_skipped"]) == (0, 8)
    assert skipped["n_tokens"] == micro["n_tokens"] == whole["n_tokens"]
    assert max(micro["gradient_difference"], skipped["gradient_difference"]) < 1e-5
    assert whole["grad_norm"] > 0 and "without dead rows" in capsys.readouterr().out


def test_gate_cost_quick(script, unoptimized, monkeypatch, tmp_path):
    module, out = script("gate_cost"), tmp_path / "gate.json"
    compare = module.compare
    ways = []
    monkeypatch.setattr(module, "compare", lambda config, lora: ways.append(lora) or [])
    module.main(module.Config(quick=True, out=str(out)))
    assert 0 < json.loads(out.read_text())["ladder_selection_seconds"] < 1
    rows = compare(module.Config(quick=True), ways[-1])  # one way of training compiles enough
    assert [row["update"] for row in rows] == [
        *("plan", "gate, all decode", "gradient checkpointing", "gate, all recompute")
    ]
    # One executable decodes every block of the calm batch and none of the wild one.
    assert [row["blocks_decoded"] for row in rows] == [None, 2.0, None, 0.0]
    plan, gate, recompute, _ = (row["temporaries"] for row in rows)
    assert abs(gate - plan) < abs(gate - recompute)


def quick_calibration(module, path):
    """What `hilore calibrate` finds for the model of a quick run, so that it need not."""
    settings = module.Settings(**module.QUICK)
    shape = module.small_parts().model.config
    blocks = training_update(shape, settings.training()).blocks()
    fits = [(0, 0, 2.4, 0.0053), (0, 1, 0.47, 0.005), (1, 0, 1.4, 0.0069), (1, 1, 0.76, 0.0071)]
    policies = [hl.parse_policy(text) for text in module.QUICK_POLICIES]
    measured = tuple(Measured(policies[p], b, k, 0.1, e, 1) for p, b, k, e in fits)
    rest = (3.565, 1.04, (0.364, 0.606), model_fingerprint(blocks), 11, 1.0, 2, {})
    hl.Calibration(measured, *rest).save(path)


def test_risk_model_quick_predicts_and_goes_on_where_it_stopped(
    script, unoptimized, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("matplotlib")
    module, out = script("risk_model"), tmp_path / "risk.json"
    partial, calibration = tmp_path / "risk.partial.json", tmp_path / "calibration.json"
    parts = module.small_parts()
    monkeypatch.setattr(module, "small_parts", lambda: parts)
    quick_calibration(module, calibration)
    options = ["--quick", "--out", str(out), "--calibration", str(calibration)]
    for name in ("Study", "Probe"):  # made once for both calls
        monkeypatch.setattr(module, name, keep_first(getattr(module, name)))
    add, made = module.Record.add, []

    def stops(record, name, row):
        add(record, name, row)
        if len(record.rows) == 9:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.Record, "add", stops)
        assert module.main(options) == 130
    before = json.loads(partial.read_text())["rows"]
    assert len(before) == 9 and not out.exists()
    monkeypatch.setattr(module.Record, "add", lambda *args: (made.append(args[1]), add(*args)))
    assert module.main(options) == 0
    result = json.loads(out.read_text())
    assert not partial.exists() and out.with_suffix(".png").stat().st_size > 20_000
    assert made and not set(made) & set(before)
    trials, updates = result["trials"], result["updates"]
    assert (len(trials), len(updates)) == (12, 4) and len(before) + len(made) == 16
    for name, row in before.items():
        assert row in (trials if name.startswith("policy") else updates)
    # Exposures as they were sampled and larger ones; errors follow the prediction.
    exposures = {row["microbatch"]: (row["real"], row["exposure"]) for row in trials}
    real, scaled = ([e for r, e in exposures.values() if r is kind] for kind in (True, False))
    assert len(real) == len(scaled) == 2 and min(scaled) > 1.4 * max(real)
    assert result["summary"]["all"]["rank_correlation"]["risk"] > 0.7
    ratios = [row["measured"] / row["predicted"] for row in trials]
    assert min(ratios) > 0.3 and max(ratios) < 3
    for row in updates:
        assert row["predicted"] <= row["level"] * (1 + 1e-6) and 0 < row["flops"] < 1
        assert (row["error"] > 0) == (row["compressed"] > 0)
    assert any(row["compressed"] for row in updates)
    assert "rank correlation" in capsys.readouterr().out


def test_fewest_bytes_takes_what_recomputes_no_matmul(script, tmp_path):
    risk_model, path = script("risk_model"), tmp_path / "calibration.json"
    quick_calibration(risk_model, path)
    made = hl.Calibration.load(path)
    # The policy of the calibration that decodes gate and up, and keeps what feeds matmuls.
    kept = "attn_out=store,attn_lse=store,q=store,k=store,v=store,attn_residual=store"
    policy = hl.parse_policy(f"mlp_gate=int8:tile=32,mlp_up=int8:tile=32,{kept}")
    unit = made.measured[-2:]
    fits = tuple(dataclasses.replace(m, policy=policy) for m in unit)
    made = dataclasses.replace(made, measured=(*made.measured, *fits))
    settings = risk_model.Settings(**risk_model.QUICK).training()
    blocks = training_update(risk_model.small_parts().model.config, settings).blocks()
    module = script("fewest_bytes")
    menu = module.calibrated(blocks, made, 0.5)
    exact, within, all_of_it = (module.fewest_bytes(menu, risk) for risk in (0.0, 1.1e-3, 1.0))
    assert exact.risk == 0 and all_of_it.policies == (policy,) * 2
    assert exact.nbytes > within.nbytes > all_of_it.nbytes and 0 < within.risk <= 1.1e-3
    for found in {*exact.policies, *within.policies}:
        explained = hl.explain(found, blocks.fn, *blocks.args, argnums=blocks.argnums)
        assert explained.recomputed.matmuls == 0


def keep_first(kind):
    found = []

    def make(*args):
        if not found:
            found.append(kind(*args))
        return found[0]

    return make


def test_logra_learning_quick(script, unoptimized, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    module, out = script("logra_learning"), tmp_path / "quick.json"
    ways = ("LoRA", "LoGRA")  # the others' programs compile elsewhere
    monkeypatch.setattr(module, "WAYS", ways)
    monkeypatch.setattr(module, "SMALL_WAYS", ways)
    assert module.main(module.Settings(quick=True, out=str(out))) == 0
    result = json.loads(out.read_text())
    assert [run["way"] for run in result["runs"]] == list(ways) and result["complete"]
    for run in result["runs"]:
        assert len(run["reward"]) == len(run["realized_kl"]) == 3
        assert all(kl > 0 for kl in run["realized_kl"])
    lora, logra = result["runs"]
    assert lora["predicted_kl"] == [None] * 3
    for said, seen in zip(logra["predicted_kl"], logra["realized_kl"], strict=True):
        assert seen == pytest.approx(said, rel=0.5)
    assert out.with_suffix(".png").stat().st_size > 10_000
    # What is there is not trained again.
    monkeypatch.setattr(module, "run", None)
    assert module.main(module.Settings(quick=True, out=str(out))) == 0
    assert json.loads(out.read_text())["runs"] == result["runs"]


def test_logra_learning_result_is_whole(script):
    module = script("logra_learning")
    result = json.loads((FOLDER / "results" / "logra_learning.json").read_text())
    settings = module.Settings()
    assert result["complete"] and {"out": settings.out, **result["settings"]} == vars(settings)
    made = [(run["model"], run["way"], run["seed"]) for run in result["runs"]]
    assert len(made) == len(set(made)) and set(made) == module.wanted(settings)
    assert module.summary(result["runs"]) == result["summary"]
    for run in result["runs"]:
        assert run["versions"]["jax"] and len(run["reward"]) == len(run["realized_kl"]) > 0


def test_logra_time_quick(script, unoptimized, tmp_path, capsys):
    module, out = script("logra_time"), tmp_path / "quick.json"
    module.main(module.Config(quick=True, micro=1, rows=2, seq=16, rank=8, out=str(out)))
    result = json.loads(out.read_text())
    *rows, probe = result["rows"]
    names = ["dense AdamW", "LoGRA", "LoGRA, no KL probe", "LoGRA, sketch_hidden kept"]
    assert [row["update"] for row in rows] == names
    assert probe["kl_probe_share_of_update"] < 1
    packet = result["packet"]
    assert 0 < packet["packet_bytes"] < packet["full_sync_bytes_float32"]
    # Qwen2.5-7B: 28 blocks of q, k, v, o, gate, up, down; rank 256, two bytes a number.
    outputs = 3584 + 512 + 512 + 3584 + 2 * 18944 + 3584
    large = result["packets of larger models, from shapes"][1]
    assert large["packet_bytes"] == pytest.approx(28 * outputs * 256 * 2, rel=1e-3)
    assert large["part"] <= 1 / 8


def test_logra_risk_quick(script, unoptimized, tmp_path):
    pytest.importorskip("matplotlib")
    module, out = script("logra_risk"), tmp_path / "quick.json"
    assert module.main(module.Settings(quick=True, out=str(out))) == 0
    for row in json.loads(out.read_text())["rows"]:
        error = row["error"]
        # A projection keeps lengths: with A x of the decoded x, the sketch is as far off as G.
        assert error[module.RECOMPUTED] == pytest.approx(error[module.DENSE], rel=0.4)
        assert 0 < error[module.KEPT] < error[module.RECOMPUTED]
        kept = row["kept_bytes_of_a_block"]
        # The norms are not read where A x is kept: 2 x 64 features, for 7 sketches of rank 8.
        assert kept[module.RECOMPUTED] == kept[module.DENSE]
        assert kept[module.DENSE] - kept[module.KEPT] == 16 * 34 * 4 * (2 * 64 - 7 * 8)


@pytest.mark.gpu_target
def test_logra_memory_measures_what_it_says(script, monkeypatch):
    module = script("logra_memory")
    small = dataclasses.replace(
        module.GEMMA_27B, vocab_size=512, d_model=128, d_ff=256, n_layers=2, n_heads=4, n_kv_heads=2
    )
    monkeypatch.setattr(module, "shape_of", lambda name: small)
    ways = {way.name: way for way in module.ways(rank=8)}
    chosen = ("dense AdamW", "LoGRA", "LoGRA, HiLoRe plan")
    rows = [module.measure("small", 1, ways[name], 8) for name in chosen]
    dense, logra, planned = rows
    recomputed = [row["recomputed_matmuls_a_block"] for row in rows]
    assert recomputed[0] > 0 and recomputed[1] > 0 and recomputed[2] == 0
    # The state: weights, and two moments of them; with LoGRA a number a row.
    assert logra["state_bytes"] < 0.5 * dense["state_bytes"]
    assert logra["peak_bytes"] < dense["peak_bytes"]
    assert planned["temporary_bytes"] > logra["temporary_bytes"]
    assert "small, 1" in module.table(rows)
