"""Disks that fail as disks do. Stored bytes stay what they are; the faults lie on top of them.

Faults that are modelled: no room for a new file or for a write, a write or sync that the device
refuses, sectors that cannot be read, a device that is slow, and the end of the process in the
middle of a write. Not modelled: a device that acknowledges a sync and loses the bytes.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.node.disk import OsDisk
from kvstore.node.page_probe import PageProbe


class Killed(Exception):
    """The process ended here."""


@dataclass
class FaultyDisk(OsDisk):
    """The operating system's disk, with the faults that its fields name."""

    refuse: dict[str, int] = field(default_factory=dict)
    """Operation (allocate, write, sync, rename) -> errno it fails with."""
    unreadable: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of bytes, in any file, that give EIO."""
    has_cache: bool = True
    """False: nothing is ever in the page cache."""
    has_probe: bool = True
    """False: the system cannot say what is in the page cache."""
    has_send_file: bool = True
    """False: the file system does not let the kernel send from its files."""
    is_memory: bool = False
    """True: the file system has no device behind it."""
    gate: threading.Event | None = None
    """Reads that go to the device, and syncs, wait for this."""
    write_left: int | None = None
    """After so many bytes of writes the process is killed."""
    room_bytes: int | None = None
    """What all files of the folder may take together; no limit if None."""
    calls: list[str] = field(default_factory=list)

    def _check(self, operation: str) -> None:
        self.calls.append(operation)
        number = self.refuse.get(operation)
        if number is not None:
            raise OSError(number, os.strerror(number))

    def _wait(self) -> None:
        if self.gate is not None:
            assert self.gate.wait(20.0)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        self._check("allocate")
        if self.room_bytes is not None:
            folder = Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent
            used_bytes = sum(path.stat().st_size for path in folder.glob("segment-*"))
            if used_bytes + size_bytes > self.room_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(descriptor, size_bytes)

    def rename(self, old: Path, new: Path) -> None:
        self._check("rename")
        super().rename(old, new)

    def sync(self, descriptor: int) -> None:
        self._check("sync")
        self._wait()
        super().sync(descriptor)

    def write(self, descriptor: int, views: Sequence[memoryview], offset: int) -> None:
        self._check("write")
        if self.write_left is None:
            super().write(descriptor, views, offset)
            return
        data = b"".join(views)[: self.write_left]
        self.write_left -= len(data)
        os.pwrite(descriptor, data, offset)
        if not self.write_left:
            raise Killed

    def read(self, descriptor: int, into: memoryview, offset: int) -> None:
        self._check("read")
        self._wait()
        for start, end in self.unreadable:
            if start < offset + len(into) and offset < end:
                raise OSError(errno.EIO, "unreadable")
        super().read(descriptor, into, offset)

    def read_cached(self, descriptor: int, into: bytearray, offset: int) -> bool:
        end = offset + len(into)
        is_readable = all(end <= bad or after <= offset for bad, after in self.unreadable)
        is_cached = self.has_cache and is_readable
        return is_cached and super().read_cached(descriptor, into, offset)

    def can_send(self, descriptor: int) -> bool:
        return self.has_send_file and super().can_send(descriptor)

    def send_file(self, peer: int, descriptor: int, offset: int, size_bytes: int) -> int:
        self._check("send_file")
        for start, end in self.unreadable:
            if start <= offset < end:
                raise OSError(errno.EIO, "unreadable")
            if offset < start < offset + size_bytes:
                size_bytes = start - offset
        return super().send_file(peer, descriptor, offset, size_bytes)

    def is_in_memory(self, descriptor: int) -> bool:
        return self.is_memory

    def probe_pages(self, descriptor: int) -> PageProbe | None:
        return super().probe_pages(descriptor) if self.has_probe else None

    def is_cached(self, probe: PageProbe, offset: int, size_bytes: int) -> bool:
        return self.has_cache and super().is_cached(probe, offset, size_bytes)
