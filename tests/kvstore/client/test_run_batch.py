"""Shards in the pieces of a run: every byte has one place, and columns compute what buffers do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from erasure.code import Code
from kvstore import wire
from kvstore.arena.run_layout import RunCode
from kvstore.client.geometry import checksum_of
from kvstore.client.run_batch import RunBlocks, RunGeometry, geometry_of, run_geometry
from kvstore.client.verify import BlockVerifier
from kvstore.layout import BlockLayout, padded_bytes
from tests.kvstore.runs import FILL, ODD, SMOLLM2, V41_FLASH, PlainRun, layout_of

GUARD_BLOCKS = 2
"""Blocks of a run before and behind those of the batch, which nobody may touch."""


class Memory:
    """A batch in the middle of a run, and the padded blocks that its shards are made of."""

    def __init__(self, layout: BlockLayout, code: Code, count: int, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        self.code = code
        self.run = PlainRun(layout, count + 2 * GUARD_BLOCKS)
        self.padded: NDArray[np.uint8] = np.zeros(
            (count, padded_bytes(layout.block_bytes, code.k)), np.uint8
        )
        shape = (count, layout.block_bytes)
        self.padded[:, : layout.block_bytes] = rng.integers(0, 256, shape, np.uint8)
        parity = np.zeros((count, code.m * self.padded.shape[1] // code.k), np.uint8)
        size = self.padded.shape[1] // code.k
        code.encode(self.padded, parity, shard_bytes=size)
        whole = np.concatenate([self.padded, parity], axis=1)
        self.shards = whole.reshape(count, code.k + code.m, size)
        memory = RunBlocks(
            self.run.memory, place=GUARD_BLOCKS - 1, count=count + 1, k=code.k, m=code.m
        )
        self.scratch = np.full(max(count * memory.scratch_bytes, 1), 0xEE, np.uint8)
        self.batch = memory.batch(1, count + 1, self.scratch.data, int(self.scratch.ctypes.data))

    def put_blocks(self) -> None:
        blocks = [row[: self.batch.block_bytes].data for row in self.padded]
        self.run.put(GUARD_BLOCKS, blocks)

    def put_shard(self, block: int, shard: int) -> None:
        self.batch.write_shard(block, shard, self.shards[block, shard].data)

    def shard(self, block: int, shard: int) -> bytes:
        return b"".join(self.batch.shard_views(shard, block, block + 1))

    def has_all_blocks(self) -> bool:
        size = self.batch.block_bytes
        return all(
            self.run.block(GUARD_BLOCKS + row) == self.padded[row, :size].tobytes()
            for row in range(len(self.batch))
        )

    def has_touched_nothing_else(self) -> bool:
        return self.run.untouched(GUARD_BLOCKS, GUARD_BLOCKS + len(self.batch))


@st.composite
def memories(draw: st.DrawFn) -> Memory:
    sizes = draw(
        st.lists(st.integers(1, 1500), min_size=1, max_size=30).filter(lambda x: sum(x) >= 1024)
    )
    code = Code(draw(st.integers(1, 12)), draw(st.integers(0, 4)))
    return Memory(layout_of(*sizes), code, draw(st.integers(1, 3)), draw(st.integers(0, 2**32)))


KNOWN: list[tuple[BlockLayout, int, int, list[int], int]] = [
    (V41_FLASH, 10, 2, [1] * 12, 1),
    (SMOLLM2, 10, 2, [3] * 10 + [1] * 2, 3),
    (layout_of(1024), 1, 2, [1, 1, 1], 1),
    # The ninth of ten shards begins at the block's end: it and the tenth are zeros in scratch.
    (layout_of(512, 512), 10, 2, [1] * 12, 1),
    # One byte of the ninth shard is of the block, so there are two columns.
    (layout_of(512, 513), 10, 2, [1] * 8 + [2] + [1] * 3, 2),
]


@pytest.mark.parametrize(("layout", "k", "m", "pieces", "columns"), KNOWN)
def test_known_layouts_are_cut_so(
    layout: BlockLayout, k: int, m: int, pieces: list[int], columns: int
) -> None:
    memory = Memory(layout, Code(k, m), 1)
    assert [memory.batch.pieces_per_shard(shard) for shard in range(k + m)] == pieces
    assert len(memory.batch.columns) == columns
    assert not memory.batch.has_tails


def test_shards_of_v41_flash_lie_in_one_section_each() -> None:
    geometry = RunGeometry(V41_FLASH, 10, 2)
    assert [pieces[0].section for pieces in geometry.pieces] == [
        *(0, 0, 1, 1, 2, 2, 3, 3, 3, 3),
        *(None, None),
    ]
    assert geometry.scratch_bytes == 2 * geometry.shard_bytes


@pytest.mark.parametrize("layout", [V41_FLASH, ODD, layout_of(512, 512)])
def test_parity_lies_in_a_run_with_room_for_it_and_only_zeros_in_scratch(
    layout: BlockLayout,
) -> None:
    geometry = RunGeometry(layout, 10, 2, has_parity_room=True)
    parity = len(layout.sections)
    assert [pieces[0].section for pieces in geometry.pieces[10:]] == [parity, parity]
    without = RunGeometry(layout, 10, 2)
    assert geometry.scratch_bytes == without.scratch_bytes - 2 * without.shard_bytes
    run = PlainRun(layout, 4, RunCode(10, 2))
    scratch = np.zeros(max(1, 2 * geometry.scratch_bytes), np.uint8)
    batch = RunBlocks(run.memory, place=1, count=2, k=10, m=2).batch(
        0, 2, scratch.data, int(scratch.ctypes.data)
    )
    for shard in (10, 11):
        for view in batch.shard_views(shard, 0, 2):
            view[:] = bytes([shard]) * len(view)
    size = geometry.shard_bytes
    assert run.memory.parity(1, 3) == (bytes([10]) * size + bytes([11]) * size) * 2
    for column in batch.columns:
        found = [int(column.addresses[1, shard]) for shard in (10, 11)]
        start = run.memory.address + run.layout.parity_range(2, 3)[0] + column.offset
        assert found == [start, start + size]


def test_room_for_the_parity_of_another_code_is_left_alone() -> None:
    run = PlainRun(V41_FLASH, 2, RunCode(4, 2))
    geometry = geometry_of(run.memory, 10, 2)
    assert [pieces[0].section for pieces in geometry.pieces[10:]] == [None, None]


def test_a_layout_is_cut_once_for_a_code() -> None:
    again = BlockLayout(ODD.sections)
    assert run_geometry(ODD, 4, 2) is run_geometry(again, 4, 2)
    assert run_geometry(ODD, 4, 2) is not run_geometry(ODD, 5, 2)


@settings(max_examples=60)
@given(memories())
def test_shards_written_to_their_places_are_the_blocks_and_touch_nothing_else(
    memory: Memory,
) -> None:
    for block in range(len(memory.batch)):
        for shard in range(memory.code.k):
            memory.put_shard(block, shard)
    assert memory.has_all_blocks()
    assert memory.has_touched_nothing_else()
    for block in range(len(memory.batch)):
        for shard in range(memory.code.k, memory.code.k + memory.code.m):
            memory.put_shard(block, shard)
    assert memory.has_all_blocks(), "parity lies elsewhere"
    for block in range(len(memory.batch)):
        for shard in range(memory.code.k + memory.code.m):
            assert memory.shard(block, shard) == memory.shards[block, shard].tobytes()


@settings(max_examples=60)
@given(memories())
def test_columns_name_the_bytes_that_views_show(memory: Memory) -> None:
    batch = memory.batch
    ends = [column.offset + column.bytes for column in batch.columns]
    assert [column.offset for column in batch.columns] == [0, *ends[:-1]]
    assert ends[-1] == batch.shard_bytes
    for shard in range(memory.code.k + memory.code.m):
        pieces = batch.pieces_per_shard(shard)
        views = batch.shard_views(shard, 0, len(batch))
        assert len(views) == pieces * len(batch)
        for row in range(len(batch)):
            by_views = [
                np.frombuffer(view, np.uint8).ctypes.data + at
                for view in views[row * pieces : (row + 1) * pieces]
                for at in range(len(view))
            ]
            by_columns = [
                int(column.addresses[row, shard]) + at
                for column in batch.columns
                for at in range(column.bytes)
            ]
            assert by_views == by_columns


@settings(max_examples=60)
@given(memories())
def test_parity_made_by_columns_is_that_of_whole_shards(memory: Memory) -> None:
    code, batch = memory.code, memory.batch
    memory.put_blocks()
    batch.spread_tails()
    for column in batch.columns:
        code.encode_at(
            np.ascontiguousarray(column.addresses[:, : code.k]),
            np.ascontiguousarray(column.addresses[:, code.k :]),
            shard_bytes=column.bytes,
        )
    for block in range(len(batch)):
        for shard in range(code.k + code.m):
            assert memory.shard(block, shard) == memory.shards[block, shard].tobytes()
    assert memory.has_all_blocks()
    assert memory.has_touched_nothing_else()


@settings(max_examples=40)
@given(memories(), st.data())
def test_any_k_shards_give_every_block_back_in_its_place(
    memory: Memory, data: st.DataObject
) -> None:
    delivery = Delivery(memory)
    for block in range(len(memory.batch)):
        width = memory.code.k + memory.code.m
        for shard in data.draw(st.permutations(range(width)))[: memory.code.k]:
            delivery.deliver(block, shard)
    delivery.verifier.assemble()
    assert delivery.verifier.leading_blocks == len(memory.batch)
    assert memory.has_all_blocks()
    assert memory.has_touched_nothing_else()


class Delivery:
    """Shards that arrive in a memory's batch."""

    def __init__(self, memory: Memory) -> None:
        count, k = len(memory.batch), memory.code.k
        keys = [bytes([index]) * 32 for index in range(count)]
        sums = [
            [xxh3_64_intdigest(memory.shards[b, j].data) for b in range(count)] for j in range(k)
        ]
        self.memory = memory
        self.versions = wire.combine_checksums(keys, sums)
        self.verifier = BlockVerifier(memory.batch, keys, memory.code)

    def deliver(self, block: int, shard: int, wrong: int = 0) -> None:
        data = self.memory.shards[block, shard] ^ np.uint8(wrong)
        self.memory.batch.write_shard(block, shard, data.data)
        views = self.memory.batch.shard_views(shard, block, block + 1)
        sums = self.memory.batch.checksums(shard, views)
        assert sums == [xxh3_64_intdigest(data.data)]
        self.verifier.on_shards(shard, range(block, block + 1), sums, [self.versions[block]])


