"""Who owns a target's folder: its identity file and its lock.

A folder that belongs to something else is refused before anything in it is written. The lock is the
kernel's (flock), so it ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import TargetDamaged, TargetError, TargetLocked, TargetMismatch
from ..socket_file import read_pid, write_pid
from .segment import TargetIdentity, find_segment_files
from .slot import FORMAT_VERSION

IDENTITY_NAME = "target.json"
LOCK_NAME = "lock"
IDENTITY_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class TargetFolder:
    """A claimed folder; it is ours until `release`."""

    path: Path
    identity: TargetIdentity
    lock_descriptor: int
    identity_file: tuple[int, int]
    """Device and inode of the identity file when the folder was claimed."""

    def find_problem(self) -> str | None:
        """Why the path does not lead to the claimed folder any more, if that is so; blocks.

        Nothing else tells: a file that was removed can be written for as long as it is open.
        """
        try:
            found = _identify_file(self.path / IDENTITY_NAME)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                return f"its {IDENTITY_NAME} is gone"
            # Whether the folder is still there cannot be said; reads and writes will tell.
            return None
        return None if found == self.identity_file else f"its {IDENTITY_NAME} is another file"

    def release(self) -> None:
        os.close(self.lock_descriptor)


def claim_folder(path: Path, identity: TargetIdentity, *, pid: int, now_ns: int) -> TargetFolder:
    """Lock `path` for this process, and mark it as `identity`'s if it is new.

    Raises TargetMismatch if it belongs to another cluster, target or format version, TargetDamaged
    if it holds segments but no readable identity, TargetLocked if a live process has it, and
    TargetError if the folder cannot be used at all.
    """
    try:
        _check_identity(path, identity)
        path.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(path, pid)
        try:
            # Somebody else may have marked the folder before we had the lock.
            if not _check_identity(path, identity):
                _write_identity(path, identity, now_ns)
            identity_file = _identify_file(path / IDENTITY_NAME)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise TargetError(path, f"cannot be used: {error.strerror or error}") from error
    return TargetFolder(path, identity, descriptor, identity_file)


def _identify_file(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _check_identity(path: Path, identity: TargetIdentity) -> bool:
    """Whether the folder is marked as `identity`'s; False for one without a mark."""
    try:
        with open(path / IDENTITY_NAME, "rb") as file:
            content = file.read(IDENTITY_BYTES_MAX)
    except FileNotFoundError:
        segments, _ = find_segment_files(path)
        if segments:
            raise TargetDamaged(
                path, f"has {len(segments)} segment(s) but no {IDENTITY_NAME}"
            ) from None
        return False
    found = _parse_identity(path, content)
    expected = _describe(identity)
    for field in ("format", "cluster", "target"):
        if found.get(field) != expected[field]:
            raise TargetMismatch(path, what=field, found=found.get(field), expected=expected[field])
    return True


def _parse_identity(path: Path, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TargetDamaged(path, f"its {IDENTITY_NAME} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise TargetDamaged(path, f"its {IDENTITY_NAME} is not a JSON object")
    return found


def _describe(identity: TargetIdentity) -> dict[str, Any]:
    return {
        "format": FORMAT_VERSION,
        "cluster": identity.cluster.hex(),
        "target": identity.name,
    }


def _write_identity(path: Path, identity: TargetIdentity, now_ns: int) -> None:
    content = {**_describe(identity), "created_ns": now_ns}
    temporary = path / (IDENTITY_NAME + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path / IDENTITY_NAME)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(path: Path, pid: int) -> int:
    descriptor = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_pid(descriptor, pid)
    except BlockingIOError:
        owner = read_pid(descriptor) or "unknown"
        os.close(descriptor)
        raise TargetLocked(path, f"process {owner} serves it") from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
