"""Turns shards that arrived into blocks that are right, or says that they are not.

A block is verified when the checksums of its k data shards, received or decoded, combine to the
block_xxh3 that came with at least k shards. Only shards of one version are joined. So a block that
mixes writers, or that was decoded from a shard that lies about itself, never passes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from erasure.code import Code

from .. import wire
from .geometry import Batch


class BlockVerifier:
    """State of n blocks by k + m shards. Rows are blocks, columns are shards."""

    def __init__(self, batch: Batch, code: Code) -> None:
        n, width = len(batch), code.k + code.m
        self._batch = batch
        self._code = code
        self._arrived: NDArray[np.bool_] = np.zeros((n, width), np.bool_)
        self._payload_xxh3: NDArray[np.uint64] = np.zeros((n, width), np.uint64)
        self._version: NDArray[np.uint64] = np.zeros((n, width), np.uint64)
        self._verified: NDArray[np.bool_] = np.zeros(n, np.bool_)
        self._decoded: NDArray[np.bool_] = np.zeros(n, np.bool_)
        self.rejected = 0
        """Shards that match their own checksum and still do not belong to their block."""

    def on_shards(
        self, shard: int, first: int, records: NDArray[Any], is_good: NDArray[np.bool_]
    ) -> None:
        """Shard `shard` of the blocks from `first` on arrived, as PART_RECORDs; those that are
        `is_good` are in place and match their own checksum."""
        rows = slice(first, first + len(records))
        is_new = is_good & ~self.has_shards(shard, first, len(records))
        np.copyto(self._payload_xxh3[rows, shard], records["payload_xxh3"], where=is_new)
        np.copyto(self._version[rows, shard], records["block_xxh3"], where=is_new)
        self._arrived[rows, shard] |= is_new

    def has_shards(self, shard: int, first: int, count: int) -> NDArray[np.bool_]:
        """For each block from `first` on: are the bytes of this shard good already, so that nobody
        may write there again?"""
        rows = slice(first, first + count)
        has_them: NDArray[np.bool_] = self._verified[rows] | self._arrived[rows, shard]
        return has_them

    @property
    def has_enough_shards(self) -> bool:
        """True if every block has k shards, of whatever version."""
        return bool((self._arrived.sum(axis=1) >= self._code.k).all())

    @property
    def has_all_data(self) -> bool:
        """True if no block needs decoding."""
        return bool(self._arrived[:, : self._code.k].all())

    @property
    def leading_blocks(self) -> int:
        """Number of verified blocks before the first that is not."""
        unverified = np.flatnonzero(~self._verified)
        return int(unverified[0]) if len(unverified) else len(self._verified)

    def count_decoded(self, blocks: int) -> int:
        """How many of the first `blocks` blocks needed decoding."""
        return int(self._decoded[:blocks].sum())

    def assemble(self) -> None:
        """Decodes and verifies every block that can be; call again when more shards have come."""
        usable = self._arrived & (self._version == self._chosen_versions()[:, None])
        waiting = ~self._verified & (usable.sum(axis=1) >= self._code.k)
        weights = np.uint64(1) << np.arange(usable.shape[1], dtype=np.uint64)
        patterns = (usable * weights).sum(axis=1, dtype=np.uint64)
        for pattern in np.unique(patterns[waiting]):
            rows = np.flatnonzero(waiting & (patterns == pattern))
            self._assemble_rows(rows, np.flatnonzero(usable[rows[0]]).tolist())

    def _chosen_versions(self) -> NDArray[np.uint64]:
        """For each block the version that most of its shards have."""
        at = self._arrived.argmax(axis=1)
        first: NDArray[np.uint64] = self._version[np.arange(len(at)), at]
        odd = (self._arrived & (self._version != first[:, None])).any(axis=1)
        for row in np.flatnonzero(odd):
            versions, counts = np.unique(self._version[row, self._arrived[row]], return_counts=True)
            first[row] = versions[counts.argmax()]
        return first

    def _assemble_rows(self, rows: NDArray[np.intp], shards: list[int]) -> None:
        k = self._code.k
        sources = shards[:k]
        missing = [j for j in range(k) if j not in shards]
        if missing:
            self._decode(rows, missing, sources)
        combined = wire.combine_checksums(self._payload_xxh3[rows, :k])
        versions = self._version[rows, sources[0]].tolist()
        for row, computed, told in zip(rows.tolist(), combined, versions, strict=True):
            if computed == told:
                self._accept(row, is_decoded=bool(missing))
            elif self._rescue(row, shards, told):
                self._accept(row, is_decoded=True)

    def _accept(self, row: int, *, is_decoded: bool) -> None:
        self._batch.gather_tail(row)
        self._verified[row] = True
        self._decoded[row] = is_decoded

    def _decode(self, rows: NDArray[np.intp], missing: list[int], sources: list[int]) -> None:
        addresses = self._batch.shard_addresses
        self._code.reconstruct_at(
            missing,
            sources,
            addresses[rows][:, sources],
            addresses[rows][:, missing],
            shard_bytes=self._batch.shard_bytes,
        )
        for j in missing:
            self._payload_xxh3[rows, j] = [
                xxh3_64_intdigest(self._batch.shard_view(row, j)) for row in rows.tolist()
            ]

    def _rescue(self, row: int, shards: list[int], version: int) -> bool:
        """Looks for the one shard that lies: leaves out each in turn, in memory of its own."""
        k, size = self._code.k, self._batch.shard_bytes
        for suspect in shards:
            sources = [j for j in shards if j != suspect][:k]
            if len(sources) < k:
                return False
            wanted = [j for j in range(k) if j not in sources]
            rebuilt = np.empty((len(wanted), size), np.uint8)
            targets = rebuilt.ctypes.data + np.arange(len(wanted), dtype=np.uintp) * np.uintp(size)
            self._code.reconstruct_at(
                wanted,
                sources,
                self._batch.shard_addresses[row, sources][None, :],
                targets[None, :].astype(np.uintp),
                shard_bytes=size,
            )
            sums = self._payload_xxh3[row, :k].copy()
            sums[wanted] = [xxh3_64_intdigest(shard.data) for shard in rebuilt]
            if wire.combine_checksums(sums[None, :])[0] == version:
                self.rejected += suspect in shards
                for j, shard in zip(wanted, rebuilt, strict=True):
                    self._batch.shard_view(row, j)[:] = shard.data
                return True
        return False
