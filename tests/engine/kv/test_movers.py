"""What every mover keeps to. Those for a GPU run where there is one."""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xxhash
from numpy.typing import NDArray

from engine.block_pool import BlockPool
from engine.errors import InvalidRequest
from engine.kv.batched_mover import BatchedMover
from engine.kv.block_list import BlockList
from engine.kv.bounce import BOUNCE_BYTES
from engine.kv.cuda_runtime import open_runtime
from engine.kv.gather_mover import GatherMover
from engine.kv.memcpy_mover import MemcpyMover
from engine.kv.mover import SectionMover, wait_to_end
from engine.kv.nixl_mover import PACKAGES, NixlMover
from engine.kv.per_block_mover import PerBlockMover
from engine.kv.piece_plan import StagingShape
from engine.kv.pinned import PinnedMemory
from engine.kv.section_digest import section_xxh3
from engine.kv.section_kernels import CompiledKernels, TorchKernels
from engine.kv.staged_mover import StagedMover
from kvstore.layout import BlockLayout, Section
from tests.engine.kv.delayed_mover import DelayedMover
from tests.engine.kv.fake_nixl import FakeNixl

LAYOUTS = {
    "v41": BlockLayout(
        tuple(Section(f"L{n}", size) for n, size in enumerate((22_784, 22_784, 22_784, 45_568)))
    ),
    "odd": BlockLayout((Section("a", 1_031), Section("b", 7), Section("c", 4_096))),
    "words": BlockLayout((Section("a", 1_008), Section("b", 48), Section("c", 12_304))),
}
CAPACITY = 150
SMALL_SHAPE = StagingShape(piece_bytes=300_000)
"""So that a section of these pools has several pieces."""

Bytes = NDArray[np.uint8]


@dataclass
class Bench:
    """A mover over a pool of which all bytes are known, and an arena that it may have pinned."""

    mover: SectionMover
    pool: BlockPool
    layout: BlockLayout
    arena: memoryview
    pinned: PinnedMemory | None
    expected: Bytes
    """What every block of the pool is to hold, [block, byte]."""

    @property
    def widths(self) -> list[int]:
        return [section.bytes for section in self.layout.sections]

    @property
    def device(self) -> torch.device:
        return self.pool.memory.device

    def offset(self, section: int) -> int:
        return sum(self.widths[:section])

    def found(self) -> Bytes:
        if not self.pool.is_host:
            torch.cuda.synchronize()
        found: Bytes = self.pool.memory.cpu().numpy()
        return found

    def keep_busy(self) -> None:
        """Have a GPU do nothing else in the current stream for some 20 ms."""
        if not self.pool.is_host:
            torch.cuda._sleep(40_000_000)  # type: ignore[no-untyped-call]

    def take_in(self, ids: Sequence[int], rng: np.random.Generator) -> list[memoryview]:
        """The sections of new contents of some blocks, as a run of the arena has them."""
        parts, at = [], 0
        for section, width in enumerate(self.widths):
            part = self.arena[at : at + len(ids) * width]
            rows = rng.integers(0, 256, (len(ids), width), np.uint8)
            part[:] = rows.reshape(-1).data
            first = self.offset(section)
            self.expected[list(ids), first : first + width] = rows
            parts.append(part)
            at += part.nbytes
        return parts

    def section_of(self, ids: Sequence[int], section: int) -> bytes:
        first = self.offset(section)
        return self.expected[list(ids), first : first + self.widths[section]].tobytes()


Maker = Callable[[BlockPool, BlockLayout, memoryview], SectionMover]


def _memcpy(pool: BlockPool, layout: BlockLayout, arena: memoryview) -> SectionMover:
    return MemcpyMover(pool, layout)


def _delayed(pool: BlockPool, layout: BlockLayout, arena: memoryview) -> SectionMover:
    mover = DelayedMover(pool, layout)
    mover.go_on()
    return mover


