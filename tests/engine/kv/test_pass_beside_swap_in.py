"""What a pass on a GPU waits for: for the section that its layer reads, and for no other."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.block_pool import BlockPool
from engine.kv.block_list import BlockList
from engine.kv.cuda_mover import CudaMover
from engine.kv.cuda_runtime import open_runtime
from engine.kv.cuda_streams import make_event, make_stream
from engine.kv.gather_mover import GatherMover
from engine.kv.mover import wait_to_end
from engine.kv.pinned import PinnedMemory
from engine.kv.section_kernels import find_kernels
from engine.kv.staged_mover import StagedMover
from kvstore.layout import BlockLayout, Section

pytestmark = pytest.mark.gpu

WIDTHS = (22_784, 22_784, 22_784, 45_568)
LAYOUT = BlockLayout(tuple(Section(f"L{n}", width) for n, width in enumerate(WIDTHS)))
BLOCKS, CAPACITY = 40, 100
HELD = 2
"""The section that is held back; those before it are not."""
HOLD_CYCLES = 1_000_000_000
"""Half a second of a GPU, as long as which the host comes to all that is asked of it here."""


@pytest.mark.parametrize("make", [StagedMover, GatherMover])
def test_layer_waits_for_its_own_section_and_for_no_other(make: Callable[..., CudaMover]) -> None:
    device, runtime = torch.device("cuda", 0), open_runtime()
    pool = BlockPool(block_bytes=LAYOUT.block_bytes, capacity_blocks=CAPACITY, device=device)
    pool.memory.fill_(0x5A)
    host = torch.randint(0, 256, (BLOCKS * LAYOUT.block_bytes,), dtype=torch.uint8).pin_memory()
    pinned = PinnedMemory(runtime, device)
    view = pinned.adopt(host).view
    kernels = find_kernels(pool.memory, WIDTHS)
    mover = make(pool, LAYOUT, pinned=pinned, runtime=runtime, kernels=kernels)
    ids = random.Random(1).sample(range(CAPACITY), BLOCKS)
    blocks, parts, at = BlockList(ids), [], 0
    for width in WIDTHS:
        parts.append(view[at : at + BLOCKS * width])
        at += BLOCKS * width
    # Whatever is compiled, allocated or loaded at its first use: not in the time that is held.
    wait_to_end(*(mover.to_pool(part, n, blocks) for n, part in enumerate(parts)))
    room = [pool.memory.clone() for _ in range(1 + len(WIDTHS))]
    del room
    pool.memory.fill_(0x5A)
    torch.cuda.synchronize()

    transfers = [mover.to_pool(parts[n], n, blocks) for n in range(HELD)]
    holder, held = make_stream(device), make_event()
    with torch.cuda.stream(holder):
        torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]
        held.record(holder)
    for stream in mover.streams:
        stream.wait_event(held)
    transfers += [mover.to_pool(parts[n], n, blocks) for n in range(HELD, len(WIDTHS))]

    # A pass of a layer for each section, which reads it.
    early = pool.memory.clone()
    read, done = [], []
    for transfer in transfers:
        transfer.order_compute()
        read.append(pool.memory.clone())
        done.append(torch.cuda.current_stream().record_event())
    done[HELD - 1].synchronize()
    are_over = [event.query() for event in (held, done[HELD])]
    assert are_over == [False, False], "too slow for what is held back, or it is not waited for"
    wait_to_end(*transfers)
    torch.cuda.synchronize()

    offset = 0
    for n, width in enumerate(WIDTHS):
        rows = slice(offset, offset + width)
        expected = np.frombuffer(parts[n], np.uint8).reshape(BLOCKS, width)
        assert np.array_equal(read[n][ids, rows].cpu().numpy(), expected), n
        # Without the wait the bytes of what is held were those of before.
        assert n < HELD or (early[ids, rows] == 0x5A).all()
        offset += width
    mover.close()
    pinned.close()
