"""Checkpoints are written while training goes on; a full disk and an interruption lose none."""

import errno
import json
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from hilore_jax.training import checkpoint, saver

META = {"fingerprint": {}}
FULL = (  # tensorstore's own words
    'RESOURCE_EXHAUSTED: Error writing "a/0" in OCDBT database: Failed to write 2856706 bytes to '
    "file 7: No space left on device [os_error_code='28']"
)


def tree(value):
    return {"a": jnp.full((64, 64), value, jnp.float32), "key": jax.random.key(value)}


def value_of(folder):
    found = checkpoint.restore(folder, tree(0), {})
    assert found is not None
    assert len(np.unique(found[0]["a"])) == 1
    return int(found[0]["a"][0, 0])


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def held(monkeypatch):
    """Writing stops until the event is set."""
    go, wait = threading.Event(), ocp.StandardCheckpointer.wait_until_finished

    def later(self):
        if threading.current_thread().name == "checkpoint":
            assert go.wait(60)
        return wait(self)

    monkeypatch.setattr(ocp.StandardCheckpointer, "wait_until_finished", later)
    return go


def test_save_returns_before_the_checkpoint_is_there(tmp_path, held):
    state = tree(7)
    with saver.Saver(tmp_path) as writer:
        writer.save(1, state, META)
        assert checkpoint.steps(tmp_path) == []  # and training goes on, with these very buffers
        state["a"] = jax.jit(lambda a: a * 0 - 1, donate_argnums=0)(state["a"])
        jax.block_until_ready(state)
        assert checkpoint.restore(tmp_path, tree(0), {}) is None
        held.set()
        writer.wait()
        assert names(tmp_path) == ["00000001"]
    assert value_of(tmp_path) == 7


def test_a_save_waits_for_the_one_before_and_leaving_for_the_last(tmp_path, held):
    threading.Timer(0.2, held.set).start()
    with saver.Saver(tmp_path, keep_latest=3) as writer:
        writer.save(1, tree(1), META)
        writer.save(2, tree(2), META)
        assert 1 in checkpoint.steps(tmp_path)
    assert names(tmp_path) == ["00000001", "00000002"]


def test_keeps_the_newest_few_and_the_best(tmp_path):
    with saver.Saver(tmp_path, keep_latest=2) as writer:
        for step, score in enumerate([0.1, 0.9, float("nan"), 0.3, None], 1):
            writer.save(step, tree(step), META, score=score)
    assert names(tmp_path) == ["00000002", "00000004", "00000005"]
    assert checkpoint.best(tmp_path) == 2
    with saver.Saver(tmp_path, keep_latest=1) as writer:  # of a run that goes on
        writer.save(6, tree(6), META, score=0.95)
    assert names(tmp_path) == ["00000006"]


def test_a_step_again_replaces_it(tmp_path):
    with saver.Saver(tmp_path) as writer:
        writer.save(1, tree(1), META)
        writer.save(1, tree(7), META)
    assert (names(tmp_path), value_of(tmp_path)) == (["00000001"], 7)


def test_an_interrupted_one_has_no_name(tmp_path, monkeypatch):
    with saver.Saver(tmp_path) as writer:
        writer.save(1, tree(1), META)

    def interrupted(*_):
        raise RuntimeError("interrupted")

    monkeypatch.setattr(saver.os, "replace", interrupted)
    with pytest.raises(RuntimeError, match="interrupted"), saver.Saver(tmp_path) as writer:
        writer.save(2, tree(2), META)
    monkeypatch.undo()
    assert value_of(tmp_path) == 1


def full_in_the_thread(monkeypatch):
    real = ocp.StandardCheckpointer.wait_until_finished

    def wait(self):
        real(self)
        raise ValueError(FULL)

    monkeypatch.setattr(ocp.StandardCheckpointer, "wait_until_finished", wait)


def full_at_once(monkeypatch):
    def save(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ocp.StandardCheckpointer, "save", save)


def full_at_the_end(monkeypatch):
    def digests(*_):
        raise RuntimeError("while writing") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saver, "digests", digests)


@pytest.mark.parametrize("full", [full_in_the_thread, full_at_once, full_at_the_end])
def test_a_full_disk_is_survived(tmp_path, full, caplog):
    with caplog.at_level(logging.WARNING, "hilore_jax"), saver.Saver(tmp_path) as writer:
        writer.save(1, tree(1), META)
        writer.wait()
        with pytest.MonkeyPatch.context() as patch:
            full(patch)
            writer.save(2, tree(2), META)
            if writer._thread is not None:
                writer._thread.join()
        writer.wait()
        assert writer.failures == 1
        assert names(tmp_path) == ["00000001"] and value_of(tmp_path) == 1
        writer.save(3, tree(3), META)
    assert f"update 2 could not be written to {tmp_path}: No space left on device" in caplog.text
    assert "the checkpoints of updates [1] stay" in caplog.text
    assert value_of(tmp_path) == 3


def end_by_an_error(folder):
    with saver.Saver(folder) as writer:
        writer.save(4, tree(4), META)
        raise KeyError("what ended the run comes first")


def test_a_run_that_ends_without_its_last_checkpoint_says_so(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        full_at_once(patch)
        with (
            pytest.raises(OSError, match=r"update 4, No space left .* none: make room"),
            saver.Saver(tmp_path) as writer,
        ):
            writer.save(4, tree(4), META)
        with pytest.raises(KeyError):
            end_by_an_error(tmp_path)


def test_other_errors_are_not_survived(tmp_path, monkeypatch):
    def commit(*_):
        raise TypeError("not JSON")

    monkeypatch.setattr(saver, "commit", commit)
    with saver.Saver(tmp_path) as writer:
        writer.save(1, tree(1), META)
        with pytest.raises(TypeError, match="not JSON"):
            writer.save(2, tree(2), META)


def test_tracebacks_of_a_full_disk_are_not_printed(tmp_path, caplog):
    log = logging.getLogger("absl")

    def report(error):
        log.error("Failed to run", exc_info=error)
        return caplog.text.count("Failed to run")

    with saver.Saver(tmp_path):
        assert report(ValueError(FULL)) == 0
        assert report(ValueError("another")) == 1
    assert report(ValueError(FULL)) == 2


def test_the_score_is_in_the_record(tmp_path):
    with saver.Saver(tmp_path) as writer:
        writer.save(1, tree(1), META, score=0.25)
    assert json.loads((tmp_path / "00000001" / "meta.json").read_text())["score"] == 0.25
