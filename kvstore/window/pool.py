"""Window records in the memory of the host that made them: a budget, LRU and a time to live.

A record lives `ttl_s` after it was put, whether it is used or not, and goes earlier when a newer
one needs its room: then the one that was put or fetched longest ago goes. Decision 0026 says why a
use renews no life. Nothing here knows other hosts (`directory`, `service`) or a disk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass

from xxhash import xxh3_64_intdigest

from ..errors import InvalidArgument, shown
from ..key import KEY_BYTES, NAMESPACE_ID_BYTES
from ..layout import BlockLayout
from .record import WindowRecord, layout_prefix_of

EXPIRE_STEP = 1024
"""Records that one call of `expire` lets go at most; the next call goes on."""


@dataclass(slots=True)
class PoolCounters:
    """What happened since the start. `refused`: larger than the pool; `rejected`: bytes that did
    not fit their checksum any more when somebody asked for them."""

    puts: int = 0
    put_bytes: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    expired: int = 0
    removed: int = 0
    refused: int = 0
    rejected: int = 0


class WindowPool:
    """At most `memory_bytes` of records, in buffers that are used again. Belongs to the event loop.

    `ttl_s` is asked whenever it matters, so a change is obeyed at once, also by the records that
    are here.

    Memory that was used once is kept for later records (`held_bytes`), because the kernel clears
    every fresh page, which takes longer than the copy: see benchmarks/window_memory.py.
    """

    def __init__(
        self,
        memory_bytes: int,
        ttl_s: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        if memory_bytes < 0:
            raise InvalidArgument("window memory", given=memory_bytes, expected="0 bytes or more")
        self.memory_bytes = memory_bytes
        self.used_bytes = 0
        self.counters = PoolCounters()
        self._ttl_s = ttl_s
        self._clock = clock
        self._by_use: OrderedDict[bytes, WindowRecord] = OrderedDict()
        # The same records; first the one that was put longest ago, which expires first.
        self._by_put: OrderedDict[bytes, WindowRecord] = OrderedDict()
        self._free: dict[int, list[bytearray]] = {}
        self._free_bytes = 0

    def __len__(self) -> int:
        return len(self._by_put)

    def __contains__(self, key: bytes) -> bool:
        """Whether `get` would find it. No use of the record, and counted nowhere."""
        return self.peek(key) is not None

    @property
    def held_bytes(self) -> int:
        """Memory of the records, and what is kept for later ones; never above `memory_bytes`."""
        return self.used_bytes + self._free_bytes

    def put(
        self,
        key: bytes,
        namespace_id: bytes,
        layout: BlockLayout,
        data: bytes | bytearray | memoryview,
    ) -> list[bytes] | None:
        """Keep a copy of `data` as the record of `key`, in place of an older one.

        Returns the keys of the records that went to make room (those that had expired too), or None
        if the record is larger than the pool: then nothing has changed. InvalidArgument for a key
        or an id of another length, and for bytes that are not as many as the layout says.
        """
        source = _checked_bytes(key, namespace_id, layout, data)
        size_bytes = len(source)
        if size_bytes > self.memory_bytes:
            self.counters.refused += 1
            return None
        self._drop(self._by_put.get(key))
        gone = self._make_room(size_bytes)
        buffer = self._buffer(size_bytes)
        memoryview(buffer)[:] = source
        # Of the copy: nobody else writes there, so the checksum is that of what is kept.
        record = WindowRecord(
            key=key,
            namespace_id=namespace_id,
            layout_prefix=layout_prefix_of(layout),
            xxh3=xxh3_64_intdigest(buffer),
            view=memoryview(buffer).toreadonly(),
            put_at_s=self._clock(),
        )
        self._by_use[key] = self._by_put[key] = record
        self.used_bytes += size_bytes
        self.counters.puts += 1
        self.counters.put_bytes += size_bytes
        return gone

    def get(self, key: bytes) -> WindowRecord | None:
        """The record of `key`, which counts as used now; None if it is not here or has expired.

        Whether it is of the namespace and layout that somebody means is theirs to ask
        (`WindowRecord.is_of`).
        """
        record = self.peek(key)
        if record is None:
            self.counters.misses += 1
            return None
        self.counters.hits += 1
        self._by_use.move_to_end(key)
        return record

    def verify(self, record: WindowRecord) -> bool:
        """Whether the bytes of a record that is here still fit its checksum; if they do not, it is
        let go. Reads all of them."""
        assert record.is_held
        if record.is_intact():
            return True
        self._drop(record)
        self.counters.rejected += 1
        return False

    def peek(self, key: bytes) -> WindowRecord | None:
        """The record, without counting anything as used or asked for."""
        record = self._by_put.get(key)
        return record if record is not None and self.ttl_left_s(record) > 0 else None

    def ttl_left_s(self, record: WindowRecord) -> float:
        """Seconds until the record expires, by the TTL of now; 0 or less if it has."""
        return record.put_at_s + self._ttl_s() - self._clock()

    def remove(self, key: bytes) -> bool:
        """Let the record of `key` go. Returns whether there was one."""
        record = self._by_put.get(key)
        self._drop(record)
        self.counters.removed += record is not None
        return record is not None

    def expire(self, records_max: int = EXPIRE_STEP) -> list[bytes]:
        """Let go what has expired, at most `records_max`; returns the keys. Call it now and then:
        an expired record is never found, but its memory is in use until this, or until a put."""
        gone: list[bytes] = []
        while len(gone) < records_max and (record := self._first_expired()) is not None:
            self._drop(record)
            self.counters.expired += 1
            gone.append(record.key)
        return gone

    def keys(self) -> list[bytes]:
        """Keys of all records, the oldest first; `peek` says whether one is still here."""
        return list(self._by_put)

    def describe(self) -> dict[str, int]:
        """What status and metrics show."""
        return {
            "memory_bytes": self.memory_bytes,
            "used_bytes": self.used_bytes,
            "held_bytes": self.held_bytes,
            "records": len(self._by_put),
            **asdict(self.counters),
        }

    def _make_room(self, size_bytes: int) -> list[bytes]:
        """Let records go until one of `size_bytes` has room; returns their keys."""
        gone: list[bytes] = []
        while self.used_bytes + size_bytes > self.memory_bytes:
            record = self._first_expired()
            if record is None:
                record = next(iter(self._by_use.values()))
                self.counters.evicted += 1
            else:
                self.counters.expired += 1
            self._drop(record)
            gone.append(record.key)
        return gone

    def _first_expired(self) -> WindowRecord | None:
        """Of the records that have expired, the one that was put first."""
        record = next(iter(self._by_put.values()), None)
        return record if record is not None and self.ttl_left_s(record) <= 0 else None

    def _drop(self, record: WindowRecord | None) -> None:
        """Let a record go, if there is one, and keep its memory."""
        if record is None:
            return
        del self._by_put[record.key], self._by_use[record.key]
        record.is_held = False
        buffer = record.view.obj
        assert isinstance(buffer, bytearray)
        self.used_bytes -= len(buffer)
        self._free_bytes += len(buffer)
        self._free.setdefault(len(buffer), []).append(buffer)

    def _buffer(self, size_bytes: int) -> bytearray:
        """Memory for a record for which there is room."""
        kept = self._free.get(size_bytes)
        if not kept:
            self._trim(size_bytes)
            return bytearray(size_bytes)
        self._free_bytes -= size_bytes
        if len(kept) == 1:
            del self._free[size_bytes]
        # The one that was freed last is the one most likely still in the processor's cache.
        return kept.pop()

    def _trim(self, size_bytes: int) -> None:
        """Give memory that is kept for other sizes back, until `size_bytes` more have room."""
        for other_bytes, kept in list(self._free.items()):
            while kept and self.held_bytes + size_bytes > self.memory_bytes:
                kept.pop()
                self._free_bytes -= other_bytes
            if not kept:
                del self._free[other_bytes]
        assert self.held_bytes + size_bytes <= self.memory_bytes


def _checked_bytes(
    key: bytes, namespace_id: bytes, layout: BlockLayout, data: bytes | bytearray | memoryview
) -> memoryview:
    for name, value, length in (
        ("key of a window record", key, KEY_BYTES),
        ("namespace id", namespace_id, NAMESPACE_ID_BYTES),
    ):
        if not isinstance(value, bytes) or len(value) != length:
            raise InvalidArgument(name, given=shown(value), expected=f"{length} bytes")
    source = memoryview(data)
    if not source.c_contiguous or source.nbytes != layout.block_bytes:
        raise InvalidArgument(
            "bytes of a window record",
            given=f"{source.nbytes} bytes{'' if source.c_contiguous else ', not contiguous'}",
            expected=f"{layout.block_bytes}, the sum of the sections of its layout",
        )
    return source.cast("B")
