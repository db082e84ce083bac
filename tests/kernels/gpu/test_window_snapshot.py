"""Windows between state slots and records: the reference does what a sequence's own state does, and
the kernel's source what the reference does; on a CUDA device the kernel itself."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from engine.models.deepseek_v41.layout import state_offsets
from engine.models.deepseek_v41.shipped import shipped_config
from engine.models.deepseek_v41.state import StatePool
from kernels.gpu import block_sections, window_snapshot
from kernels.gpu.compiler import lower_to_cuda
from kernels.reference.window_snapshot import WindowShape, restore_windows, snapshot_windows
from tests.kernels.gpu.cuda_on_cpu import ARCHITECTURES, run_on_cpu

FLASH = WindowShape(rings=20, ring_rows=134, row_bytes=528, ring_stride_bytes=70_752, window=128)
FLASH_STATE_BYTES = 3_128_928
PADDED = WindowShape(rings=3, ring_rows=14, row_bytes=33, ring_stride_bytes=480, window=8)
PADDED_STATE_BYTES = 2_000
POSITIONS = [8, 0, 3, 16, 17, 29, 30, 123_456_789_012]


def random_bytes(rng: random.Random, *shape: int) -> torch.Tensor:
    drawn = np.frombuffer(rng.randbytes(int(np.prod(shape))), np.uint8)
    return torch.from_numpy(drawn.reshape(shape).copy())


def windows(rng: random.Random, state_bytes: int, copies: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of random bytes and the ids of some of them."""
    ids = torch.tensor(rng.sample(range(copies + 2), copies))
    return random_bytes(rng, copies + 2, state_bytes), ids


def expected_records(
    slots: torch.Tensor, ids: torch.Tensor, positions: list[int], shape: WindowShape
) -> torch.Tensor:
    """Row by row, from where the format says that the row of a position stands."""
    records = torch.zeros(len(ids), shape.stored_bytes, dtype=torch.uint8)
    for record, slot, end in zip(records, slots[ids], positions, strict=True):
        for ring in range(shape.rings):
            for position in range(max(end - shape.window, 0), end):
                row = position % shape.ring_rows
                at = ring * shape.ring_stride_bytes + row * shape.row_bytes
                record[at : at + shape.row_bytes] = slot[at : at + shape.row_bytes]
    return records


def test_reference_keeps_the_rows_of_the_window_and_zeros_the_rest(rng: random.Random) -> None:
    slots, ids = windows(rng, PADDED_STATE_BYTES, len(POSITIONS))
    records = torch.ones(len(ids), PADDED.stored_bytes, dtype=torch.uint8)
    snapshot_windows(slots, ids, torch.tensor(POSITIONS), records, PADDED)
    assert torch.equal(records, expected_records(slots, ids, POSITIONS, PADDED))


@pytest.mark.parametrize("drafted", [0, 1, 5])
def test_reference_takes_what_a_sequence_stores(drafted: int, rng: random.Random) -> None:
    config = shipped_config("v41-nano")
    offsets = state_offsets(config)
    pool = StatePool(config, slots=2)
    pool.memory[:] = random_bytes(rng, *pool.memory.shape)
    pool.allocate()
    state = pool.allocate()
    anchor = 384
    length = anchor + min(drafted, config.draft.block_tokens + 1)
    row_bytes = offsets.rings[0].row_bytes
    for layer in range(config.layers):
        state.write_window_rows(layer, 0, random_bytes(rng, length, row_bytes))
    state.advance(length, [0] * length)
    stored = state.copy_stored_window(anchor)

    shape = WindowShape(
        rings=config.decoder_start,
        ring_rows=config.ring_rows,
        row_bytes=row_bytes,
        ring_stride_bytes=offsets.stored_bytes // config.decoder_start,
        window=config.window,
    )
    records = torch.ones(1, offsets.stored_bytes, dtype=torch.uint8)
    slot_ids = torch.tensor([state.slot])
    snapshot_windows(pool.memory, slot_ids, torch.tensor([anchor]), records, shape)
    assert torch.equal(records[0], stored)


def test_reference_restores_records_and_leaves_the_rest_of_a_slot(rng: random.Random) -> None:
    slots, ids = windows(rng, PADDED_STATE_BYTES, 3)
    records = random_bytes(rng, 3, PADDED.stored_bytes)
    expected = slots.clone()
    for record, slot in zip(records, ids.tolist(), strict=True):
        expected[slot, : PADDED.stored_bytes] = record
    restore_windows(records, slots, ids, PADDED)
    assert torch.equal(slots, expected)


