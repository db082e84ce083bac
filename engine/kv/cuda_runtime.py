"""The calls of CUDA's runtime library that PyTorch has no name for, or wraps in too much work.

Copies take addresses as integers: making tensors of parts of the arena, and asking where they lie,
costs more than the copy's own call. Everything else of CUDA (streams, events, memory) is PyTorch's,
which has the same library loaded: both share one context.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import DeviceLost, MoverUnavailable, TransferFailed
from .device_errors import LOSSES

BATCHES_FROM_VERSION = 13_000
"""cudaMemcpyBatchAsync has another signature before CUDA 13."""

_SUCCESS = 0
_COPY_DEFAULT = 4
"""cudaMemcpyDefault: the direction follows from the addresses."""
_ACCESS_IN_STREAM_ORDER = 1
"""cudaMemcpySrcAccessOrderStream."""
_PREFER_OVERLAP_WITH_COMPUTE = 1
_REGISTER_MAPPED = 2
"""cudaHostRegisterMapped: kernels may read and write it too."""

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class _MemLocation(ctypes.Structure):
    _fields_ = (("type", _INT), ("id", _INT))


class _MemcpyAttributes(ctypes.Structure):
    """cudaMemcpyAttributes. The hints are for managed memory only; zero is none."""

    _fields_ = (
        ("source_access_order", _INT),
        ("source_hint", _MemLocation),
        ("target_hint", _MemLocation),
        ("flags", ctypes.c_uint),
    )


class CudaRuntime:
    """Copies return when they are queued in `stream` (an address, as PyTorch's `cuda_stream`).
    Every call raises TransferFailed with CUDA's own words; DeviceLost if no call will do better."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._memcpy = library.cudaMemcpyAsync
        self._memcpy.argtypes = (_POINTER, _POINTER, _SIZE, _INT, _POINTER)
        self._memcpy_2d = library.cudaMemcpy2DAsync
        self._memcpy_2d.argtypes = (
            *(_POINTER, _SIZE, _POINTER, _SIZE, _SIZE, _SIZE),
            *(_INT, _POINTER),
        )
        self._register = library.cudaHostRegister
        self._register.argtypes = (_POINTER, _SIZE, ctypes.c_uint)
        self._unregister = library.cudaHostUnregister
        self._unregister.argtypes = (_POINTER,)
        library.cudaGetErrorString.restype = ctypes.c_char_p
        self._attributes = _MemcpyAttributes(
            source_access_order=_ACCESS_IN_STREAM_ORDER, flags=_PREFER_OVERLAP_WITH_COMPUTE
        )

    @property
    def version(self) -> int:
        """13010 is CUDA 13.1."""
        found = ctypes.c_int()
        self._check(
            "cudaRuntimeGetVersion", self._library.cudaRuntimeGetVersion(ctypes.byref(found))
        )
        return found.value

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Copy bytes that lie together."""
        self._check(
            "cudaMemcpyAsync", self._memcpy(target, source, size_bytes, _COPY_DEFAULT, stream)
        )

    def copy_rows(
        self,
        target: int,
        target_stride: int,
        source: int,
        source_stride: int,
        width: int,
        rows: int,
        stream: int,
    ) -> None:
        """Copy rows of `width` bytes that begin every so many bytes."""
        status = self._memcpy_2d(
            *(target, target_stride, source, source_stride, width, rows),
            *(_COPY_DEFAULT, stream),
        )
        self._check("cudaMemcpy2DAsync", status)

    def copy_batch(
        self,
        targets: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
        stream: int,
    ) -> None:
        """Copy many pieces with one call, in no particular order. All of them in CUDA's order of
        the stream; needs BATCHES_FROM_VERSION. The arrays are read during the call."""
        first = _SIZE(0)
        status = self._library.cudaMemcpyBatchAsync(
            *(_POINTER(array.ctypes.data) for array in (targets, sources, sizes)),
            _SIZE(len(sizes)),
            *(ctypes.byref(self._attributes), ctypes.byref(first), _SIZE(1)),
            _POINTER(stream),
        )
        self._check("cudaMemcpyBatchAsync", status)

    def register(self, address: int, size_bytes: int, device: torch.device) -> None:
        """Page-lock memory of the host, for kernels too."""
        with torch.cuda.device(device):
            self._check("cudaHostRegister", self._register(address, size_bytes, _REGISTER_MAPPED))

    def unregister(self, address: int) -> None:
        """Let pages go that were locked by a `register` of this address."""
        self._check("cudaHostUnregister", self._unregister(address))

    def synchronize(self, device: torch.device) -> None:
        """Wait for all that is queued on a device."""
        with torch.cuda.device(device):
            self._check("cudaDeviceSynchronize", self._library.cudaDeviceSynchronize())

    def _check(self, call: str, status: int) -> None:
        if status == _SUCCESS:
            return
        # Else the next kernel that PyTorch starts would be taken for the one that has failed.
        self._library.cudaGetLastError()
        said = self._library.cudaGetErrorString(status)
        kind = DeviceLost if status in LOSSES else TransferFailed
        raise kind(f"{call}: CUDA error {status} ({said.decode()})")


@cache
def open_runtime() -> CudaRuntime:
    """The runtime library that PyTorch has loaded. Raises MoverUnavailable."""
    path = find_loaded_runtime(Path("/proc/self/maps").read_text())
    if path is None:
        raise MoverUnavailable(
            "CUDA", ["PyTorch has loaded no libcudart: it is built without CUDA"]
        )
    return CudaRuntime(ctypes.CDLL(path))


def find_loaded_runtime(maps: str) -> str | None:
    """The file of the CUDA runtime among those that are mapped (proc(5), maps)."""
    for line in maps.splitlines():
        _, _, path = line.partition("/")
        if path.rpartition("/")[2].startswith("libcudart") and ".so" in path:
            return f"/{path}"
    return None
