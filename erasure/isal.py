"""The ISA-L back end: `ec_encode_data` called through ctypes, on raw addresses.

Speed comes from doing almost nothing in Python: a batch costs one small foreign call a block,
with the GIL released inside it. Which build of ISA-L is loaded, and that only one is, is decided
in `erasure.choice`: tables written by one build may be unreadable to another.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections import deque
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .errors import MultiplierRefusedError, MultiplierUnavailableError
from .multiplier import Multiplier, ShardProduct

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

WHEEL_DISTRIBUTION = "pyeclib"
DEBIAN_LIBRARY = "libisal.so.2"

# ISA-L expands each coefficient to 32 bytes, whatever instructions it then uses.
TABLE_BYTES_PER_COEFFICIENT = 32
# ISA-L takes lengths as C int; longer shards go in pieces. A multiple of 64 keeps pieces aligned.
PIECE_BYTES_MAX = 1 << 30
POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)


def find_wheel_library() -> Path:
    """Path of the ISA-L that the pyeclib wheel carries. Raises MultiplierUnavailableError."""
    try:
        files = importlib.metadata.files(WHEEL_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise MultiplierUnavailableError(
            f"no distribution {WHEEL_DISTRIBUTION}", "nothing installed", "its wheel installed"
        ) from error
    names = [file for file in files if file.name.startswith("libisal") and ".so" in file.name]
    if len(names) != 1:
        raise MultiplierUnavailableError(
            f"ISA-L inside {WHEEL_DISTRIBUTION}",
            f"{[str(name) for name in names]} among {len(files)} files",
            "exactly one libisal*.so*",
        )
    # Absolute, so that the dynamic loader does not search its own directories for it.
    return Path(str(names[0].locate())).resolve()


def load_wheel_multiplier() -> IsalMultiplier:
    """ISA-L out of the pyeclib wheel. Raises MultiplierUnavailableError."""
    return IsalMultiplier(_load_library(str(find_wheel_library())), name="isal")


def load_debian_multiplier() -> IsalMultiplier:
    """ISA-L of Debian's package libisal2. Raises MultiplierUnavailableError."""
    return IsalMultiplier(_load_library(DEBIAN_LIBRARY), name="isal-debian")


def _load_library(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise MultiplierUnavailableError("ISA-L cannot be loaded", error, name) from error


class IsalMultiplier(Multiplier):
    """Products by one loaded ISA-L library, which must stay loaded for good."""

    def __init__(self, library: ctypes.CDLL, *, name: str) -> None:
        """Raises MultiplierRefusedError if the library lacks the two functions needed."""
        pointer, number = ctypes.c_void_p, ctypes.c_int
        try:
            self._init_tables = library.ec_init_tables
            self._encode_data = library.ec_encode_data
        except AttributeError as error:
            raise MultiplierRefusedError(
                f"library for {name}", error, "ec_init_tables and ec_encode_data"
            ) from error
        self._init_tables.argtypes = [number, number, pointer, pointer]
        self._init_tables.restype = None
        self._encode_data.argtypes = [number, number, number, pointer, pointer, pointer]
        self._encode_data.restype = None
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def prepare(self, coefficients: NDArray[np.uint8]) -> ShardProduct:
        rows, columns = coefficients.shape
        matrix = np.ascontiguousarray(coefficients, dtype=np.uint8)
        tables = np.zeros(TABLE_BYTES_PER_COEFFICIENT * rows * columns, np.uint8)
        self._init_tables(columns, rows, matrix.ctypes.data, tables.ctypes.data)
        return _IsalProduct(self._encode_data, tables, rows=rows, columns=columns)


class _IsalProduct(ShardProduct):
    def __init__(
        self,
        encode_data: Callable[..., None],
        tables: NDArray[np.uint8],
        *,
        rows: int,
        columns: int,
    ) -> None:
        self._encode_data = encode_data
        self._tables = tables
        # Ready ctypes objects: converting the same ints again in each call costs 0.2 us a block.
        self._tables_pointer = ctypes.c_void_p(tables.ctypes.data)
        self._rows = ctypes.c_int(rows)
        self._columns = ctypes.c_int(columns)
        self._source_stride = POINTER_BYTES * columns
        self._target_stride = POINTER_BYTES * rows

    def apply_at(
        self,
        source_addresses: NDArray[np.uintp],
        target_addresses: NDArray[np.uintp],
        *,
        shard_bytes: int,
    ) -> None:
        for offset in range(0, shard_bytes, PIECE_BYTES_MAX):
            self._apply_piece(
                source_addresses + offset if offset else source_addresses,
                target_addresses + offset if offset else target_addresses,
                min(PIECE_BYTES_MAX, shard_bytes - offset),
            )

    def _apply_piece(
        self,
        source_addresses: NDArray[np.uintp],
        target_addresses: NDArray[np.uintp],
        piece_bytes: int,
    ) -> None:
        blocks = len(source_addresses)
        # A row of an address table is the pointer array that ISA-L wants for one block.
        sources = source_addresses.ctypes.data
        targets = target_addresses.ctypes.data
        calls = map(
            self._encode_data,
            repeat(ctypes.c_int(piece_bytes), blocks),
            repeat(self._columns),
            repeat(self._rows),
            repeat(self._tables_pointer),
            range(sources, sources + blocks * self._source_stride, self._source_stride),
            range(targets, targets + blocks * self._target_stride, self._target_stride),
        )
        # A deque of length 0 runs the calls without an interpreted loop around them.
        deque(calls, maxlen=0)