@pytest.mark.parametrize("layout", [V41_FLASH, ODD], ids=["v41_flash", "odd"])
@pytest.mark.parametrize("liar", range(6))
def test_a_shard_that_lies_about_itself_is_found_and_replaced_in_its_pieces(
    layout: BlockLayout, liar: int
) -> None:
    memory = Memory(layout, Code(4, 2), 2)
    delivery = Delivery(memory)
    for block in range(2):
        for shard in range(6):
            delivery.deliver(block, shard, wrong=0x5A if (block, shard) == (1, liar) else 0)
    delivery.verifier.assemble()
    assert delivery.verifier.leading_blocks == 2
    assert memory.has_all_blocks()
    assert memory.has_touched_nothing_else()


@settings(max_examples=50)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40), st.integers(0, 2**32))
def test_a_checksum_over_pieces_is_that_of_the_whole(cuts: list[int], seed: int) -> None:
    data = np.random.default_rng(seed).bytes(sum(cuts))
    ends = np.cumsum(cuts).tolist()
    pieces = [memoryview(data)[end - size : end] for end, size in zip(ends, cuts, strict=True)]
    assert checksum_of(pieces) == xxh3_64_intdigest(data)


def test_padding_is_zeroed_and_nothing_else_of_the_scratch_memory() -> None:
    memory = Memory(layout_of(512, 513), Code(10, 2), 3)
    memory.batch.spread_tails()
    geometry = memory.batch.geometry
    scratch = memory.scratch.reshape(3, geometry.scratch_bytes)
    at = geometry.padding_offset
    assert geometry.padding_bytes == 255
    assert not scratch[:, at : at + geometry.padding_bytes].any()
    assert (scratch[:, :at] == 0xEE).all()
    assert (memory.run.area == FILL).all()