def _nixl(pool: BlockPool, layout: BlockLayout, arena: memoryview) -> SectionMover:
    return NixlMover(pool, layout, arena=lambda: arena, clock=time.monotonic)


def _nixl_fake(pool: BlockPool, layout: BlockLayout, arena: memoryview) -> SectionMover:
    api = FakeNixl().module
    return NixlMover(pool, layout, arena=lambda: arena, clock=time.monotonic, api=api)


HOST_MOVERS: dict[str, Maker] = {
    "memcpy": _memcpy,
    "delayed": _delayed,
    "nixl": _nixl,
    "nixl_fake": _nixl_fake,
}
GPU_MOVERS = (
    "staged",
    "staged_by_torch",
    "staged_unpinned",
    "gather",
    "batched",
    "per_block",
    "gather_unpinned",
    "batched_unpinned",
    "per_block_unpinned",
    "nixl_gpu",
)
NIXL_LACKS = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in PACKAGES), reason="nixl is not installed"
)


def _gpu_mover(
    name: str, pool: BlockPool, layout: BlockLayout, arena: memoryview
) -> tuple[SectionMover, PinnedMemory]:
    runtime = open_runtime()
    pinned = PinnedMemory(runtime, pool.memory.device)
    if not name.endswith("_unpinned"):
        pinned.pin(arena)
    mover: SectionMover
    match name.removesuffix("_unpinned"):
        case "gather":
            mover = GatherMover(
                pool, layout, pinned=pinned, runtime=runtime, kernels=CompiledKernels()
            )
        case "batched":
            mover = BatchedMover(pool, layout, pinned=pinned, runtime=runtime)
        case "per_block":
            mover = PerBlockMover(pool, layout, pinned=pinned, runtime=runtime)
        case "nixl_gpu":
            mover = NixlMover(pool, layout, arena=lambda: arena, clock=time.monotonic)
        case _:
            mover = StagedMover(
                pool,
                layout,
                pinned=pinned,
                runtime=runtime,
                kernels=TorchKernels() if name == "staged_by_torch" else CompiledKernels(),
                shape=SMALL_SHAPE,
            )
    return mover, pinned


def _mappable(size_bytes: int) -> memoryview:
    """Whole pages, as an arena is."""
    pages = -(-size_bytes // 4096) + 1
    memory = np.zeros(pages * 4096, np.uint8)
    first = -memory.ctypes.data % 4096
    return memory[first : first + (pages - 1) * 4096].data


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> BlockLayout:
    return LAYOUTS[request.param]


@pytest.fixture(
    params=[
        *(pytest.param(n, marks=NIXL_LACKS if n == "nixl" else ()) for n in HOST_MOVERS),
        *(
            pytest.param(n, marks=[pytest.mark.gpu, *([NIXL_LACKS] if n == "nixl_gpu" else [])])
            for n in GPU_MOVERS
        ),
    ]
)
def bench(request: pytest.FixtureRequest, layout: BlockLayout) -> Iterator[Bench]:
    name: str = request.param
    device = "cpu" if name in HOST_MOVERS else "cuda"
    pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=CAPACITY, device=device)
    expected = np.random.default_rng(1).integers(0, 256, tuple(pool.memory.shape), np.uint8)
    pool.memory.copy_(torch.from_numpy(expected))
    if device == "cuda":
        torch.cuda.synchronize()
    arena = _mappable(CAPACITY * layout.block_bytes)
    pinned: PinnedMemory | None = None
    if name in HOST_MOVERS:
        mover = HOST_MOVERS[name](pool, layout, arena)
    else:
        mover, pinned = _gpu_mover(name, pool, layout, arena)
    yield Bench(mover, pool, layout, arena, pinned, expected)
    mover.close()
    if pinned is not None:
        pinned.close()


