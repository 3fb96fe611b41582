"""Checkpoints written while training goes on: whole or not there, and a full disk is survived."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from hilore_jax.training.checkpoint import UNFINISHED, best, digests, named, place, steps
from hilore_jax.training.checkpoint import unfinished as unfinished_in

logger = logging.getLogger("hilore_jax")

KEEP_LATEST = 2
# Faults of the disk, not of ours: a later attempt may succeed.
_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)


class Saver:
    """Writes checkpoints into a folder, one at a time, in the background.

    `save` waits for the checkpoint before and copies the arrays to the host; all else is done by a
    thread. A checkpoint gets its name when it is whole; then older ones go. When the disk fails, a
    warning says so, the checkpoints before stay, and training goes on. Leaving the context waits,
    and raises if the last checkpoint could not be written. Every process of a run calls `save`;
    the first one names and removes.

    Args:
        folder: folder of checkpoints, made if needed.
        keep_latest: checkpoints kept, the newest; the one with the best score is kept beside them.

    Raises:
        OSError: on leaving, the last checkpoint could not be written.
    """

    def __init__(self, folder: Path, *, keep_latest: int = KEEP_LATEST):
        self.folder = folder.absolute()
        self.keep_latest = keep_latest
        self.failures = 0  # checkpoints that the disk did not take
        self._failed = ""  # what is wrong with the last one; empty when nothing is
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._checkpointer: Any = None

    def save(
        self, step: int, tree: Any, meta: Mapping[str, Any], *, score: float | None = None
    ) -> None:
        """Begins to write a checkpoint; the arrays may be donated as soon as it returns.

        Args:
            step: names the checkpoint; an older one of the same step is replaced.
            tree: pytree of arrays and PRNG keys.
            meta: plain JSON values; `meta["fingerprint"]` is compared at restore.
            score: how good the state is, higher is better; None or not finite: not known.
        """
        import orbax.checkpoint as ocp  # lazily: it takes two seconds

        self.wait()
        finite = score is not None and math.isfinite(score)
        meta = {"step": step, **meta, "score": score if finite else None}
        scratch = self.folder / f"{UNFINISHED}{step}"
        if self._checkpointer is None:
            self._checkpointer = ocp.StandardCheckpointer()
        try:
            if jax.process_index() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                for left in unfinished_in(self.folder):
                    shutil.rmtree(left, ignore_errors=left != scratch)
                scratch.mkdir()
            self._checkpointer.save(scratch / "state", named(tree))
        except Exception as error:
            self._survive(step, scratch, error)
            return
        work = threading.Thread(target=self._finish, args=(step, scratch, meta), name="checkpoint")
        self._thread = work
        work.start()

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            Exception: what stopped the writing, where it was no fault of the disk.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> Saver:
        """The saver itself."""
        logging.getLogger("absl").addFilter(_is_news)
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits; raises OSError if the last checkpoint could not be written."""
        self.wait()
        self._close()
        logging.getLogger("absl").removeFilter(_is_news)
        if self._failed and kind is None:
            raise OSError(
                f"the last checkpoint could not be written: {self._failed}. "
                f"{self.folder} holds those of updates {steps(self.folder) or 'none'}: make room, "
                "then resume from there"
            )

    def _close(self) -> None:
        if self._checkpointer is not None:
            checkpointer, self._checkpointer = self._checkpointer, None
            checkpointer.close()

    def _finish(self, step: int, scratch: Path, meta: Mapping[str, Any]) -> None:
        """The rest of a save, in the thread."""
        try:
            self._checkpointer.wait_until_finished()
            if jax.process_index() == 0:
                commit(scratch, place(self.folder, step), meta)
                prune(self.folder, self.keep_latest)
            self._failed = ""
        except Exception as error:
            try:
                self._survive(step, scratch, error)
            except Exception as fault:
                self._error = fault  # for the next `wait`

    def _survive(self, step: int, scratch: Path, error: Exception) -> None:
        """Says that the disk failed and frees what was written; raises any other fault."""
        with contextlib.suppress(Exception):  # what else failed in the same save
            self._close()  # first, since its threads may be writing still
        if jax.process_index() == 0:
            shutil.rmtree(scratch, ignore_errors=True)
        number = disk_fault(error)
        if number is None:
            raise error
        self.failures += 1
        self._failed = f"update {step}, {os.strerror(number)}"
        logger.warning(
            "the checkpoint of update %d could not be written to %s: %s. The run goes on; the "
            "checkpoints of updates %s stay. Make room before the next one is due",
            step,
            self.folder,
            os.strerror(number),
            steps(self.folder) or "none",
        )


def commit(scratch: Path, final: Path, meta: Mapping[str, Any]) -> None:
    """Gives a written checkpoint its plain values, the digests of its files, and its name.

    Args:
        scratch: the folder that holds `state`.
        final: where it goes, in one rename; what is there is replaced.
        meta: plain JSON values.
    """
    text = json.dumps({**meta, "sha256": digests(scratch)}, indent=2)
    with (scratch / "meta.json").open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # the name must not reach the disk before what it names
    if final.exists():
        shutil.rmtree(final)
    os.replace(scratch, final)


def prune(folder: Path, keep_latest: int) -> None:
    """Removes all checkpoints but the newest few and the one with the best score."""
    kept = {*steps(folder)[-keep_latest:], best(folder)}
    for step in steps(folder):
        if step not in kept:
            shutil.rmtree(place(folder, step))


def disk_fault(error: BaseException | None) -> int | None:
    """The errno of a disk that is full or fails, where that is behind an error.

    Example:
        >>> disk_fault(OSError(errno.ENOSPC, "No space left on device")) == errno.ENOSPC
        True
        >>> disk_fault(ValueError("step")) is None
        True
    """
    while error is not None:
        # tensorstore raises ValueError with the number in its text.
        told = re.search(r"os_error_code='(\d+)'", str(error))
        number = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
        if number in _FAULTS:
            return number
        error = error.__cause__ or error.__context__
    return None


def _is_news(record: logging.LogRecord) -> bool:
    """False of orbax's own account of a full disk, three tracebacks: `Saver` says it in a line."""
    return not record.exc_info or disk_fault(record.exc_info[1]) is None
