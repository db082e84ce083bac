"""What is known of one unit of a fetch in layer order: consecutive blocks of one span.

Before the heads of all k data shards are known and combine to the blocks' own checksums, nothing of
a block is ready. From then on each shard can be checked by itself, and a section is ready when all
shards that have bytes of it are there. Nothing here asks or decides whom to ask; `LayeredFetch`
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Protocol

from erasure.code import Code

from .. import wire
from ..errors import NodeError
from .channel import NodeChannel
from .layered_plan import SectionShards, count_leading
from .run_batch import RunBatch
from .scratch import ScratchPool
from .shard_read import ShardRead
from .verify import BlockVerifier, LeaveLost


class UnitOwner(Protocol):
    """Who is told what became of a unit's reads (`LayeredFetch`)."""

    def on_read_ended(self, unit: LayeredUnit, shard: int) -> None:
        """One of the unit's reads has its answer, or will have none."""

    def on_shards_missing(self, count: int) -> None:
        """So many shards were not where they belong."""

    def on_shards_rejected(
        self, unit: LayeredUnit, shard: int, generations: dict[int, int]
    ) -> None:
        """Shards of these blocks, with their generations, arrived with a wrong checksum."""

    def on_shard_failed(self) -> None:
        """A node did not answer for a shard."""


