"""Files as a disk has them: what file system a folder is on, and files dropped from memory.

before a read that is to come from the disk: drop_pages(files), and say resident_bytes(files)
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""File systems whose files have no other place than memory."""


def file_system_of(folder: Path) -> str:
    """Its kind, such as "ext4"."""
    return find_file_system(Path("/proc/self/mountinfo").read_text(), folder.resolve())


def find_file_system(mounts: str, folder: Path) -> str:
    """The kind of the innermost mount around a folder (proc(5), mountinfo); the last of several at
    one place, which hides those before."""
    found, depth = "unknown", -1
    for line in mounts.splitlines():
        place, _, kind = line.partition(" - ")
        point = Path(place.split()[4].replace("\\040", " "))
        if folder.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = kind.split()[0], len(point.parts)
    return found


def drop_pages(files: Iterable[Path]) -> None:
    """Write what is not on the disk yet, and have the system forget the rest."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def resident_bytes(files: Iterable[Path]) -> int:
    """Bytes of files that are in memory, in whole pages (mincore(2))."""
    return sum(_resident_pages(path) for path in files) * mmap.PAGESIZE


def _resident_pages(path: Path) -> int:
    size_bytes = path.stat().st_size
    if not size_bytes:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        resident = np.zeros(-(-size_bytes // mmap.PAGESIZE), np.uint8)
        status = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(view.ctypes.data),
            ctypes.c_size_t(size_bytes),
            ctypes.c_void_p(resident.ctypes.data),
        )
        del view
        if status:
            raise OSError(ctypes.get_errno(), "mincore", str(path))
        return int(np.count_nonzero(resident & 1))