@pytest.mark.parametrize("count", [1, 2, 63, 64, CAPACITY])
def test_sections_stand_in_their_blocks_and_come_out_the_same(bench: Bench, count: int) -> None:
    rng = np.random.default_rng(count)
    ids = rng.permutation(CAPACITY)[:count].tolist()
    parts = bench.take_in(ids, rng)
    blocks = BlockList(ids)
    wait_to_end(*[bench.mover.to_pool(part, n, blocks) for n, part in enumerate(parts)])
    assert np.array_equal(bench.found(), bench.expected)
    for part in parts:
        part[:] = bytes(part.nbytes)
    wait_to_end(*[bench.mover.from_pool(part, n, blocks) for n, part in enumerate(parts)])
    assert [bytes(part) for part in parts] == [bench.section_of(ids, n) for n in range(len(parts))]


@pytest.mark.parametrize(("first", "count"), [(0, CAPACITY), (5, 60), (CAPACITY - 1, 1)])
def test_blocks_that_follow_one_another_are_moved_like_others(
    bench: Bench, first: int, count: int
) -> None:
    ids = range(first, first + count)
    parts = bench.take_in(ids, np.random.default_rng(first))
    wait_to_end(*[bench.mover.to_pool(part, n, ids) for n, part in enumerate(parts)])
    assert np.array_equal(bench.found(), bench.expected)
    for part in parts:
        part[:] = bytes(part.nbytes)
    wait_to_end(*[bench.mover.from_pool(part, n, ids) for n, part in enumerate(parts)])
    assert [bytes(part) for part in parts] == [bench.section_of(ids, n) for n in range(len(parts))]


def test_parts_of_a_list_go_to_the_blocks_of_that_part(bench: Bench) -> None:
    rng = np.random.default_rng(4)
    ids = rng.permutation(CAPACITY)[:70].tolist()
    parts = bench.take_in(ids, rng)
    blocks = BlockList(ids)
    transfers = []
    for section, (part, width) in enumerate(zip(parts, bench.widths, strict=True)):
        for first, end in ((0, 1), (1, 40), (40, 70)):
            some = part[first * width : end * width]
            transfers.append(bench.mover.to_pool(some, section, blocks[first:end]))
    wait_to_end(*transfers)
    assert np.array_equal(bench.found(), bench.expected)


def test_many_transfers_at_once_leave_every_block_as_its_own(bench: Bench) -> None:
    """Threads that load into some blocks while others save, and while a third one writes blocks."""
    order = random.Random(7).sample(range(CAPACITY), CAPACITY)
    loads, saves = order[:60], order[60:120]
    parts = bench.take_in(loads, np.random.default_rng(2))
    saved = [np.zeros(len(saves) * width, np.uint8) for width in bench.widths]

    def load(turn: int) -> None:
        for section, (part, width) in enumerate(zip(parts, bench.widths, strict=True)):
            some = part[turn * 20 * width : (turn + 1) * 20 * width]
            bench.mover.to_pool(some, section, loads[turn * 20 : turn * 20 + 20]).wait()

    def save(turn: int) -> None:
        for section, (into, width) in enumerate(zip(saved, bench.widths, strict=True)):
            some = into[turn * 20 * width : (turn + 1) * 20 * width].data
            bench.mover.from_pool(some, section, saves[turn * 20 : turn * 20 + 20]).wait()

    def write() -> None:
        for turn in range(3):
            for block_id in order[120:]:
                bench.pool.memory[block_id].fill_(turn)

    with ThreadPoolExecutor(7) as threads:
        jobs = [threads.submit(job, turn) for turn in range(3) for job in (load, save)]
        jobs.append(threads.submit(write))
        for job in jobs:
            job.result()
    bench.expected[order[120:]] = 2
    assert np.array_equal(bench.found(), bench.expected)
    assert [into.tobytes() for into in saved] == [
        bench.section_of(saves, section) for section in range(len(saved))
    ]


