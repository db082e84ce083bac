"""Turns shards that arrived into blocks that are right, or says that they are not.

A block is verified when the checksums of its k data shards, received or decoded, combine to the
block_xxh3 that came with at least k shards. Only shards of one version are joined. So a block that
mixes writers, or that was decoded from a shard that lies about itself, never passes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from erasure.code import Code

from .. import wire
from .geometry import Batch


class BlockVerifier:
    """State of the n blocks of a batch by their k + m shards.

    Kept as one list for each shard, since shards arrive that way: a whole answer is taken in by
    assigning slices, and only what is out of the ordinary is looked at block by block.
    """

    def __init__(self, batch: Batch, keys: Sequence[bytes], code: Code) -> None:
        n, width = len(batch), code.k + code.m
        self._batch = batch
        self._keys = keys
        self._code = code
        self._payload_xxh3 = [[0] * n for _ in range(width)]
        self._versions: list[list[int | None]] = [[None] * n for _ in range(width)]
        """block_xxh3 that came with a shard; None: it has not arrived."""
        self._arrived = [0] * width
        self._is_verified = [False] * n
        self._is_decoded = [False] * n
        self._has_begun = False
        self._liars = 0

    def on_shards(
        self, shard: int, rows: Sequence[int], payload_xxh3: list[int], block_xxh3: list[int]
    ) -> None:
        """Shard `shard` of the blocks `rows` is in place and matches its own checksum. What a block
        has already is not taken a second time."""
        if isinstance(rows, range) and not self._has_begun:
            self._payload_xxh3[shard][rows.start : rows.stop] = payload_xxh3
            self._versions[shard][rows.start : rows.stop] = block_xxh3
            self._arrived[shard] += len(rows)
            return
        for row, payload, version in zip(rows, payload_xxh3, block_xxh3, strict=True):
            if not self.has_shard(row, shard):
                self._payload_xxh3[shard][row] = payload
                self._versions[shard][row] = version
                self._arrived[shard] += 1

    def has_shard(self, row: int, shard: int) -> bool:
        """Are these bytes good already, so that nobody may write there again?"""
        return self._is_verified[row] or self._versions[shard][row] is not None

    def is_run_decided(self, coming: int) -> bool:
        """True if waiting for `coming` more shards cannot make the leading run longer: every block
        has k shards, or all those before the first that can never have them do."""
        n, k = len(self._batch), self._code.k
        if self._arrived.count(n) >= k:
            return True
        for row in range(n):
            count = len(self._shards_of(row))
            if count < k and not self._is_verified[row]:
                return count + coming < k
        return True

    def can_run_grow(self, coming: int) -> bool:
        """True if `coming` more shards may complete the first block that is not verified. One that
        has k shards already may hold a lie or two versions, which further ones can outweigh."""
        row = self.leading_blocks
        return row < len(self._batch) and len(self._shards_of(row)) + coming >= self._code.k

    @property
    def has_all_data(self) -> bool:
        """True if no block needs decoding."""
        return self._arrived[: self._code.k].count(len(self._batch)) == self._code.k

    @property
    def leading_blocks(self) -> int:
        """Number of verified blocks before the first that is not."""
        return (*self._is_verified, False).index(False)

    def count_decoded(self, blocks: int) -> int:
        """How many of the first `blocks` blocks needed decoding."""
        return sum(self._is_decoded[:blocks])

    def assemble(self) -> int:
        """Decodes and verifies every block that can be; call again when more shards have come.

        Returns how many shards were found that match their own checksum and lie all the same.
        """
        liars_before = self._liars
        if not self._has_begun and (alike := self._whole_alike()):
            self._assemble_rows(range(len(self._batch)), alike)
        self._has_begun = True
        rows_by_shards: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for row, is_verified in enumerate(self._is_verified):
            if not is_verified:
                usable = self._usable_shards(row)
                if len(usable) >= self._code.k:
                    rows_by_shards[tuple(usable)].append(row)
        for shards, rows in rows_by_shards.items():
            self._assemble_rows(rows, shards)
        return self._liars - liars_before

    def _whole_alike(self) -> list[int]:
        """k or more shards that arrived for every block, all of one version; or none."""
        n = len(self._batch)
        whole = [shard for shard, count in enumerate(self._arrived) if count == n]
        is_enough = len(whole) >= self._code.k
        versions = [self._versions[shard] for shard in whole]
        return whole if is_enough and versions.count(versions[0]) == len(versions) else []

    def _shards_of(self, row: int) -> list[int]:
        return [j for j, versions in enumerate(self._versions) if versions[row] is not None]

    def _usable_shards(self, row: int) -> list[int]:
        """The shards of a block that have the version which most of them have."""
        shards = self._shards_of(row)
        counts = Counter(self._versions[shard][row] for shard in shards)
        if len(counts) <= 1:
            return shards
        version = counts.most_common(1)[0][0]
        return [shard for shard in shards if self._versions[shard][row] == version]

    def _assemble_rows(self, rows: Sequence[int], shards: Sequence[int]) -> None:
        """Decodes and verifies blocks that all have the same `shards`, k or more."""
        k = self._code.k
        sources = shards[:k]
        missing = [j for j in range(k) if j not in shards]
        if missing:
            self._decode(rows, missing, sources)
        if len(rows) == len(self._keys):
            combined = wire.combine_checksums(self._keys, self._payload_xxh3[:k])
            if combined == self._versions[sources[0]]:
                self._accept_all(is_decoded=bool(missing))
                return
        else:
            keys = [self._keys[row] for row in rows]
            columns = [[self._payload_xxh3[j][row] for row in rows] for j in range(k)]
            combined = wire.combine_checksums(keys, columns)
        for row, computed in zip(rows, combined, strict=True):
            version = self._versions[sources[0]][row]
            if computed == version:
                self._accept(row, is_decoded=bool(missing))
            elif self._rescue(row, shards):
                self._accept(row, is_decoded=True)

    def _accept_all(self, *, is_decoded: bool) -> None:
        n = len(self._keys)
        if self._batch.has_tails:
            for row in range(n):
                self._batch.gather_tail(row)
        self._is_verified = [True] * n
        self._is_decoded = [is_decoded] * n

    def _accept(self, row: int, *, is_decoded: bool) -> None:
        self._batch.gather_tail(row)
        self._is_verified[row] = True
        self._is_decoded[row] = is_decoded

    def _decode(self, rows: Sequence[int], missing: Sequence[int], sources: Sequence[int]) -> None:
        addresses = self._batch.shard_addresses[list(rows)]
        self._code.reconstruct_at(
            missing,
            sources,
            addresses[:, list(sources)],
            addresses[:, list(missing)],
            shard_bytes=self._batch.shard_bytes,
        )
        for j in missing:
            for row in rows:
                self._payload_xxh3[j][row] = xxh3_64_intdigest(self._batch.shard_view(row, j))

    def _rescue(self, row: int, shards: Sequence[int]) -> bool:
        """Looks for the one shard that lies: leaves out each in turn, in memory of its own."""
        k, version = self._code.k, self._versions[shards[0]][row]
        if len(shards) <= k:
            return False
        for suspect in shards:
            sources = [j for j in shards if j != suspect][:k]
            wanted = [j for j in range(k) if j not in sources]
            rebuilt = self._rebuild(row, wanted, sources)
            columns = [[self._payload_xxh3[j][row]] for j in range(k)]
            for j, shard in zip(wanted, rebuilt, strict=True):
                columns[j] = [xxh3_64_intdigest(shard.data)]
            if wire.combine_checksums([self._keys[row]], columns)[0] == version:
                self._liars += 1
                for j, shard in zip(wanted, rebuilt, strict=True):
                    self._batch.shard_view(row, j)[:] = shard.data
                return True
        return False

    def _rebuild(self, row: int, wanted: list[int], sources: list[int]) -> NDArray[np.uint8]:
        """The `wanted` shards of one block from `sources`, uint8 (wanted, shard_bytes)."""
        size = self._batch.shard_bytes
        rebuilt = np.empty((len(wanted), size), np.uint8)
        places = rebuilt.ctypes.data + np.arange(len(wanted), dtype=np.uintp) * np.uintp(size)
        self._code.reconstruct_at(
            wanted,
            sources,
            self._batch.shard_addresses[[row]][:, sources],
            places[None, :].astype(np.uintp),
            shard_bytes=size,
        )
        return rebuilt
