"""Checkpoints: exact; damaged ones are skipped and foreign ones refused."""

import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hilore_jax.training import checkpoint, saver

FINGERPRINT = {"model": "toy", "group": 4, "pair": (1, 2)}


def make_tree(seed=0):
    params = {
        "a": jax.random.normal(jax.random.key(seed), (3, 5)),
        "b": jnp.full((2,), seed, jnp.bfloat16),
    }
    return {
        "params": params,
        "opt_state": optax.adamw(1e-3).init(params),
        "step": jnp.int32(seed),
        "key": jax.random.key(seed),
    }


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def restored(folder, fingerprint=FINGERPRINT):
    found = checkpoint.restore(folder, make_tree(), fingerprint)
    assert found is not None
    return found


def save(folder, *steps, scores=(), **options):
    scores = dict(zip(steps, scores, strict=False))
    with saver.Saver(folder, **options) as writer:
        for step in steps:
            meta = {"fingerprint": FINGERPRINT, "data_position": 3 * step}
            writer.save(step, make_tree(step), meta, score=scores.get(step))


def test_restores_the_newest_bit_for_bit(tmp_path):
    save(tmp_path, 1, 2)
    tree, meta = restored(tmp_path)
    assert_same(tree, make_tree(2))
    assert (meta["step"], meta["data_position"]) == (2, 6)


def test_nothing_to_restore(tmp_path):
    assert checkpoint.restore(tmp_path / "none", make_tree(), FINGERPRINT) is None


def test_a_half_written_one_is_skipped_with_a_message(tmp_path, caplog):
    save(tmp_path, 1)
    (tmp_path / ".writing-2" / "state").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "hilore_jax"):
        tree, _ = restored(tmp_path)
    assert_same(tree, make_tree(1))
    assert f"skipped the half-written checkpoint {tmp_path / '.writing-2'}" in caplog.text
    save(tmp_path, 3)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["00000001", "00000003"]


@pytest.mark.parametrize(
    "text", [b"\xff\x00", b"null", b'{"step": 2}'], ids=["bytes", "null", "short"]
)
def test_what_is_no_record_of_a_checkpoint_is_skipped(tmp_path, text, caplog):
    (tmp_path / "00000002").mkdir()
    (tmp_path / "00000002" / "meta.json").write_bytes(text)
    with (
        caplog.at_level(logging.WARNING, "hilore_jax"),
        pytest.raises(ValueError, match=r"none of the checkpoints \[2\]"),
    ):
        checkpoint.restore(tmp_path, make_tree(), FINGERPRINT)
    assert "skipped the damaged checkpoint" in caplog.text
    assert checkpoint.best(tmp_path) is None


def test_the_best_is_the_newest_of_the_highest_score(tmp_path):
    assert checkpoint.best(tmp_path) is None
    for step, score in {1: 0.5, 2: 0.75, 3: 0.75, 4: None, 5: float("nan")}.items():
        (tmp_path / f"{step:08d}").mkdir()
        text = json.dumps({"step": step, "score": score})
        (tmp_path / f"{step:08d}" / "meta.json").write_text(text)
    assert checkpoint.best(tmp_path) == 3


def cut_meta(path):
    (path / "meta.json").write_text('{"step": 2, "fing')


def drop_state(path):
    shutil.rmtree(path / "state")


def cut_arrays(path):
    for file in (path / "state").rglob("*"):
        if file.is_file() and "d" in file.parent.name:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("damage", [cut_meta, drop_state, cut_arrays])
def test_a_damaged_newest_is_skipped_with_a_message(tmp_path, damage, caplog):
    save(tmp_path, 1, 2)
    damage(tmp_path / "00000002")
    with caplog.at_level(logging.WARNING, "hilore_jax"):
        tree, meta = restored(tmp_path)
    assert "skipped the damaged checkpoint" in caplog.text and "00000002" in caplog.text
    assert meta["step"] == 1
    assert_same(tree, make_tree(1))


def test_all_damaged_is_an_error(tmp_path):
    save(tmp_path, 1)
    drop_state(tmp_path / "00000001")
    with pytest.raises(ValueError, match=r"none of the checkpoints \[1\]"):
        checkpoint.restore(tmp_path, make_tree(), FINGERPRINT)


def test_another_config_is_refused_naming_the_difference(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(ValueError, match=r"group: checkpoint 4, this run 8; new: .* None.* True"):
        checkpoint.restore(tmp_path, make_tree(), FINGERPRINT | {"group": 8, "new": True})
