"""Makes all shards of some blocks anew out of k that are left, or refuses.

    ask k holders of the version -> each shard fits its own checksum? -> decode the data that is
    missing -> the block's checksum fits? -> encode all parity from the data

What comes out is known to be right to the bit, so a peer that lies can stop a repair and never
spread its lie. Nothing is written to any node here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from erasure.code import Code
from kvstore import wire
from kvstore.client.channel import NodeChannel
from kvstore.client.inquiry import ask_node
from kvstore.client.shards import ShardAnswers, read_shards
from kvstore.errors import NodeError

REPORT_DEADLINE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildJob:
    """n blocks of one span whose version the same targets hold.

    `channels[j]` reaches the target for shard j; `holders` are the shards of the version, in the
    order in which they are to be asked.
    """

    keys: Sequence[bytes]
    versions: Sequence[int]
    shard_bytes: int
    channels: Sequence[NodeChannel]
    holders: Sequence[int]


class Rebuild:
    """One run of one job; use once.

    `area`: uint8 (n, k + m, shard_bytes), where each shard lies; all shards of block i are right
    after `run` if `is_good[i]`. `payload_xxh3`: uint64 (n, k + m), likewise. `refused` counts
    blocks that could not be made because what came does not fit its checksums.
    """

    def __init__(self, job: RebuildJob, code: Code, loop: asyncio.AbstractEventLoop) -> None:
        n, width = len(job.keys), code.k + code.m
        self._job = job
        self._code = code
        self._loop = loop
        self.area: NDArray[np.uint8] = np.empty((n, width, job.shard_bytes), np.uint8)
        self.payload_xxh3: NDArray[np.uint64] = np.zeros((n, width), np.uint64)
        self.is_good: NDArray[np.bool_] = np.zeros(n, np.bool_)
        self.bytes_read = 0
        self.has_answered: NDArray[np.bool_] = np.zeros((n, width), np.bool_)
        """bool (n, k + m): its holder answered, whatever it sent."""
        self.has_arrived: NDArray[np.bool_] = np.zeros((n, width), np.bool_)
        """bool (n, k + m): a shard of the right version that fits its own checksum."""
        self.is_damaged: NDArray[np.bool_] = np.zeros((n, width), np.bool_)
        """bool (n, k + m): a shard came that does not fit its own checksum."""

    @property
    def refused(self) -> int:
        is_doubtful = self.has_arrived.sum(axis=1) >= self._code.k
        is_doubtful |= self.is_damaged.any(axis=1)
        return int((is_doubtful & ~self.is_good).sum())

    async def run(self, deadline_s: float) -> None:
        """Asks holder after holder until every block is right or nobody is left to be asked."""
        pending = list(self._job.holders)
        while pending and not self.is_good.all():
            rows = np.flatnonzero(~self.is_good)
            lacking = max(int(self._code.k - self.has_arrived[rows].sum(axis=1).min()), 1)
            chosen, pending = pending[:lacking], pending[lacking:]
            await self.read(chosen, deadline_s)
            self.solve()
        self.encode()

    async def read(self, shards: Sequence[int], deadline_s: float) -> None:
        """Asks for these shards of all blocks that are not right yet."""
        rows = np.flatnonzero(~self.is_good)
        await asyncio.gather(*(self._read(shard, rows, deadline_s) for shard in shards))

    def solve(self) -> None:
        """Decodes and checks every block that has enough shards now."""
        for row in np.flatnonzero(~self.is_good).tolist():
            self.is_good[row] = self._solve(row)

    async def _read(self, shard: int, rows: NDArray[np.intp], deadline_s: float) -> None:
        channel, wanted = self._job.channels[shard], rows.tolist()
        keys = [self._job.keys[row] for row in wanted]
        try:
            answers = await read_shards(
                channel,
                keys,
                into=[self.area[row, shard].data for row in wanted],
                deadline_s=deadline_s,
                loop=self._loop,
            )
        except NodeError:
            return  # the next holder is asked instead; the channel has logged it
        self.has_answered[rows, shard] = True
        versions = np.array([self._job.versions[row] for row in wanted], np.uint64)
        is_here = answers.records["status"] == 1
        self.is_damaged[rows, shard] = is_here & ~answers.is_good
        self.has_arrived[rows, shard] = (
            answers.is_good
            & (answers.records["shard"] == shard)
            & (answers.records["block_xxh3"] == versions)
        )
        self.payload_xxh3[rows, shard] = answers.records["payload_xxh3"]
        self.bytes_read += int(is_here.sum()) * self._job.shard_bytes
        await report_bad_shards(channel, keys, answers, self._loop)

    def _solve(self, row: int) -> bool:
        """Whether the data shards of one block are all right in `area` now."""
        present = np.flatnonzero(self.has_arrived[row]).tolist()
        k = self._code.k
        if len(present) < k:
            return False
        if self._try(row, present[:k]):
            return True
        if len(present) == k:
            return False
        # One of more than k may fit its own checksum and be wrong all the same.
        return any(
            self._try(row, [shard for shard in present if shard != suspect][:k])
            for suspect in present[:k]
        )

    def _try(self, row: int, sources: list[int]) -> bool:
        """Decodes from `sources`; keeps the result in `area` only if the block's checksum fits."""
        k, size = self._code.k, self._job.shard_bytes
        wanted = [shard for shard in range(k) if shard not in sources]
        made = np.empty((1, len(wanted), size), np.uint8)
        if wanted:
            given = _addresses(self.area[row : row + 1])[:, sources]
            self._code.reconstruct_at(wanted, sources, given, _addresses(made), shard_bytes=size)
        sums = self.payload_xxh3[row].copy()
        sums[wanted] = [xxh3_64_intdigest(made[0, i]) for i in range(len(wanted))]
        columns = [[int(one)] for one in sums[:k]]
        if wire.combine_checksums([self._job.keys[row]], columns)[0] != self._job.versions[row]:
            return False
        self.area[row, wanted] = made[0]
        self.payload_xxh3[row] = sums
        return True

    def encode(self) -> None:
        """Makes the parity of blocks whose data is right, also where some had arrived."""
        k, rows = self._code.k, np.flatnonzero(self.is_good)
        if not len(rows) or not self._code.m:
            return
        addresses = _addresses(self.area)[rows]
        self._code.encode_at(
            np.ascontiguousarray(addresses[:, :k]),
            np.ascontiguousarray(addresses[:, k:]),
            shard_bytes=self._job.shard_bytes,
        )
        for row in rows.tolist():
            for shard in range(k, k + self._code.m):
                self.payload_xxh3[row, shard] = xxh3_64_intdigest(self.area[row, shard])


