"""The agent's socket in the file system: one agent serves a path at a time, and only its own user.

    PATH        the socket, mode 0600, removed when the agent ends
    PATH.lock   locked (flock) as long as an agent serves PATH; it stays, so that nobody can hold a
                lock on a file that is not there any more

An agent that was killed leaves the socket behind. Its lock is gone with it, so that the next one
may replace the socket. What is no socket is never replaced.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import InvalidArgument, StoreError
from .options import check_socket_path

LISTEN_BACKLOG = 1024
LOCK_ATTEMPTS = 10
_PID_DIGITS_MAX = 20


class SocketFile:
    """A listening Unix socket at a path, and the lock on it. Close it, or use it in `with`.

    Raises InvalidArgument for a path that is too long or is taken by something else than a socket,
    StoreError if somebody serves it, or the system refuses.
    """

    def __init__(self, path: Path, pid: int) -> None:
        check_socket_path(path)
        self.path = path
        self._lock = _lock(path.with_name(path.name + ".lock"), path, pid)
        try:
            _remove_stale(path)
            self.listener, self._identity = _listen(path)
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Nobody can connect any more; sessions go on. May be called again."""
        if self._lock < 0:
            return
        self.listener.close()
        try:
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == self._identity:
                os.unlink(self.path)
        except FileNotFoundError:
            pass  # somebody removed it, which ends nothing
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _lock(lock_path: Path, path: Path, pid: int) -> int:
    """Descriptor of the locked file, with our pid in it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    for _ in range(LOCK_ATTEMPTS):
        try:
            descriptor = os.open(lock_path, flags, 0o600)
        except OSError as error:
            raise StoreError(f"socket {path}: {lock_path.name}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, _PID_DIGITS_MAX, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise StoreError(
                f"socket {path}: another agent serves it (process {holder or 'unknown'})"
            ) from None
        if _is_at(lock_path, descriptor):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{pid}\n".encode(), 0)
            return descriptor
        # Somebody removed the file between our opening it and our lock.
        os.close(descriptor)
    raise StoreError(f"socket {path}: {lock_path.name} is removed again and again")


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    ours = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)


def _remove_stale(path: Path) -> None:
    """Removes the socket of an agent that is gone; the lock says that it is."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InvalidArgument(
            "--socket", given=f"{path}, which is there and is no socket", expected="a free path"
        )
    if _is_served(path):
        # No agent, or it would have the lock.
        raise StoreError(f"socket {path}: another program serves it")
    os.unlink(path)


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:
            return True  # its queue is full
        except ConnectionRefusedError:
            return False
        except OSError as error:
            raise StoreError(f"socket {path}: {error.strerror or error}") from error
        return True


def _listen(path: Path) -> tuple[socket.socket, tuple[int, int]]:
    """The socket, and which file it is at the path."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The mode must be right from the first moment, and bind takes it from nowhere else.
    before = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
        found = os.lstat(path)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise StoreError(f"socket {path}: cannot listen: {error.strerror or error}") from error
    finally:
        os.umask(before)
    listener.setblocking(False)
    return listener, (found.st_dev, found.st_ino)
