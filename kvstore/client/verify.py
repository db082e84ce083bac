"""Turns shards that arrived into blocks that are right, or says that they are not.

A block is verified when the checksums of its k data shards, received or decoded, combine to the
block_xxh3 that came with at least k shards. Only shards of one version are joined. So a block that
mixes writers, or that was decoded from a shard that lies about itself, never passes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from erasure.code import Code

from .. import wire
from .geometry import ShardPlaces, checksum_of

LeaveLost: TypeAlias = Callable[[int, Sequence[int], Sequence[int], int], None]
"""Takes a block: its row, the k shards that it has, in ascending order, payload_xxh3 of its data
shards (of a missing one anything), and the block's own checksum."""


class BlockVerifier:
    """State of the n blocks of a batch by their k + m shards.

    Kept as one list for each shard, since shards arrive that way: a whole answer is taken in by
    assigning slices, and only what is out of the ordinary is looked at block by block.
    """

    def __init__(
        self,
        batch: ShardPlaces,
        keys: Sequence[bytes],
        code: Code,
        leave_lost: LeaveLost | None = None,
    ) -> None:
        """`leave_lost` takes blocks that miss data shards and have parity for them: to rebuild and
        verify them is somebody else's then. None: that is done here."""
        n, width = len(batch), code.k + code.m
        self._batch = batch
        self._keys = keys
        self._code = code
        self._leave_lost = leave_lost
        self._payload_xxh3 = [[0] * n for _ in range(width)]
        self._versions: list[list[int | None]] = [[None] * n for _ in range(width)]
        """block_xxh3 that came with a shard; None: it has not arrived."""
        self._arrived = [0] * width
        self._is_verified = [False] * n
        self._is_decoded = [False] * n
        self._is_left = [False] * n
        """Taken by `leave_lost`: verified as far as that can be done here."""
        self._has_begun = False
        self._liars = 0
        self._stuck_row = len(batch)
        """The first block that was found beyond help. Those behind it are of no use to anybody, and
        each would cost as many attempts."""
        self._told_liars = 0
        self._pins: dict[int, tuple[Sequence[int], int]] = {}
        """The only data shards and version in which a block may still be delivered, because some of
        it was already."""

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
            if not self.has_shard(row, shard) and self._may_take(row, shard, payload, version):
                self._payload_xxh3[shard][row] = payload
                self._versions[shard][row] = version
                self._arrived[shard] += 1

    def arrived(self, shard: int) -> tuple[list[int], list[int | None]]:
        """payload_xxh3 and block_xxh3 of a shard by block; None: it has not arrived."""
        return self._payload_xxh3[shard], self._versions[shard]

    def pin(self, row: int, data_xxh3: Sequence[int], version: int) -> None:
        """Part of block `row` was delivered: whatever comes, its bytes there never change.

        `data_xxh3` are the checksums of its k data shards, which combine to `version`. What is not
        of that is forgotten, and not taken any more.
        """
        self._has_begun = True  # blocks are looked at one by one from now on
        self._pins[row] = (data_xxh3, version)
        for shard in self._shards_of(row):
            found = self._versions[shard][row]
            assert found is not None
            if not self._may_take(row, shard, self._payload_xxh3[shard][row], found):
                self._versions[shard][row] = None
                self._arrived[shard] -= 1

    def _may_take(self, row: int, shard: int, payload: int, version: int) -> bool:
        """May these bytes become a part of the block? Only if it is pinned they may not."""
        pin = self._pins.get(row)
        if pin is None:
            return True
        data_xxh3, wanted = pin
        is_liar = shard < self._code.k and payload != data_xxh3[shard]
        self._liars += is_liar and version == wanted
        return version == wanted and not is_liar

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
        """How many of the first `blocks` blocks were decoded here."""
        return sum(self._is_decoded[:blocks])

    def count_left(self, blocks: int) -> int:
        """How many of the first `blocks` blocks were left to somebody else to decode."""
        return sum(self._is_left[:blocks])

    def assemble(self) -> int:
        """Decodes and verifies every block that can be; call again when more shards have come.

        Returns how many shards were found that match their own checksum and lie all the same.
        """
        self._stuck_row = len(self._batch)
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
        liars = self._liars - self._told_liars
        self._told_liars = self._liars
        return liars

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
        if missing and self._leave_lost is not None:
            for row in rows:
                self._leave(row, sources, self._leave_lost)
            return
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
            elif row < self._stuck_row:
                if self._rescue(row, shards):
                    self._accept(row, is_decoded=True)
                else:
                    self._stuck_row = row

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

    def _leave(self, row: int, shards: Sequence[int], leave_lost: LeaveLost) -> None:
        """The block is as good as its rebuilding will find it: nothing of it may change."""
        version = self._versions[shards[0]][row]
        assert version is not None
        data_xxh3 = [self._payload_xxh3[j][row] for j in range(self._code.k)]
        leave_lost(row, shards, data_xxh3, version)
        self._is_verified[row] = True
        self._is_left[row] = True

    def _decode(self, rows: Sequence[int], missing: Sequence[int], sources: Sequence[int]) -> None:
        for column in self._batch.columns:
            addresses = column.addresses[list(rows)]
            self._code.reconstruct_at(
                missing,
                sources,
                addresses[:, list(sources)],
                addresses[:, list(missing)],
                shard_bytes=column.bytes,
            )
        for j in missing:
            for row in rows:
                self._payload_xxh3[j][row] = checksum_of(self._batch.shard_views(j, row, row + 1))

    def _rescue(self, row: int, shards: Sequence[int]) -> bool:
        """Looks for the one shard that lies: leaves out each in turn, in memory of its own."""
        k, version = self._code.k, self._versions[shards[0]][row]
        if len(shards) <= k:
            return False
        copies = self._copy_shards(row, shards)
        for suspect in shards:
            if row in self._pins and suspect < k:
                continue  # it was checked by itself, and others may be using it
            sources = [j for j in shards if j != suspect][:k]
            wanted = [j for j in range(k) if j not in sources]
            rebuilt = self._rebuild(copies, wanted, sources)
            columns = [[self._payload_xxh3[j][row]] for j in range(k)]
            for j, shard in zip(wanted, rebuilt, strict=True):
                columns[j] = [checksum_of([shard.data])]
            if wire.combine_checksums([self._keys[row]], columns)[0] == version:
                self._liars += 1
                for j, shard in zip(wanted, rebuilt, strict=True):
                    self._batch.write_shard(row, j, shard.data)
                return True
        return False

    def _copy_shards(self, row: int, shards: Sequence[int]) -> NDArray[np.uint8]:
        """The shards of one block in one piece each, uint8 (k + m, shard_bytes): there are many
        ways to leave one out, and however many columns they have where they lie."""
        size = self._batch.shard_bytes
        copies = np.empty((self._code.k + self._code.m, size), np.uint8)
        for shard in shards:
            copies[shard].data[:] = b"".join(self._batch.shard_views(shard, row, row + 1))
        return copies

    def _rebuild(
        self, copies: NDArray[np.uint8], wanted: list[int], sources: list[int]
    ) -> NDArray[np.uint8]:
        """The `wanted` shards of one block out of `sources`, uint8 (wanted, shard_bytes)."""
        size = self._batch.shard_bytes
        rebuilt = np.empty((len(wanted), size), np.uint8)
        given, made = _row_addresses(copies), _row_addresses(rebuilt)
        self._code.reconstruct_at(wanted, sources, given[:, sources], made, shard_bytes=size)
        return rebuilt


def _row_addresses(rows: NDArray[np.uint8]) -> NDArray[np.uintp]:
    """Where each row of a matrix begins, uintp (1, rows): the table of one block."""
    start = np.array([[rows.ctypes.data]], np.uintp)
    return start + np.arange(len(rows), dtype=np.uintp) * np.uintp(rows.shape[1])
