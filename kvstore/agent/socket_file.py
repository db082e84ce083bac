"""The agent's socket in the file system: one agent serves a path at a time, and only its own user.

    PATH        the socket, mode 0600, removed when the agent ends
    PATH.lock   locked (flock) as long as an agent serves PATH; it stays, so that nobody can hold a
                lock on a file that is not there any more. Only a start that fails before it serves
                takes it away again, if it made it

An agent that was killed leaves the socket behind. Its lock is gone with it, so that the next one
may replace the socket. What is no socket is never replaced.
"""

from __future__ import annotations

import errno
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
FOLDER_EXPECTED = "a path in a folder that this user may write in"
_PID_DIGITS_MAX = 20


class SocketFile:
    """A listening Unix socket at a path, and the lock on it. Close it, or use it in `with`.

    Raises InvalidArgument for a path that is too long, is taken by something else than a socket, or
    lies in a folder that is not there or cannot be written in; StoreError if somebody serves it, or
    the system refuses.
    """

    def __init__(self, path: Path, pid: int) -> None:
        check_socket_path(path)
        self.path = path
        self._lock_path = path.with_name(path.name + ".lock")
        self._lock, self._removes_lock = _lock(self._lock_path, path, pid)
        try:
            _remove_stale(path)
            self.listener, self._identity = _listen(path)
        except BaseException:
            self._release_lock()
            raise

    def keep_lock(self) -> None:
        """The agent serves from now on: the lock's file stays when it ends."""
        self._removes_lock = False

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
        self._release_lock()

    def _release_lock(self) -> None:
        # While it is held: whoever waits for it sees that its file is gone, and makes it anew.
        if self._removes_lock and _is_at(self._lock_path, self._lock):
            self._lock_path.unlink(missing_ok=True)
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


def _lock(lock_path: Path, path: Path, pid: int) -> tuple[int, bool]:
    """Descriptor of the locked file, with our pid in it, and whether we made the file."""
    for _ in range(LOCK_ATTEMPTS):
        try:
            descriptor, is_new = _open_lock(lock_path)
        except FileNotFoundError:
            _refuse_missing_folder(path)
            continue  # somebody removed the file just now
        except OSError as error:
            raise _lock_refused(lock_path, path, error) from error
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
            return descriptor, is_new
        # Somebody removed the file between our opening it and our lock.
        os.close(descriptor)
    raise StoreError(f"socket {path}: {lock_path.name} is removed again and again")


def _open_lock(lock_path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(lock_path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
    except FileExistsError:
        return os.open(lock_path, flags), False


def _refuse_missing_folder(path: Path) -> None:
    """Raises InvalidArgument if the folder of the socket is not there."""
    if not path.parent.is_dir():
        raise InvalidArgument(
            "--socket",
            given=f"{path}, but folder {path.parent} is not there",
            expected=FOLDER_EXPECTED,
        )


def _lock_refused(lock_path: Path, path: Path, error: OSError) -> StoreError:
    """What a lock file that cannot be opened means for whoever gave the socket's path."""
    if isinstance(error, NotADirectoryError):
        why = f"{path.parent} is no folder"
    elif error.errno in (errno.EACCES, errno.EPERM) and os.path.lexists(lock_path):
        why = f"{lock_path.name} beside it is another user's"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        why = f"cannot write in folder {path.parent}: {error.strerror}"
    else:
        return StoreError(f"socket {path}: {lock_path.name}: {error.strerror}")
    return InvalidArgument("--socket", given=f"{path}, but {why}", expected=FOLDER_EXPECTED)


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
