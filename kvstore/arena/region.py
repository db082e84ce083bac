"""The one region of shared memory, as the process that made it and those that map it see it.

It is an anonymous file (memfd_create) that is sealed against shrinking and growing: nobody who has
the descriptor can make another process die of SIGBUS. It is gone with the last process that has it.
Not for who owns which part of it (allocator.py), nor for what lies in a part (run_layout.py).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from types import TracebackType
from typing import Self

import numpy as np

from ..errors import InvalidArgument, StoreError
from .run_layout import RUN_ALIGN_BYTES, RunLayout

ARENA_BYTES_MIN = 1 << 20
ARENA_BYTES_MAX = 1 << 44
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class ArenaRegion:
    """Shared memory of a fixed size, mapped whole. Close it, or use it in `with`."""

    def __init__(self, descriptor: int) -> None:
        """Maps the region behind `descriptor`, which stays the caller's.

        Raises InvalidArgument if that is no sealed region: it could shrink under the mapping.
        """
        _require_sealed(descriptor)
        self.size_bytes = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.size_bytes)
        self.view = memoryview(self._map)
        self.address = np.frombuffer(self._map, np.uint8).ctypes.data

    @staticmethod
    def create(size_bytes: int) -> int:
        """Descriptor of a new sealed region. Its pages are taken from the system when first used.

        Raises InvalidArgument for a size that is no multiple of 4,096 or out of bounds, StoreError
        if the system gives none.
        """
        is_fit = ARENA_BYTES_MIN <= size_bytes <= ARENA_BYTES_MAX
        if not is_fit or size_bytes % RUN_ALIGN_BYTES:
            raise InvalidArgument(
                "arena",
                given=size_bytes,
                expected=f"{ARENA_BYTES_MIN} to {ARENA_BYTES_MAX} bytes, a multiple of 4096",
            )
        try:
            return _make_sealed(size_bytes)
        except OSError as error:
            raise StoreError(f"arena of {size_bytes} bytes: {error.strerror or error}") from error

    def run(self, offset: int, layout: RunLayout) -> RunMemory:
        """The memory of a run at `offset`. Raises InvalidArgument if it does not fit."""
        if offset % RUN_ALIGN_BYTES or not 0 <= offset <= self.size_bytes - layout.run_bytes:
            raise InvalidArgument(
                "run",
                given=f"{layout.run_bytes} bytes at {offset}",
                expected=f"whole pages within the arena's {self.size_bytes} bytes",
            )
        view = self.view[offset : offset + layout.run_bytes]
        return RunMemory(layout, view, self.address + offset)

    def close(self) -> None:
        """Unmaps the region; while views of it are held it stays mapped, and goes with the last of
        them. May be repeated."""
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            return  # a run is still held: its views must stay valid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class RunMemory:
    """The bytes of one run: `view` (writable, layout.run_bytes long) begins at `address`."""

    __slots__ = ("address", "layout", "view")

    def __init__(self, layout: RunLayout, view: memoryview, address: int) -> None:
        self.layout = layout
        self.view = view
        self.address = address

    @property
    def data(self) -> memoryview:
        """All sections, and the few bytes between them: the run without its progress table."""
        return self.view[self.layout.section_offsets[0] : self.layout.section_range(-1)[1]]

    def section(self, section: int) -> memoryview:
        """A section of all blocks of the run."""
        start, end = self.layout.section_range(section)
        return self.view[start:end]

    def parity(self, first: int, end: int) -> memoryview:
        """The parity shards of the blocks `first` to `end`, of a run with room for them."""
        start, stop = self.layout.parity_range(first, end)
        return self.view[start:stop]

    def part(self, section: int, block: int) -> memoryview:
        """A section of one block."""
        start = self.layout.place(section, block)
        return self.view[start : start + self.layout.layout.sections[section].bytes]


def _make_sealed(size_bytes: int) -> int:
    descriptor = os.memfd_create("cachalot-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _require_sealed(descriptor: int) -> None:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0  # no memfd at all
    if seals & _SEALS != _SEALS:
        raise InvalidArgument(
            "arena",
            given=f"a descriptor with seals {seals:#x}",
            expected=f"a memfd with {_SEALS:#x}",
        )
