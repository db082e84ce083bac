"""The sink of one READ: shards of one node's answer go to their places and are hashed there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .. import wire
from ..errors import NodeError
from .channel import NodeChannel
from .geometry import ShardPlaces
from .inquiry import SingleFrameSink, require_single_frame

REPORT_DEADLINE_S = 1.0


class ShardTaker(Protocol):
    """Who judges the shards that arrived (`BlockVerifier`)."""

    def has_shard(self, row: int, shard: int) -> bool:
        """Are these bytes good already, so that nobody may write there again?"""

    def on_shards(
        self, shard: int, rows: Sequence[int], payload_xxh3: list[int], block_xxh3: list[int]
    ) -> None:
        """The shard of the blocks `rows` is in place and matches its own checksum."""


class ShardFetch(Protocol):
    """What a read needs of the fetch that it belongs to (`BatchFetch`)."""

    @property
    def batch(self) -> ShardPlaces:
        """Where the shards go."""

    @property
    def verifier(self) -> ShardTaker:
        """Who takes those that are good."""

    @property
    def has_assembled(self) -> bool:
        """May some shards be good already, so that each place must be asked for?"""

    def on_shards_missing(self, count: int) -> None:
        """The node does not have the shard of so many blocks."""

    def on_shards_rejected(self, shard: int, generations: dict[int, int]) -> None:
        """Shards of these blocks, with their generations, arrived with a wrong checksum."""

    def on_shard_ended(self, shard: int, *, is_whole: bool) -> None:
        """The answer is complete; `is_whole`: for every block a good shard."""

    def on_shard_failed(self, shard: int, error: NodeError) -> None:
        """There is no (more) answer."""


class ShardRead:
    """The answer of one node to one READ: the sink that puts shards in place and hashes them.

    Nearly always a frame has a good shard of every block it covers. `_rows` are the blocks whose
    shard is in the frame that is being received, and `_is_wanted` says which of them were not good
    already: the others go to waste. Once detached it knows nothing of the fetch any more.
    """

    def __init__(self, fetch: ShardFetch, shard: int) -> None:
        self.is_detached = False
        self._fetch: ShardFetch | None = fetch
        self._shard = shard
        self._block_count = len(fetch.batch)
        self._shard_bytes = fetch.batch.shard_bytes
        self._next_block = 0
        self._is_whole = True
        self._part = wire.PartColumns(0, [], [], [], [])
        self._rows: Sequence[int] = ()
        self._is_wanted: list[bool] | None = None
        self._views: list[memoryview] = []

    def detach(self) -> None:
        self.is_detached = True
        self._fetch = None
        self._views = []

    def on_frame(self, header: wire.Header, body: bytes) -> Sequence[memoryview]:
        self._part = part = wire.parse_part_columns(body, header.count)
        end = part.first + header.count
        if part.first != self._next_block or end > self._block_count or not header.count:
            raise wire.FrameError(f"blocks {part.first} to {end}, expected {self._next_block}")
        if header.is_last != (end == self._block_count):
            raise wire.FrameError(f"last frame ends at block {end} of {self._block_count}")
        self._next_block = end
        expected = wire.part_head(1, self._shard, self._shard_bytes)
        if part.heads.count(expected) == header.count:
            self._rows = range(part.first, end)
        else:
            self._rows = self._look_at_rows(expected)
        if header.payload_bytes != len(self._rows) * self._shard_bytes:
            raise wire.FrameError(
                f"payload of {header.payload_bytes} bytes for {len(self._rows)} shards"
            )
        self._views = [] if self._fetch is None else self._places(self._fetch)
        return self._views

    def _look_at_rows(self, expected: int) -> list[int]:
        """The blocks whose shard is in the frame; the shard may turn out to be another one."""
        rows = []
        for row, head in enumerate(self._part.heads, self._part.first):
            if head & 0xFF == 1:
                if head >> 32 != expected >> 32:
                    raise wire.FrameError(f"a shard of {head >> 32} bytes was not asked for")
                rows.append(row)
        self._is_whole = False
        if self._fetch is not None:
            self._fetch.on_shards_missing(len(self._part.heads) - len(rows))
        return rows

    def _places(self, fetch: ShardFetch) -> list[memoryview]:
        """Where the shards of `_rows` go: each in its place, unless what lies there is good."""
        rows, shard, batch = self._rows, self._shard, fetch.batch
        self._is_wanted = None
        if fetch.has_assembled:
            self._is_wanted = [not fetch.verifier.has_shard(row, shard) for row in rows]
        elif isinstance(rows, range):
            return batch.shard_views(shard, rows.start, rows.stop)
        views: list[memoryview] = []
        waste = memoryview(bytearray(self._shard_bytes))
        for index, row in enumerate(rows):
            places = batch.shard_views(shard, row, row + 1)
            if self._is_wanted is not None and not self._is_wanted[index]:
                places = [waste[: len(place)] for place in places]
            views += places
        return views

    def on_payload(self) -> None:
        fetch, part, rows = self._fetch, self._part, self._rows
        assert fetch is not None, "the payload of a detached sink goes to waste"
        computed = fetch.batch.checksums(self._shard, self._views)
        self._views = []
        if self._is_whole and self._is_wanted is None and computed == part.payload_xxh3:
            fetch.verifier.on_shards(self._shard, rows, computed, part.block_xxh3)
            return
        rejected: dict[int, int] = {}
        for index, (row, checksum) in enumerate(zip(rows, computed, strict=True)):
            if self._is_wanted is None or self._is_wanted[index]:
                self._judge(fetch, row, checksum, rejected)
        if rejected:
            fetch.on_shards_rejected(self._shard, rejected)

    def _judge(self, fetch: ShardFetch, row: int, computed: int, rejected: dict[int, int]) -> None:
        part, at = self._part, row - self._part.first
        if computed != part.payload_xxh3[at]:
            rejected[row] = part.generations[at]
        elif part.heads[at] >> 8 & 0xFF != self._shard:
            fetch.on_shards_missing(1)
        else:
            fetch.verifier.on_shards(self._shard, [row], [computed], [part.block_xxh3[at]])
            return
        self._is_whole = False

    def on_end(self) -> None:
        if self._fetch is not None:
            self._fetch.on_shard_ended(self._shard, is_whole=self._is_whole)

    def on_failure(self, error: NodeError) -> None:
        if self._fetch is not None:
            self._fetch.on_shard_failed(self._shard, error)


def report_shards(channel: NodeChannel, keys: Sequence[bytes], generations: Sequence[int]) -> None:
    """Tells the node behind `channel` to look at these shards again: they came with wrong bytes."""
    items = np.zeros(len(keys), wire.REPORT_ITEM)
    items["key"] = np.frombuffer(b"".join(keys), "V32")
    items["generation"] = np.array(generations, np.uint64)
    channel.submit(
        wire.Op.REPORT,
        IgnoredAnswer(),
        body=items.tobytes(),
        count=len(items),
        deadline_s=REPORT_DEADLINE_S,
    )


class IgnoredAnswer(SingleFrameSink):
    """For requests whose answer changes nothing here."""

    def on_frame(self, header: wire.Header, body: bytes) -> Sequence[memoryview]:
        require_single_frame(header)
        return ()

    def on_end(self) -> None:
        """The node keeps the count; see STAT."""

    def on_failure(self, error: NodeError) -> None:
        """The channel has logged it, and the shard was not used anyway."""
