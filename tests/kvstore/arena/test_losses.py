"""What is noted of blocks that have lost data shards: bytes that the format page shows."""

import struct

import pytest

from kvstore.arena.losses import BlockLoss, clear_losses, loss_of, read_losses, write_loss
from kvstore.arena.progress import begin_table
from kvstore.arena.run_layout import RunCode
from kvstore.errors import StoreError
from tests.kvstore.runs import V41_FLASH, PlainRun

CODE = RunCode(10, 2)
BLOCKS = 5
HASHES = tuple(range(0x100, 0x10A))
LOSS = loss_of(3, (0, 1, 2, 4, 5, 6, 7, 8, 9, 11), HASHES, 0x1122334455667788)


@pytest.fixture
def run() -> PlainRun:
    plain = PlainRun(V41_FLASH, BLOCKS, CODE)
    clear_losses(plain.memory)
    return plain


def record(run: PlainRun, block: int) -> memoryview:
    start = run.layout.losses_offset + block * CODE.loss_bytes
    return run.memory.view[start : start + CODE.loss_bytes]


def test_parity_stands_in_the_places_of_missing_shards_in_order() -> None:
    assert LOSS.shards == (0, 1, 2, 11, 4, 5, 6, 7, 8, 9)
    assert LOSS.missing == [3]
    assert LOSS.data_xxh3 == (*HASHES[:3], 0, *HASHES[4:])
    two = loss_of(0, (1, 2, 3, 4, 5, 6, 7, 8, 10, 11), HASHES, 1)
    assert (two.shards, two.missing) == ((10, 1, 2, 3, 4, 5, 6, 7, 8, 11), [0, 9])


def test_record_has_the_bytes_of_the_format_page(run: PlainRun) -> None:
    write_loss(run.memory, LOSS)
    expected = struct.pack("<IIQ10Q10B6x", 1, 0, LOSS.block_xxh3, *LOSS.data_xxh3, *LOSS.shards)
    assert record(run, 3) == expected


def test_losses_are_read_as_they_were_written(run: PlainRun) -> None:
    other = LOSS._replace(block=1)
    write_loss(run.memory, LOSS)
    write_loss(run.memory, other)
    assert read_losses(run.memory, 0, BLOCKS) == [other, LOSS]
    assert read_losses(run.memory, 2, 4) == [LOSS]
    assert read_losses(run.memory, 4, BLOCKS) == []


def test_a_new_fetch_has_lost_nothing(run: PlainRun) -> None:
    write_loss(run.memory, LOSS)
    begin_table(run.memory, [(0, BLOCKS)])
    assert read_losses(run.memory, 0, BLOCKS) == []


def test_a_run_without_room_for_parity_has_lost_nothing() -> None:
    plain = PlainRun(V41_FLASH, BLOCKS)
    clear_losses(plain.memory)
    assert plain.untouched(0, 0)
    assert read_losses(plain.memory, 0, BLOCKS) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": (0, 1, 2, 12, 4, 5, 6, 7, 8, 9)},
        {"shards": (0, 1, 2, 4, 4, 5, 6, 7, 8, 9)},
        {"shards": (10, 1, 2, 10, 4, 5, 6, 7, 8, 9)},
        {"shards": tuple(range(10))},
    ],
)
def test_a_record_that_makes_no_sense_is_an_error(
    run: PlainRun, changes: dict[str, tuple[int, ...]]
) -> None:
    write_loss(run.memory, BlockLoss(**(LOSS._asdict() | changes)))
    with pytest.raises(StoreError, match=r"no record of lost shards of a code 10\+2: block 3"):
        read_losses(run.memory, 0, BLOCKS)


def test_a_record_of_another_state_is_an_error(run: PlainRun) -> None:
    write_loss(run.memory, LOSS)
    record(run, 3)[:4] = struct.pack("<I", 7)
    with pytest.raises(StoreError, match="block 3"):
        read_losses(run.memory, 0, BLOCKS)
