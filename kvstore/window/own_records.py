"""The records of this host as its announcer sees them: which there are, not their bytes.

No use of a record: what is told to the directory must not keep anything alive in the pool.
"""

from __future__ import annotations

from typing import Protocol

from .pool import WindowPool


class OwnRecords(Protocol):
    """The records of this host."""

    def __len__(self) -> int:
        """How many there are."""

    def keys(self) -> list[bytes]:
        """Their keys."""

    def find(self, key: bytes) -> tuple[int, float] | None:
        """Bytes of a record and seconds it has left, or None. It is no use of the record."""


class PoolRecords:
    """The pool, as the announcer sees it."""

    def __init__(self, pool: WindowPool) -> None:
        self._pool = pool

    def __len__(self) -> int:
        return len(self._pool)

    def keys(self) -> list[bytes]:
        return self._pool.keys()

    def find(self, key: bytes) -> tuple[int, float] | None:
        record = self._pool.peek(key)
        return None if record is None else (record.size_bytes, self._pool.ttl_left_s(record))
