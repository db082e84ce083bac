"""The batch of victims in flight, on the disk: so that a worker that was killed finishes it.

Between the eviction here and the withdrawal at the peers a block has shards that nothing will ask
for. The journal is written before the first and removed after the second. It is not synced: after
a power cut it may be gone, and the redundancy check finds what is left of the blocks.

    offset  bytes  field
    0       8      magic `CACHGCJ1`
    8       4      count of victims, at most 1,024
    12      4      zero
    16      8      xxh3-64 of the records
    24      104 x count records (victims.VICTIM)

Written to `gc-journal.tmp` and renamed, so that it is there whole or not at all. One that is
damaged is logged and removed.
"""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from .victims import BATCH_VICTIMS_MAX, VICTIM

log = logging.getLogger(__name__)

JOURNAL_NAME = "gc-journal"
MAGIC = b"CACHGCJ1"
_HEAD = struct.Struct("<8sIIQ")
BYTES_MAX = _HEAD.size + BATCH_VICTIMS_MAX * VICTIM.itemsize


class Journal:
    """The journal of one target; blocks for as long as a small file takes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL_NAME
        self._temporary = folder / f"{JOURNAL_NAME}.tmp"

    def write(self, victims: NDArray[Any]) -> None:
        """Replace the journal by one of `victims` (dtype VICTIM). Raises OSError."""
        assert len(victims) <= BATCH_VICTIMS_MAX
        self._temporary.write_bytes(pack_journal(victims))
        os.replace(self._temporary, self._path)

    def read(self) -> NDArray[Any]:
        """The victims that a worker left in flight (dtype VICTIM); none if there is no journal."""
        try:
            with open(self._path, "rb") as file:
                content = file.read(BYTES_MAX + 1)
        except FileNotFoundError:
            return np.zeros(0, VICTIM)
        try:
            return parse_journal(content)
        except ValueError as error:
            log.error("journal cannot be used, left out path=%s: %s", self._path, error)
            self.clear()
            return np.zeros(0, VICTIM)

    def clear(self) -> None:
        """Remove the journal, if there is one."""
        self._path.unlink(missing_ok=True)


def pack_journal(victims: NDArray[Any]) -> bytes:
    """The content of a journal of `victims` (dtype VICTIM)."""
    records = victims.tobytes()
    return _HEAD.pack(MAGIC, len(victims), 0, xxh3_64_intdigest(records)) + records


def parse_journal(content: bytes) -> NDArray[Any]:
    """The victims in a journal (dtype VICTIM); ValueError says what is wrong with it."""
    if len(content) < _HEAD.size:
        raise ValueError(f"{len(content)} bytes, expected at least {_HEAD.size}")
    magic, count, _, check = _HEAD.unpack_from(content)
    if magic != MAGIC:
        raise ValueError(f"magic {magic!r}, expected {MAGIC!r}")
    if count > BATCH_VICTIMS_MAX or len(content) != _HEAD.size + count * VICTIM.itemsize:
        raise ValueError(f"{len(content)} bytes for {count} victims")
    computed = xxh3_64_intdigest(content[_HEAD.size :])
    if check != computed:
        raise ValueError(f"checksum {check:016x}, computed {computed:016x}")
    return np.frombuffer(content, VICTIM, count, _HEAD.size)
