"""Addresses of buffers: the step from Python objects to the address tables of the hot path.

Works on anything with the buffer protocol (bytes, bytearray, memoryview, numpy, mmap, shared
memory) without copying. Not for allocating memory and not for what is in it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from .errors import (
    AddressTableError,
    BufferAccessError,
    BufferLengthError,
    BufferOverlapError,
    ShardLengthError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Self, TypeAlias

    from _typeshed import ReadableBuffer
    from numpy.typing import NDArray

    # An array serves as the list of its rows.
    Buffers: TypeAlias = Sequence[ReadableBuffer] | NDArray[Any]

# CPython's Py_buffer (part of the stable ABI since 3.11), one record a buffer. numpy reads whole
# columns of it, which is twice as fast as asking an ndarray for the address of each buffer.
PY_BUFFER = np.dtype(
    [
        ("buf", np.uintp),
        ("obj", np.uintp),
        ("len", np.intp),
        ("itemsize", np.intp),
        ("readonly", np.intc),
        ("ndim", np.intc),
        ("format", np.uintp),
        ("shape", np.uintp),
        ("strides", np.uintp),
        ("suboffsets", np.uintp),
        ("internal", np.uintp),
    ]
)
# Contiguous bytes; with WRITABLE the exporter itself refuses read-only memory.
_PYBUF_SIMPLE = 0
_PYBUF_WRITABLE = 1
_PYBUF_READ = 0x100
_PYBUF_WRITE = 0x200

# Prototypes of our own: setting argtypes on ctypes.pythonapi would change them for everybody.
_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("PyBuffer_Release", ctypes.pythonapi))
_view_of_memory = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))


class BufferAddresses:
    """Base addresses of buffers, good until `release` (or the end of the `with` block).

    addresses: uintp (n,). lengths_bytes: intp (n,). Until released, exporters refuse to move or
    free their memory: a bytearray cannot be resized, shared memory cannot be closed.
    """

    __slots__ = ("__weakref__", "_finalizer", "addresses", "lengths_bytes")

    def __init__(self, views: NDArray[np.void]) -> None:
        self.addresses: NDArray[np.uintp] = views["buf"].copy()
        self.lengths_bytes: NDArray[np.intp] = views["len"].copy()
        # Releases once at most, also when this object is dropped without a call to `release`.
        self._finalizer = weakref.finalize(self, _release_views, views)

    def release(self) -> None:
        """Let the exporters go; the addresses must not be used afterwards. May be repeated."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def addresses_of(
    buffers: Buffers,
    *,
    writable: bool,
    min_bytes: int = 0,
    name: str | Callable[[int], str] = "buffers",
) -> BufferAddresses:
    """Addresses of C-contiguous buffers of at least min_bytes each, and a hold on them.

    name says in errors what the buffers are: a word for the list, or a function from the position
    in the list to a name. Raises BufferAccessError for an object without the buffer protocol, not
    contiguous, or read-only where `writable`; BufferLengthError for one that is too short. After
    an error nothing is held.
    """
    views = np.zeros(len(buffers), PY_BUFFER)
    try:
        _acquire_views(buffers, views, writable=writable, name=name)
        short = np.flatnonzero(views["len"] < min_bytes)
        if short.size:
            position = int(short[0])
            raise BufferLengthError(
                f"{_label(name, position)} is too short",
                f"{views['len'][position]} bytes",
                f"at least {min_bytes} bytes",
            )
    except BaseException:
        _release_views(views)
        raise
    return BufferAddresses(views)


def _acquire_views(
    buffers: Buffers,
    views: NDArray[np.void],
    *,
    writable: bool,
    name: str | Callable[[int], str],
) -> None:
    flags = _PYBUF_WRITABLE if writable else _PYBUF_SIMPLE
    try:
        deque(map(_get_buffer, buffers, _record_addresses(views), repeat(flags)), maxlen=0)
    except (TypeError, ValueError, BufferError) as error:
        # The first record without an exporter is the one that failed.
        position = int(np.flatnonzero(views["obj"] == 0)[0])
        raise BufferAccessError(
            f"{_label(name, position)} cannot be used",
            f"{type(buffers[position]).__name__} ({error})",
            "a writable C-contiguous buffer" if writable else "a C-contiguous buffer",
        ) from error


def _release_views(views: NDArray[np.void]) -> None:
    # CPython clears a record as it releases it and skips cleared ones.
    deque(map(_release_buffer, _record_addresses(views)), maxlen=0)


def _record_addresses(views: NDArray[np.void]) -> range:
    start = views.ctypes.data
    return range(start, start + views.nbytes, PY_BUFFER.itemsize)


def _label(name: str | Callable[[int], str], position: int) -> str:
    return f"{name}[{position}]" if isinstance(name, str) else name(position)


def shard_addresses(
    base_addresses: NDArray[np.uintp], shard_count: int, *, shard_bytes: int
) -> NDArray[np.uintp]:
    """Addresses of neighbouring shards: uintp (n,) bases give a (n, shard_count) table."""
    offsets = np.arange(shard_count, dtype=np.uintp) * shard_bytes
    return base_addresses[:, None] + offsets


def bytes_at(address: int, length_bytes: int, *, writable: bool = True) -> NDArray[np.uint8]:
    """View of raw memory as uint8 (length_bytes,). The caller keeps the memory alive."""
    flag = _PYBUF_WRITE if writable else _PYBUF_READ
    return np.frombuffer(_view_of_memory(address, length_bytes, flag), np.uint8)


def require_shard_bytes(shard_bytes: int) -> None:
    """Raise ShardLengthError unless shard_bytes is a positive int."""
    if not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise ShardLengthError("shard_bytes", repr(shard_bytes), "a positive int")


def require_table(
    name: str, table: NDArray[np.uintp], *, blocks: int, columns: int
) -> NDArray[np.uintp]:
    """Return the address table C-contiguous; AddressTableError unless it is uintp and in shape."""
    dtype, shape = getattr(table, "dtype", type(table)), getattr(table, "shape", None)
    if dtype != np.uintp or shape != (blocks, columns):
        raise AddressTableError(
            name, f"{dtype} of shape {shape}", f"uintp of shape {(blocks, columns)}"
        )
    if not table.all():
        raise AddressTableError(name, "a null address", "addresses of live memory")
    return np.ascontiguousarray(table)


def require_disjoint(
    targets: NDArray[np.uintp],
    target_bytes: int,
    sources: NDArray[np.uintp],
    source_bytes: int,
) -> None:
    """Raise BufferOverlapError if a target shares bytes with a source or another target.

    targets, sources: uintp (any number,), base addresses; lengths in bytes, one for each kind.
    Sources may overlap each other. Costs a sort, some 20 us for a batch of 64 blocks.
    """
    starts = np.sort(targets)
    if (np.diff(starts) < target_bytes).any():
        raise BufferOverlapError(
            "targets overlap each other", "shared bytes", "a place of its own for each target"
        )
    # Apart, the targets that begin before a source ends are those that end before it begins.
    begun = np.searchsorted(starts, sources + source_bytes)
    ended = np.searchsorted(starts + target_bytes, sources, side="right")
    meets = begun > ended
    if meets.any():
        raise BufferOverlapError(
            f"source {int(np.flatnonzero(meets)[0])} is overlapped by a target",
            "shared bytes",
            "targets apart from all sources",
        )