def test_nothing_is_moved_for_no_blocks(bench: Bench) -> None:
    assert bench.mover.to_pool(bench.arena[:0], 0, []).has_ended
    assert bench.mover.from_pool(bench.arena[:0], 0, []).has_ended
    assert np.array_equal(bench.found(), bench.expected)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3, 4, 3], "block ids: given block 3 more than once"),
        ([3, 4, CAPACITY], f"block ids: given {CAPACITY}, expected below {CAPACITY}"),
        ([3, 4, -1], "block ids: given -1, expected 0 or more"),
        ([3, 4], "part of a section: given .* bytes, expected 2 blocks of"),
    ],
)
def test_blocks_that_cannot_be_meant_are_refused_and_nothing_is_moved(
    bench: Bench, ids: list[int], message: str
) -> None:
    part = bench.arena[: 3 * bench.widths[0]]
    for move in (bench.mover.to_pool, bench.mover.from_pool):
        with pytest.raises(InvalidRequest, match=message):
            move(part, 0, ids)
    assert np.array_equal(bench.found(), bench.expected)


def test_transfer_begins_when_what_was_computed_before_it_is_done(bench: Bench) -> None:
    """Blocks that were written just now are saved as they are then; one that is still to be read
    is not overwritten before."""
    ids = random.Random(3).sample(range(CAPACITY), 40)
    width, parts = bench.widths[0], bench.take_in(ids, np.random.default_rng(3))
    bench.keep_busy()
    bench.pool.memory[:, :width] = 9
    mark = bench.mover.mark_compute()
    out = np.zeros(40 * width, np.uint8)
    wait_to_end(bench.mover.from_pool(out.data, 0, ids, after=mark))
    assert (out == 9).all()
    bench.keep_busy()
    before = bench.pool.memory[:, :width].clone()
    mark = bench.mover.mark_compute()
    wait_to_end(bench.mover.to_pool(parts[0], 0, ids, after=mark))
    assert (before.cpu() == 9).all()
    assert bench.found()[ids, :width].tobytes() == bench.section_of(ids, 0)


def test_pass_that_is_ordered_behind_a_transfer_reads_what_it_moved(bench: Bench) -> None:
    ids = random.Random(5).sample(range(CAPACITY), 100)
    parts = bench.take_in(ids, np.random.default_rng(5))
    transfers = [bench.mover.to_pool(part, n, ids) for n, part in enumerate(parts)]
    for transfer in transfers:
        if bench.pool.is_host:
            transfer.wait()
        transfer.order_compute()
    assert np.array_equal(bench.pool.memory.clone().cpu().numpy(), bench.expected)
    wait_to_end(*transfers)


@pytest.mark.parametrize("size", [1, 48, 100_003])
def test_bytes_that_lie_together_are_copied_in_and_out(bench: Bench, size: int) -> None:
    rng = np.random.default_rng(size)
    given = rng.integers(0, 256, size, np.uint8)
    part, memory = bench.arena[:size], torch.zeros(size + 9, dtype=torch.uint8, device=bench.device)
    part[:] = given.data
    wait_to_end(bench.mover.copy_in(part, memory[3:-6], after=bench.mover.mark_compute()))
    found = memory.cpu().numpy()
    assert np.array_equal(found[3:-6], given)
    assert not found[:3].any()
    assert not found[-6:].any()
    part[:] = bytes(size)
    wait_to_end(bench.mover.copy_out(memory[3:-6], part))
    assert np.array_equal(np.frombuffer(part, np.uint8), given)
    # Of an owner that has no part in the arena.
    other = np.zeros(size, np.uint8)
    wait_to_end(bench.mover.copy_out(memory[3:-6], other.data))
    assert np.array_equal(other, given)


def test_copy_begins_when_what_was_computed_before_it_is_done(bench: Bench) -> None:
    """A record that was made just now is stored as it is then; memory that is still to be read is
    not overwritten before."""
    size = 60_000
    memory = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    bench.keep_busy()
    memory.fill_(9)
    wait_to_end(bench.mover.copy_out(memory, bench.arena[:size], after=bench.mover.mark_compute()))
    assert bytes(bench.arena[:size]) == b"\t" * size
    bench.arena[:size] = b"\5" * size
    bench.keep_busy()
    before = memory.clone()
    wait_to_end(bench.mover.copy_in(bench.arena[:size], memory, after=bench.mover.mark_compute()))
    assert (before.cpu() == 9).all()
    assert (memory.cpu() == 5).all()


