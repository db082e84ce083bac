"""One worker a node: a lock in each target's folder, which ends with the process that holds it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvstore.errors import TargetError, TargetLocked

LOCK_NAME = "gc.lock"


@contextmanager
def locked_folders(folders: Iterable[Path], pid: int) -> Iterator[None]:
    """Hold the worker's lock of each folder; folders that are not there yet are made.

    Raises TargetLocked, which names the process, if another worker has one of them; TargetError if
    a folder cannot be used.
    """
    with ExitStack() as stack:
        for folder in folders:
            stack.callback(os.close, _lock(folder, pid))
        yield


def _lock(folder: Path, pid: int) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise TargetError(folder, f"cannot be used: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{pid}\n".encode(), 0)
    except BlockingIOError:
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise TargetLocked(folder, f"gc_worker process {owner} looks after it") from None
    except OSError as error:
        os.close(descriptor)
        raise TargetError(folder, f"cannot be locked: {error.strerror or error}") from error
    return descriptor
