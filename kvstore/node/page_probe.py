"""Asks the kernel whether bytes of a file are in its page cache: mincore(2).

A mapping of the file says which bytes are meant. It is never read through, so a file that shrinks
or a device that fails cannot raise SIGBUS here. Belongs to the event loop.
"""

from __future__ import annotations

import ctypes
import mmap

PAGES_PER_CALL = 1024
_PROT_NONE = 0
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class PageProbe:
    """What mincore needs to know of one file. Made by `open`."""

    __slots__ = ("_address", "_answer", "_answer_address", "_size_bytes")

    def __init__(self, address: int, size_bytes: int) -> None:
        self._address = address
        self._size_bytes = size_bytes
        self._answer = bytearray(PAGES_PER_CALL)
        self._answer_address = ctypes.addressof(ctypes.c_char.from_buffer(self._answer))

    @classmethod
    def open(cls, descriptor: int, size_bytes: int) -> PageProbe | None:
        """A probe of a file that is not empty, or None where there is no such thing."""
        address = _libc.mmap(None, size_bytes, _PROT_NONE, mmap.MAP_SHARED, descriptor, 0)
        if address is None or address == _MAP_FAILED:
            return None
        probe = cls(address, size_bytes)
        if not probe._ask(0, 1):
            probe.close()
            return None
        return probe

    def is_cached(self, offset: int, size_bytes: int) -> bool:
        """Whether all these bytes, of which there is at least one, are in memory now."""
        assert 0 <= offset < offset + size_bytes <= self._size_bytes
        page = offset // mmap.PAGESIZE
        end = (offset + size_bytes - 1) // mmap.PAGESIZE + 1
        while page < end:
            count = min(end - page, PAGES_PER_CALL)
            if not self._ask(page, count) or self._answer.find(0, 0, count) >= 0:
                return False
            page += count
        return True

    def close(self) -> None:
        """Give the mapping back."""
        _libc.munmap(self._address, self._size_bytes)

    def _ask(self, page: int, count: int) -> bool:
        """Have `_answer` say of each page whether it is in memory; False if that does not work."""
        address = self._address + page * mmap.PAGESIZE
        done: int = _libc.mincore(address, count * mmap.PAGESIZE, self._answer_address)
        return done == 0