@pytest.mark.parametrize("thread_blocks", [None, 3])
@pytest.mark.parametrize(
    ("shape", "state_bytes", "width", "positions"),
    [
        (FLASH, FLASH_STATE_BYTES, 16, [128, 4096]),
        (PADDED, PADDED_STATE_BYTES, 1, POSITIONS),
    ],
)
def test_generated_source_takes_what_the_reference_takes(
    shape: WindowShape,
    state_bytes: int,
    width: int,
    positions: list[int],
    thread_blocks: int | None,
    rng: random.Random,
) -> None:
    slots, ids = windows(rng, state_bytes, len(positions))
    expected = torch.empty(len(ids), shape.stored_bytes, dtype=torch.uint8)
    snapshot_windows(slots, ids, torch.tensor(positions), expected, shape)
    tiles = len(ids) * window_snapshot.record_tiles(shape, width)
    grid, rounds = block_sections.plan_grid(tiles, thread_blocks)
    records = torch.ones_like(expected)
    run_on_cpu(
        window_snapshot.make_program(width, shape, state_bytes),
        (grid,),
        slots=slots,
        slot_ids=ids,
        positions=torch.tensor(positions),
        records=records,
        grid=grid,
        rounds=rounds,
        copies=len(ids),
        capacity=len(slots),
    )
    assert torch.equal(records, expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernel_moves_16_bytes_at_a_time(architecture: str) -> None:
    source = lower_to_cuda(window_snapshot.make_program(16, FLASH, FLASH_STATE_BYTES), architecture)
    body = source[source.index("__global__") :]
    assert body.count("*(uint4*)(slots") == 1
    assert body.count("*(uint4*)(records") == 1
    assert "slots[" not in body
    assert "records[" not in body


@pytest.mark.gpu
@pytest.mark.parametrize("thread_blocks", [None, 3])
@pytest.mark.parametrize(
    ("shape", "state_bytes", "positions"),
    [
        (FLASH, FLASH_STATE_BYTES, [128, 4096, 128 * 7_777_777]),
        (PADDED, PADDED_STATE_BYTES, POSITIONS),
    ],
)
def test_kernel_takes_and_restores_as_the_reference(
    shape: WindowShape,
    state_bytes: int,
    positions: list[int],
    thread_blocks: int | None,
    rng: random.Random,
) -> None:
    slots, ids = windows(rng, state_bytes, len(positions))
    expected = torch.empty(len(ids), shape.stored_bytes, dtype=torch.uint8)
    snapshot_windows(slots, ids, torch.tensor(positions), expected, shape)
    slots_there, ids_there = slots.cuda(), ids.cuda()
    records = torch.ones_like(expected, device="cuda")
    window_snapshot.snapshot_windows(
        slots_there,
        ids_there,
        torch.tensor(positions).cuda(),
        records,
        shape,
        thread_blocks=thread_blocks,
    )
    assert torch.equal(records.cpu(), expected)
    window_snapshot.restore_windows(
        records, slots_there, ids_there, shape, thread_blocks=thread_blocks
    )
    restore_windows(expected, slots, ids, shape)
    assert torch.equal(slots_there.cpu(), slots)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"slots": torch.zeros(2, 2_000)}, TypeError, "slots: given torch.float32"),
        (
            {"records": torch.zeros(2, 1_439, dtype=torch.uint8)},
            ValueError,
            "given 1439 of a record and 2000 of a slot, expected 1440",
        ),
        ({"slot_ids": torch.zeros(2)}, TypeError, "slot ids: given torch.float32"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, ValueError, "positions: given shape"),
        (
            {"positions": torch.zeros(2, dtype=torch.int64, device="meta")},
            ValueError,
            "positions: given on meta",
        ),
    ],
)
def test_snapshot_refuses_what_does_not_fit(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {
        "slots": torch.zeros(2, 2_000, dtype=torch.uint8),
        "slot_ids": torch.zeros(2, dtype=torch.int64),
        "positions": torch.zeros(2, dtype=torch.int64),
        "records": torch.zeros(2, 1_440, dtype=torch.uint8),
        "shape": PADDED,
        **change,
    }
    for snapshot in (snapshot_windows, window_snapshot.snapshot_windows):
        with pytest.raises(error, match=message):
            snapshot(**given)


def test_window_shape_refuses_rows_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="a window of at most the rows of a ring"):
        WindowShape(rings=1, ring_rows=7, row_bytes=32, ring_stride_bytes=224, window=8)
