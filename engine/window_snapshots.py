"""Window state at the ends of blocks, kept in the engine for requests that begin alike.

A record stays on the device that it was made on; all are of one size, so their number bounds the
memory. Only of sequences without a bounded replay of their own; which are known to be of a cold run
is kept beside them. Not the window memory of a host: that is the agent's.
"""

from collections import OrderedDict

from .window_record import WindowRecord


class WindowSnapshots:
    """At most `records_max` records by the key of the block they stand behind; the one used longest
    ago goes first. Belongs to the engine's thread."""

    def __init__(self, records_max: int) -> None:
        self._records_max = records_max
        self._records: OrderedDict[bytes, WindowRecord] = OrderedDict()
        self._cold: set[bytes] = set()
        self.additions = 0
        """How often a key has come that was not there."""

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: bytes) -> bool:
        return key in self._records

    def is_cold(self, key: bytes) -> bool:
        """Whether it has a record for the key that is known to be that of a cold run."""
        return key in self._cold

    def put(self, key: bytes, record: WindowRecord, *, is_cold: bool = False) -> None:
        """Keep a record, which must not change any more. One that `is_cold` stays the one of its
        key before others that are not."""
        self.additions += key not in self._records
        if is_cold or key not in self._cold:
            self._records[key] = record
        if is_cold:
            self._cold.add(key)
        self._records.move_to_end(key)
        if len(self._records) > self._records_max:
            oldest, _ = self._records.popitem(last=False)
            self._cold.discard(oldest)

    def get(self, key: bytes) -> WindowRecord | None:
        record = self._records.get(key)
        if record is not None:
            self._records.move_to_end(key)
        return record