class LayeredUnit:
    """The blocks of one unit. It is the fetch of its `ShardRead`s."""

    has_assembled = False
    """A shard is asked for once, so what arrives never lands on what is good."""

    def __init__(
        self,
        owner: UnitOwner,
        number: int,
        keys: Sequence[bytes],
        batch: RunBatch,
        channels: Sequence[NodeChannel],
        code: Code,
        sections: SectionShards,
        leave_lost: LeaveLost | None = None,
    ) -> None:
        """`leave_lost`: see BlockVerifier."""
        self.number = number
        self.keys = keys
        self.blocks = len(keys)
        self.batch = batch
        self.channels = channels
        self.verifier = BlockVerifier(batch, keys, code, leave_lost)
        self.pending: dict[int, ShardRead] = {}
        """Reads under way, by shard."""
        self.answered: set[int] = set()
        """Shards whose node said all it will say."""
        self.fallback_section: int | None = None
        """The first section that is missed as long as the unit is not decoded; None: none is."""
        self.planned_section: int | None = None
        """The section in whose turn the unit is to be decoded."""
        self.is_decoding = False
        self.is_over = False
        self.ready_blocks = [0] * len(sections.shards_by_section)
        """Leading blocks of which a section is there and verified. Only grows."""
        self.decoded_blocks = 0
        self.left_blocks = 0
        self._owner = owner
        self._sections = sections
        self._k = code.k
        self._heads: list[tuple[Sequence[int], Sequence[int | None]] | None] = [None] * code.k
        """payload_xxh3 and block_xxh3 of each data shard, of as many leading blocks as known."""
        self._headed_blocks: int | None = None
        self._good_blocks: list[int] = [0] * code.k
        """Leading blocks whose data shard is there and fits its head."""
        self._memory = ExitStack()
        self._has_scratch = False

    @property
    def shards_bytes(self) -> int:
        """Bytes of one shard of all blocks."""
        return self.blocks * self.batch.shard_bytes

    @cached_property
    def read_body(self) -> bytes:
        """Body of the READ of any shard."""
        return wire.pack_read(self.keys, self.batch.shard_bytes)

    @property
    def whole_blocks(self) -> int:
        """Leading blocks that are there in every section."""
        return min(self.ready_blocks)

    # Memory -------------------------------------------------------------------------------------

    def lies_in_scratch(self, shard: int) -> bool:
        """Does a part of the shard lie outside the run?"""
        return any(piece.section is None for piece in self.batch.geometry.pieces[shard])

    def take_scratch(self, pool: ScratchPool) -> None:
        """Scratch memory for all blocks, until `end`."""
        if not self._has_scratch and not self.is_over:
            size_bytes = self.blocks * self.batch.geometry.scratch_bytes
            self.batch.use_scratch(*self._memory.enter_context(pool.lend(size_bytes)))
            self._has_scratch = True

    def end(self) -> None:
        """Nothing more is written here, and nothing is under way."""
        assert not self.pending, "a read could still write into the memory that is given back"
        self.is_over = True
        self._memory.close()

    # Heads --------------------------------------------------------------------------------------

    @property
    def has_heads(self) -> bool:
        """Are the checksums of all data shards of all blocks known, and right?"""
        return self._headed_blocks == self.blocks

    @property
    def knows_more(self) -> bool:
        """Has an answer for heads changed what is ready, or what is to be done?"""
        return self._headed_blocks is not None or self.fallback_section is not None

    def on_heads_ended(self, shard: int) -> None:
        """If `on_heads` was not called for this shard by now, it will not be."""
        if self._heads[shard] is None:
            self.miss_section(0)

    def on_heads(
        self, shard: int, payload_xxh3: Sequence[int], block_xxh3: Sequence[int | None]
    ) -> None:
        """Checksums of a data shard of as many leading blocks as there are, as its node tells
        them."""
        if self._heads[shard] is None and not self.is_decoding:
            self._heads[shard] = (payload_xxh3, block_xxh3)
            if None not in self._heads:
                self._headed_blocks = self._combine_heads()
                if not self.has_heads:
                    self.miss_section(0)
                for answered in sorted(self.answered):
                    if answered < self._k:
                        self._check_shard(answered)

    def _combine_heads(self) -> int:
        """How many leading blocks have heads of one version that combine to it."""
        heads = [one for one in self._heads if one is not None]
        versions = heads[0][1]
        blocks = min(len(payload) for payload, _ in heads)
        for _, others in heads:
            blocks = min(blocks, count_leading(others, versions))
        columns = [payload[:blocks] for payload, _ in heads]
        combined = wire.combine_checksums(self.keys[:blocks], columns)
        return count_leading(combined, versions[:blocks])

    # Shards -------------------------------------------------------------------------------------

    def on_shard_ended(self, shard: int, *, is_whole: bool) -> None:
        """See `ShardFetch`."""
        if self.pending.pop(shard, None) is None:
            return
        self.answered.add(shard)
        if shard in self._sections.first_shards:
            payload, versions = self.verifier.arrived(shard)
            blocks = self.blocks if is_whole else (*versions, None).index(None)
            self.on_heads(shard, payload[:blocks], versions[:blocks])
        if self._headed_blocks is not None:
            self._check_shard(shard)
        if not is_whole:
            self.miss(shard)
        self._owner.on_read_ended(self, shard)

    def on_shard_failed(self, shard: int, error: NodeError) -> None:
        """See `ShardFetch`. The channel has logged the error."""
        if self.pending.pop(shard, None) is None:
            return
        self.answered.add(shard)
        self._owner.on_shard_failed()
        self.miss(shard)
        self._owner.on_read_ended(self, shard)

    def on_shards_missing(self, count: int) -> None:
        """See `ShardFetch`."""
        self._owner.on_shards_missing(count)

    def on_shards_rejected(self, shard: int, generations: dict[int, int]) -> None:
        """See `ShardFetch`."""
        self._owner.on_shards_rejected(self, shard, generations)

    def _check_shard(self, shard: int) -> None:
        """A shard has arrived and the heads are known: which of its blocks are right?"""
        assert self._headed_blocks is not None
        heads = self._heads[shard]
        assert heads is not None
        payload, versions = self.verifier.arrived(shard)
        good = min(count_leading(payload, heads[0]), count_leading(versions, heads[1]))
        self._good_blocks[shard] = min(good, self._headed_blocks)
        if self._good_blocks[shard] < self.blocks:
            self.miss(shard)
        for section in self._sections.sections_of_shard[shard]:
            needed = self._sections.shards_by_section[section]
            blocks = min(self._good_blocks[j] for j in needed)
            self.ready_blocks[section] = max(self.ready_blocks[section], blocks)

    def miss(self, shard: int) -> None:
        """A data shard of some block will not come by itself."""
        first = self._sections.first_section_of_shard[shard] if self.has_heads else 0
        self.miss_section(first)

    def miss_section(self, section: int) -> None:
        """Sections from this one on need the unit to be decoded."""
        if self.fallback_section is None or section < self.fallback_section:
            self.fallback_section = section

    # Decoding -----------------------------------------------------------------------------------

    def begin_decoding(self) -> None:
        """From now on somebody else completes the blocks out of what is there, and nothing that is
        ready may change."""
        assert not self.pending, "decoding writes where a read under way would"
        self.is_decoding = True
        for row in range(max(self.ready_blocks)):
            heads = [one for one in self._heads if one is not None]
            version = heads[0][1][row]
            assert version is not None
            self.verifier.pin(row, [payload[row] for payload, _ in heads], version)

    @property
    def has_parts(self) -> bool:
        """Is there something of a shard whose answer is not complete?"""
        return any(
            shard not in self.answered
            and any(version is not None for version in self.verifier.arrived(shard)[1])
            for shard in range(len(self.channels))
        )

    def end_decoding(self, whole_blocks: int, *, decoded_blocks: int, left_blocks: int) -> None:
        """So many leading blocks are whole and verified; some of them were decoded, and some are
        left to the run's reader."""
        self.ready_blocks = [max(blocks, whole_blocks) for blocks in self.ready_blocks]
        self.decoded_blocks = decoded_blocks
        self.left_blocks = left_blocks