def test_copies_of_no_bytes_have_ended_and_those_that_do_not_fit_are_refused(bench: Bench) -> None:
    memory = torch.zeros(40, dtype=torch.uint8, device=bench.device)
    assert bench.mover.copy_in(bench.arena[:0], memory[:0]).has_ended
    assert bench.mover.copy_out(memory[:0], bench.arena[:0]).has_ended
    elsewhere = torch.zeros(20, dtype=torch.uint8, device="meta")
    for other, message in (
        (memory[:21], "part to copy: given 20 bytes, expected 21 bytes"),
        (memory[::2], "memory to copy: given bytes that lie apart"),
        (elsewhere, "memory to copy: given bytes that lie together on meta"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            bench.mover.copy_in(bench.arena[:20], other)
        with pytest.raises(InvalidRequest, match=message):
            bench.mover.copy_out(other, bench.arena[:20])
    assert not memory.any()


def test_checksum_of_a_section_is_of_what_stands_in_the_pool(bench: Bench) -> None:
    ids = random.Random(6).sample(range(CAPACITY), 61)
    for section, width in enumerate(bench.widths):
        found = section_xxh3(bench.mover, width, section, BlockList(ids))
        assert found == xxhash.xxh3_64_intdigest(bench.section_of(ids, section))


@pytest.mark.gpu
def test_buffer_that_is_too_small_is_let_go_of_when_there_is_a_larger_one() -> None:
    layout = BlockLayout((Section("a", 64), Section("b", BOUNCE_BYTES + 64)))
    pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=2, device="cuda")
    pool.memory.zero_()
    mover, pinned = _gpu_mover("staged_unpinned", pool, layout, memoryview(b""))
    for section, width in enumerate((64, BOUNCE_BYTES + 64)):
        out = np.zeros(width, np.uint8)
        wait_to_end(mover.from_pool(out.data, section, [1]))
        assert not out.any()
    assert [one.view.nbytes for one in pinned._ranges] == [BOUNCE_BYTES + 64]
    mover.close()
    assert not pinned._ranges
    pinned.close()


@pytest.mark.gpu
def test_larger_copy_than_the_buffer_goes_through_it_in_pieces() -> None:
    layout = LAYOUTS["odd"]
    pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=2, device="cuda")
    mover, pinned = _gpu_mover("staged_unpinned", pool, layout, memoryview(b""))
    given = np.random.default_rng(8).integers(0, 256, 2 * BOUNCE_BYTES + 77, np.uint8)
    memory = torch.zeros(len(given), dtype=torch.uint8, device="cuda")
    wait_to_end(mover.copy_in(given.data, memory, after=mover.mark_compute()))
    out = np.zeros_like(given)
    wait_to_end(mover.copy_out(memory, out.data))
    assert np.array_equal(memory.cpu().numpy(), given)
    assert np.array_equal(out, given)
    mover.close()
    pinned.close()


@pytest.mark.gpu
def test_memcpy_is_refused_for_a_pool_on_a_gpu() -> None:
    layout = LAYOUTS["odd"]
    pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=2, device="cuda")
    with pytest.raises(InvalidRequest, match="memcpy of blocks: given a pool on cuda:0"):
        MemcpyMover(pool, layout)


def test_staging_is_refused_for_a_pool_of_the_host() -> None:
    layout = LAYOUTS["odd"]
    pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=2)
    unused = object()
    with pytest.raises(InvalidRequest, match="staged: given a pool on cpu, expected on a GPU"):
        StagedMover(
            pool,
            layout,
            pinned=unused,  # type: ignore[arg-type]
            runtime=unused,  # type: ignore[arg-type]
            kernels=TorchKernels(),
        )
