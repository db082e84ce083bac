"""The seam between a target and its disk: every system call on stored bytes goes through here.

`OsDisk` is the operating system. Tests pass disks that are full, slow or failing. The methods block
and may be called from any thread; they raise OSError and nothing else, and keep no reference to a
buffer after they return.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from .page_probe import PageProbe

IOV_MAX = 1024
"""Buffers in one vectored system call, the limit of Linux."""

_MEMORY_FILE_SYSTEMS = frozenset({"ramfs", "tmpfs"})


class FileEnds(OSError):
    """A file is shorter than what is to be read of it: somebody cut it. No fault of the device."""

    def __init__(self, offset: int, size_bytes: int) -> None:
        super().__init__(errno.EIO, f"file ends before {size_bytes} bytes at {offset}")


class Disk(Protocol):
    """What a target asks of a file system."""

    def create(self, path: Path) -> int:
        """A descriptor of a new, empty file, open for reading and writing."""

    def open(self, path: Path) -> int:
        """A descriptor of an existing file, open for reading and writing."""

    def close(self, descriptor: int) -> None: ...

    def size(self, descriptor: int) -> int:
        """Length of the file in bytes."""

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        """Reserve the space of the first `size_bytes`, so that writing there cannot hit ENOSPC."""

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        """Cut the file to `size_bytes`."""

    def read(self, descriptor: int, into: memoryview, offset: int) -> None:
        """Fill `into`. FileEnds if the file ends before that."""

    def read_cached(self, descriptor: int, into: bytearray, offset: int) -> bool:
        """Fill `into` if all of it is in memory; False if not, or if the system cannot tell."""

    def can_send(self, descriptor: int) -> bool:
        """Whether `send_file` works on this file, by trying it with the first byte."""

    def send_file(self, peer: int, descriptor: int, offset: int, size_bytes: int) -> int:
        """Have the kernel copy bytes of the file to a socket; returns how many it took.

        Waits for the device if they are not in memory. BlockingIOError if the socket takes none,
        FileEnds if the file has no byte at `offset`.
        """

    def probe_pages(self, descriptor: int) -> PageProbe | None:
        """What `is_cached` asks for a file, or None if the system does not say."""

    def is_cached(self, probe: PageProbe, offset: int, size_bytes: int) -> bool:
        """Whether these bytes are in memory, so that reading them does not wait for the device."""

    def write(self, descriptor: int, views: Sequence[memoryview], offset: int) -> None:
        """Write all of `views`, one after the other, from `offset` on."""

    def count_waits(self) -> int:
        """How often the calling thread has gone to sleep; one that only lost its turn to others
        has not."""

    def sync(self, descriptor: int) -> None:
        """Return when the file's bytes are on the device."""

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in `folder` are on the device."""

    def rename(self, old: Path, new: Path) -> None: ...

    def remove(self, path: Path) -> None: ...

    def find_data(self, descriptor: int, offset: int) -> tuple[int, int] | None:
        """Start and end of the first range from `offset` on that was ever written, if any."""

    def advise(self, descriptor: int, advice: int) -> None:
        """Say how the file will be read, as an os.POSIX_FADV_ number. A hint: may do nothing."""

    def is_in_memory(self, descriptor: int) -> bool:
        """Whether the file has no device behind it, so that reading never waits."""


class OsDisk:
    """Files of the operating system."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        os.posix_fallocate(descriptor, 0, size_bytes)

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        os.ftruncate(descriptor, size_bytes)

    def read(self, descriptor: int, into: memoryview, offset: int) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(descriptor, [into[done:]], offset + done)
            if count == 0:
                raise FileEnds(offset, len(into))
            done += count

    def read_cached(self, descriptor: int, into: bytearray, offset: int) -> bool:
        try:
            return os.preadv(descriptor, (into,), offset, os.RWF_NOWAIT) == len(into)
        except OSError:
            # Most likely EAGAIN; whatever else it is, `read` will meet it again.
            return False

    def can_send(self, descriptor: int) -> bool:
        outlet, inlet = os.pipe2(os.O_CLOEXEC)
        try:
            return os.sendfile(inlet, descriptor, 0, 1) == 1
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                return False
            raise
        finally:
            os.close(outlet)
            os.close(inlet)

    def send_file(self, peer: int, descriptor: int, offset: int, size_bytes: int) -> int:
        count = os.sendfile(peer, descriptor, offset, size_bytes)
        if count == 0:
            raise FileEnds(offset, size_bytes)
        return count

    def probe_pages(self, descriptor: int) -> PageProbe | None:
        return PageProbe.open(descriptor, self.size(descriptor))

    def is_cached(self, probe: PageProbe, offset: int, size_bytes: int) -> bool:
        return probe.is_cached(offset, size_bytes)

    def write(self, descriptor: int, views: Sequence[memoryview], offset: int) -> None:
        left = list(views)
        while left:
            count = os.pwritev(descriptor, left[:IOV_MAX], offset)
            if count == 0:
                raise OSError(errno.EIO, f"nothing was written at {offset}")
            offset += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def count_waits(self) -> int:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw

    def sync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some mounts cannot sync a folder; renaming is still atomic there.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def find_data(self, descriptor: int, offset: int) -> tuple[int, int] | None:
        try:
            start = os.lseek(descriptor, offset, os.SEEK_DATA)
            return start, os.lseek(descriptor, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            raise

    def advise(self, descriptor: int, advice: int) -> None:
        os.posix_fadvise(descriptor, 0, 0, advice)

    def is_in_memory(self, descriptor: int) -> bool:
        device = os.fstat(descriptor).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            # "36 35 98:0 / /mnt rw,noatime - ext4 /dev/sda rw": the type follows the lone dash.
            mount, _, file_system = line.partition(" - ")
            if mount.split()[2] == wanted:
                return file_system.split()[0] in _MEMORY_FILE_SYSTEMS
        return False


def means_damage(error: OSError) -> bool:
    """Whether a read failed because of the bytes it asked for: they are gone or unreadable."""
    return error.errno in (errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG)


def means_full(error: OSError) -> bool:
    """Whether the disk refused for want of room, not because it is broken."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
