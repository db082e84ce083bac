"""Which back end this process uses: chosen once, checked before use, never two builds of ISA-L.

ISA-L expands coefficients into tables whose form depends on build and processor: 2.32 writes
GFNI tables that 2.30 reads as something else, and decodes wrong bytes without a word. So the
first ISA-L a process loads is the only one it gets. The numpy back end does no harm beside it.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .errors import (
    ErasureError,
    MultiplierConflictError,
    MultiplierRefusedError,
    MultiplierUnavailableError,
    UnknownMultiplierError,
)
from .isal import load_debian_multiplier, load_wheel_multiplier
from .matrix import cauchy_generator, multiply
from .table import TableMultiplier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from .multiplier import Multiplier

LOGGER = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "CACHALOT_ERASURE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A back end that may be chosen, not loaded yet."""

    name: str
    """What the environment variable says to pick it."""
    load: Callable[[], Multiplier]
    """Loads it; raises MultiplierUnavailableError if it is not on this machine."""
    is_isal: bool
    """Whether loading it brings a build of ISA-L into the process."""


# In order of preference.
BACKENDS = (
    Backend(name="isal", load=load_wheel_multiplier, is_isal=True),
    Backend(name="isal-debian", load=load_debian_multiplier, is_isal=True),
    Backend(name="numpy", load=TableMultiplier, is_isal=False),
)


class MultiplierChoice:
    """The choice of one process. Thread-safe; a back end is loaded and checked once."""

    def __init__(self, backends: Sequence[Backend], environment: Mapping[str, str]) -> None:
        """The environment is read at the first choice, and only then."""
        self._backends = {backend.name: backend for backend in backends}
        self._environment = environment
        self._lock = threading.Lock()
        self._loaded: dict[str, Multiplier] = {}
        self._isal_name: str | None = None
        self._default: Multiplier | None = None

    def choose(self, name: str | None = None) -> Multiplier:
        """Return the back end called name, or the process's default; see `choose_multiplier`."""
        with self._lock:
            if name is not None:
                return self._load(self._known(name, "back end"))
            if self._default is None:
                self._default = self._choose_default()
            return self._default

    def _choose_default(self) -> Multiplier:
        wanted = self._environment.get(ENVIRONMENT_VARIABLE)
        if wanted:
            return self._load(self._known(wanted, ENVIRONMENT_VARIABLE))
        reasons: list[ErasureError] = []
        for backend in self._backends.values():
            try:
                multiplier = self._load(backend)
            except MultiplierRefusedError as error:
                LOGGER.error("erasure back end %s refused: %s", backend.name, error)
                reasons.append(error)
            except (MultiplierUnavailableError, MultiplierConflictError) as error:
                LOGGER.warning("erasure back end %s not used: %s", backend.name, error)
                reasons.append(error)
            else:
                if not backend.is_isal:
                    LOGGER.warning("erasure coding without ISA-L, by %s: slow", backend.name)
                return multiplier
        raise MultiplierUnavailableError(
            "erasure back end", [str(reason) for reason in reasons], "one that works"
        )

    def _known(self, name: str, source: str) -> Backend:
        if name not in self._backends:
            raise UnknownMultiplierError(source, repr(name), f"one of {', '.join(self._backends)}")
        return self._backends[name]

    def _load(self, backend: Backend) -> Multiplier:
        if backend.name in self._loaded:
            return self._loaded[backend.name]
        if backend.is_isal:
            if self._isal_name not in (None, backend.name):
                raise MultiplierConflictError(
                    "two builds of ISA-L cannot share a process",
                    backend.name,
                    f"{self._isal_name}, which is loaded",
                )
            # Set before loading: a library that loads and is then refused stays in the process.
            self._isal_name = backend.name
        try:
            multiplier = backend.load()
        except MultiplierUnavailableError:
            if backend.is_isal:
                self._isal_name = None
            raise
        check_multiplier(multiplier)
        self._loaded[backend.name] = multiplier
        return multiplier


# The state is global because what it guards is: libraries are loaded for a whole process.
_PROCESS_CHOICE = MultiplierChoice(BACKENDS, os.environ)


def choose_multiplier(name: str | None = None) -> Multiplier:
    """Return a checked back end, the same one for the same name throughout the process.

    Without a name: the one that the environment variable CACHALOT_ERASURE names when it is first
    needed (isal | isal-debian | numpy), else the first of these three that is installed and
    passes its check. Raises UnknownMultiplierError for any other name, MultiplierUnavailableError
    if the library is not here, MultiplierConflictError for an ISA-L other than the one already
    loaded, MultiplierRefusedError if the self-check fails.
    """
    return _PROCESS_CHOICE.choose(name)


# Shapes and lengths that between them reach each of ISA-L's inner loops: row counts it takes in
# groups of up to six, whole vectors of 16 to 64 bytes, and tails shorter than a vector.
CHECKED_SHAPES = ((1, 1), (4, 2), (10, 2), (10, 12), (20, 12))
CHECKED_LENGTHS_BYTES = (1, 15, 16, 33, 64, 97, 128, 1_000)
# Written around each target, and looked for afterwards.
GUARD_BYTES = 64
GUARD_VALUE = 0xA5


def check_multiplier(multiplier: Multiplier) -> None:
    """Raise MultiplierRefusedError unless products equal those of the field's tables.

    Compares small products with `matrix.multiply`, and looks for bytes written beside the
    targets. Takes a few milliseconds.
    """
    for columns, rows in CHECKED_SHAPES:
        coefficients = cauchy_generator(columns, rows)[columns:]
        product = multiplier.prepare(coefficients)
        for length_bytes in CHECKED_LENGTHS_BYTES:
            sources = _check_bytes((2, columns, length_bytes))
            room = np.full((2, rows, length_bytes + 2 * GUARD_BYTES), GUARD_VALUE, np.uint8)
            wanted = room.copy()
            for block in range(2):
                wanted[block, :, GUARD_BYTES:-GUARD_BYTES] = multiply(coefficients, sources[block])
            product.apply_at(
                _row_addresses(sources, 0),
                _row_addresses(room, GUARD_BYTES),
                shard_bytes=length_bytes,
            )
            if not np.array_equal(room, wanted):
                raise MultiplierRefusedError(
                    f"self-check of erasure back end {multiplier.name}",
                    f"wrong bytes for {rows} x {columns} coefficients, {length_bytes} bytes",
                    "the products of GF(2^8) with polynomial 0x11d",
                )


def _check_bytes(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    # Multiplicative hashing: each byte value occurs, neighbours differ, no random source needed.
    numbers = np.arange(np.prod(shape), dtype=np.uint32) * np.uint32(2_654_435_761)
    return (numbers >> np.uint32(24)).astype(np.uint8).reshape(shape)


def _row_addresses(array: NDArray[np.uint8], offset_bytes: int) -> NDArray[np.uintp]:
    blocks, rows, row_bytes = array.shape
    first = array.ctypes.data + offset_bytes
    end = first + blocks * rows * row_bytes
    return np.arange(first, end, row_bytes, dtype=np.uintp).reshape(blocks, rows)
