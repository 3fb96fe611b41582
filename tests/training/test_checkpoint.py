"""Checkpoints: exact, atomic, pruned; damaged ones are skipped and foreign ones refused."""

import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hilore_jax.training import checkpoint

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


def save(folder, *steps, **options):
    for step in steps:
        meta = {"fingerprint": FINGERPRINT, "data_position": 3 * step}
        checkpoint.save(folder, step, make_tree(step), meta, **options)


def test_restores_the_newest_bit_for_bit(tmp_path):
    save(tmp_path, 1, 2)
    tree, meta = restored(tmp_path)
    assert_same(tree, make_tree(2))
    assert (meta["step"], meta["data_position"]) == (2, 6)


def test_keeps_the_newest_few_and_leaves_no_scratch(tmp_path):
    save(tmp_path, 1, 2, 3, keep_latest=2)
    assert checkpoint.steps(tmp_path) == [2, 3]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["00000002", "00000003"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 1)
    checkpoint.save(tmp_path, 1, make_tree(7), {"fingerprint": FINGERPRINT})
    tree, _ = restored(tmp_path)
    assert_same(tree, make_tree(7))


def test_nothing_to_restore(tmp_path):
    assert checkpoint.restore(tmp_path / "none", make_tree(), FINGERPRINT) is None


def test_an_interrupted_save_is_invisible(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    monkeypatch.undo()
    tree, _ = restored(tmp_path)
    assert_same(tree, make_tree(1))
    save(tmp_path, 2)
    assert checkpoint.steps(tmp_path) == [1, 2]


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