async def report_bad_shards(
    channel: NodeChannel,
    keys: Sequence[bytes],
    answers: ShardAnswers,
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Tells a node of the shards that came from it and do not fit their checksum.

    It looks for itself and quarantines what is bad on its disk. Best effort.
    """
    rows = np.flatnonzero((answers.records["status"] == 1) & ~answers.is_good).tolist()
    for at in range(0, len(rows), wire.REPORTS_PER_REQUEST_MAX):
        some = rows[at : at + wire.REPORTS_PER_REQUEST_MAX]
        items = np.zeros(len(some), wire.REPORT_ITEM)
        items["key"] = np.frombuffer(b"".join(keys[row] for row in some), "V32")
        items["generation"] = answers.records["generation"][some]
        try:
            await ask_node(
                channel,
                wire.Op.REPORT,
                body=items.tobytes(),
                count=len(some),
                deadline_s=REPORT_DEADLINE_S,
                loop=loop,
            )
        except NodeError:
            return  # whoever reads the shard next will find the same


def _addresses(area: NDArray[np.uint8]) -> NDArray[np.uintp]:
    """Address of each shard of `area`, C-contiguous uint8 (n, shards, bytes): uintp (n, shards)."""
    n, shards, size = area.shape
    places = np.arange(n * shards, dtype=np.uintp).reshape(n, shards) * np.uintp(size)
    return places + np.uintp(area.ctypes.data)
