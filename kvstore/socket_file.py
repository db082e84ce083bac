"""A server's Unix socket in the file system: one process serves a path at a time, for its own user.

    PATH        the socket, mode 0600, removed when its server ends
    PATH.lock   locked (flock) as long as a process serves PATH; it stays, so that nobody can hold a
                lock on a file that is not there any more. Only a start that fails before it serves
                takes it away again, if it made it

A server that was killed leaves the socket behind. Its lock is gone with it, so that the next one
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

from .errors import InvalidArgument, StoreError

SOCKET_PATH_BYTES_MAX = 107
"""sun_path of unix(7) has 108 bytes, the last of them zero."""
LOCK_SUFFIX = ".lock"
LISTEN_BACKLOG = 1024
LOCK_ATTEMPTS = 10
FOLDER_EXPECTED = "a path in a folder that this user may write in"
_PID_LINE_BYTES_MAX = 20


def check_socket_path(path: Path, option: str = "--socket") -> None:
    """The path fits a socket's address. Raises InvalidArgument."""
    length = len(os.fsencode(path))
    if not 0 < length <= SOCKET_PATH_BYTES_MAX:
        raise InvalidArgument(
            option,
            given=f"a path of {length} bytes, {path}",
            expected=f"at most {SOCKET_PATH_BYTES_MAX}, the limit of the system",
        )


def remove_stale_socket(path: Path) -> None:
    """Remove a socket that a killed server left, unless some process serves it again."""
    try:
        with open(path.with_name(path.name + LOCK_SUFFIX), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)
    except (FileNotFoundError, BlockingIOError):
        return


class SocketFile:
    """A listening Unix socket at a path, and the lock on it. Close it, or use it in `with`.

    Raises InvalidArgument for a path that is too long, is taken by something else than a socket, or
    lies in a folder that is not there or cannot be written in; StoreError if somebody serves it, or
    the system refuses.
    """

    def __init__(
        self, path: Path, pid: int, *, option: str = "--socket", noun: str = "agent"
    ) -> None:
        """`option` gave the path, and `noun` is what serves it: words of messages."""
        check_socket_path(path, option)
        self.path = path
        self._lock_path = path.with_name(path.name + LOCK_SUFFIX)
        self._lock, self._removes_lock = _lock(self._lock_path, path, pid, option, noun)
        try:
            _remove_stale(path, option)
            self.listener, self._identity = _listen(path)
        except BaseException:
            self._release_lock()
            raise

    def keep_lock(self) -> None:
        """It is served from now on: the lock's file stays when it ends."""
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


def _lock(lock_path: Path, path: Path, pid: int, option: str, noun: str) -> tuple[int, bool]:
    """Descriptor of the locked file, with our pid in it, and whether we made the file."""
    for _ in range(LOCK_ATTEMPTS):
        try:
            descriptor, is_new = _open_lock(lock_path)
        except FileNotFoundError:
            _refuse_missing_folder(path, option)
            continue  # somebody removed the file just now
        except OSError as error:
            raise _lock_refused(lock_path, path, error, option) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = read_pid(descriptor)
            os.close(descriptor)
            raise StoreError(
                f"socket {path}: another {noun} serves it (process {holder or 'unknown'})"
            ) from None
        if _is_at(lock_path, descriptor):
            write_pid(descriptor, pid)
            return descriptor, is_new
        # Somebody removed the file between our opening it and our lock.
        os.close(descriptor)
    raise StoreError(
        f"socket {path}: {lock_path.name} cannot be made in {path.parent}, or is removed again and"
        " again; name a path in another folder"
    )


def write_pid(descriptor: int, pid: int) -> None:
    """Into a lock file, over what was there, which is cut off behind it only then: a reader always
    finds a first line."""
    line = f"{pid}\n".encode()
    os.pwrite(descriptor, line, 0)
    os.ftruncate(descriptor, len(line))


def read_pid(descriptor: int) -> str:
    """The first line of a lock file; behind it may still be what was longer."""
    content = os.pread(descriptor, _PID_LINE_BYTES_MAX, 0).decode("ascii", "replace")
    return content.partition("\n")[0].strip()


def _open_lock(lock_path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(lock_path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
    except FileExistsError:
        return os.open(lock_path, flags), False


def _refuse_missing_folder(path: Path, option: str) -> None:
    """Raises InvalidArgument if the folder of the socket is not there."""
    if not path.parent.is_dir():
        raise InvalidArgument(
            option,
            given=f"{path}, but folder {path.parent} is not there",
            expected=FOLDER_EXPECTED,
        )


def _lock_refused(lock_path: Path, path: Path, error: OSError, option: str) -> StoreError:
    """What a lock file that cannot be opened means for whoever gave the socket's path."""
    if isinstance(error, NotADirectoryError):
        why = f"{path.parent} is no folder"
    elif error.errno in (errno.EACCES, errno.EPERM) and os.path.lexists(lock_path):
        why = f"{lock_path.name} beside it is another user's"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        why = f"cannot write in folder {path.parent}: {error.strerror}"
    else:
        return StoreError(f"socket {path}: {lock_path.name}: {error.strerror}")
    return InvalidArgument(option, given=f"{path}, but {why}", expected=FOLDER_EXPECTED)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    ours = os.fstat(descriptor)
    return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)


def _remove_stale(path: Path, option: str) -> None:
    """Removes the socket of a server that is gone; the lock says that it is."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InvalidArgument(
            option, given=f"{path}, which is there and is no socket", expected="a free path"
        )
    if _is_served(path):
        # None of ours, or it would have the lock.
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
