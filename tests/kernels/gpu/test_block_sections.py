"""Sections of blocks between a pool and a staging area: the reference, and the kernel's source run
on the CPU; on a CUDA device the kernel itself."""

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from kernels.gpu import block_sections as gpu
from kernels.gpu.compiler import lower_to_cuda
from kernels.gpu.mapped_memory import device_view
from kernels.reference.block_sections import gather_block_sections, scatter_block_sections
from tests.kernels.gpu.cuda_on_cpu import ARCHITECTURES, run_on_cpu


class Sizes(NamedTuple):
    """A section of `section_bytes` from `offset` on in blocks of `block_bytes`."""

    section_bytes: int
    offset: int
    block_bytes: int
    blocks: int
    capacity: int


FIRST = Sizes(22_784, 0, 113_920, blocks=5, capacity=9)
LAST = Sizes(45_568, 68_352, 113_920, blocks=3, capacity=4)
SINGLE = Sizes(28_672, 28_672, 86_016, blocks=1, capacity=2)
MANY = Sizes(64, 64, 256, blocks=400, capacity=700)
BY_FOURS = Sizes(12, 8, 60, blocks=300, capacity=400)
BY_BYTES = Sizes(77, 3, 1001, blocks=11, capacity=13)
ALL_SIZES = [FIRST, LAST, SINGLE, MANY, BY_FOURS, BY_BYTES]
WIDTHS = {FIRST: 16, LAST: 16, SINGLE: 16, MANY: 16, BY_FOURS: 4, BY_BYTES: 1}


class Case(NamedTuple):
    staging: torch.Tensor
    pool: torch.Tensor
    block_ids: torch.Tensor
    offset: int

    def to(self, device: str) -> "Case":
        staging, pool, block_ids, offset = self
        return Case(staging.to(device), pool.to(device), block_ids.to(device), offset)


def make_case(sizes: Sizes, rng: random.Random, id_type: torch.dtype = torch.int64) -> Case:
    def random_rows(rows: int, row_bytes: int) -> torch.Tensor:
        drawn = np.frombuffer(rng.randbytes(rows * row_bytes), np.uint8)
        return torch.from_numpy(drawn.reshape(rows, row_bytes).copy())

    return Case(
        random_rows(sizes.blocks, sizes.section_bytes),
        random_rows(sizes.capacity, sizes.block_bytes),
        torch.tensor(rng.sample(range(sizes.capacity), sizes.blocks), dtype=id_type),
        sizes.offset,
    )


def scattered(case: Case) -> torch.Tensor:
    """The pool after the copy, block by block."""
    pool = case.pool.clone()
    end = case.offset + case.staging.shape[1]
    for row, block_id in zip(case.staging, case.block_ids.tolist(), strict=True):
        pool[block_id, case.offset : end] = row
    return pool


def gathered(case: Case) -> torch.Tensor:
    end = case.offset + case.staging.shape[1]
    return torch.stack([case.pool[number, case.offset : end] for number in case.block_ids.tolist()])


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("sizes", ALL_SIZES)
def test_reference_copies_sections_and_leaves_the_rest(
    sizes: Sizes, id_type: torch.dtype, rng: random.Random
) -> None:
    case = make_case(sizes, rng, id_type)
    pool, staging = case.pool.clone(), torch.zeros_like(case.staging)
    gather_block_sections(pool, case.block_ids, case.offset, staging)
    assert torch.equal(staging, gathered(case))
    scatter_block_sections(case.staging, pool, case.block_ids, case.offset)
    assert torch.equal(pool, scattered(case))


@pytest.mark.parametrize("thread_blocks", [None, 1, 3])
@pytest.mark.parametrize("sizes", [LAST, MANY, BY_FOURS, BY_BYTES])
def test_generated_source_copies_as_the_reference(
    sizes: Sizes, thread_blocks: int | None, rng: random.Random
) -> None:
    case = make_case(sizes, rng)
    width = WIDTHS[sizes]
    words_per_thread = gpu.choose_words_per_thread(thread_blocks)
    tiles = -(-case.staging.numel() // width // (gpu.THREADS * words_per_thread))
    grid, rounds = gpu.plan_grid(tiles, thread_blocks)
    pool, staging = case.pool.clone(), torch.zeros_like(case.staging)
    for is_scatter, into in ((False, staging), (True, case.staging)):
        run_on_cpu(
            gpu.make_program(
                *(is_scatter, width, sizes.section_bytes, sizes.block_bytes, "int64"),
                words_per_thread,
            ),
            (grid,),
            staging=into,
            pool=pool,
            block_ids=case.block_ids,
            offset_words=case.offset // width,
            grid=grid,
            rounds=rounds,
            blocks=sizes.blocks,
            capacity=sizes.capacity,
        )
    assert torch.equal(staging, gathered(case))
    assert torch.equal(pool, scattered(case))


@pytest.mark.parametrize("is_scatter", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("words_per_thread", [gpu.WORDS_WHOLE_CARD, gpu.WORDS_BOUNDED])
def test_kernel_moves_16_bytes_at_a_time(
    words_per_thread: int, architecture: str, is_scatter: bool
) -> None:
    program = gpu.make_program(is_scatter, 16, 22_784, 113_920, "int32", words_per_thread)
    source = lower_to_cuda(program, architecture)
    body = source[source.index("__global__") :]
    assert body.count("*(uint4*)(staging") == 1
    assert body.count("*(uint4*)(pool") == 1
    # Nothing but whole words is read or written.
    assert "staging[" not in body
    assert "pool[" not in body


@pytest.mark.gpu
@pytest.mark.parametrize("thread_blocks", [None, 3])
@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("sizes", ALL_SIZES)
def test_kernel_copies_as_the_reference(
    sizes: Sizes, id_type: torch.dtype, thread_blocks: int | None, rng: random.Random
) -> None:
    case = make_case(sizes, rng, id_type)
    there = case.to("cuda")
    staging = torch.zeros_like(there.staging)
    gpu.gather_block_sections(
        there.pool, there.block_ids, there.offset, staging, thread_blocks=thread_blocks
    )
    assert torch.equal(staging.cpu(), gathered(case))
    gpu.scatter_block_sections(*there, thread_blocks=thread_blocks)
    assert torch.equal(there.pool.cpu(), scattered(case))


@pytest.mark.gpu
def test_kernel_copies_when_the_staging_area_begins_between_words(rng: random.Random) -> None:
    case = make_case(FIRST, rng)
    there = case.to("cuda")
    memory = torch.zeros(case.staging.numel() + 1, dtype=torch.uint8, device="cuda")
    staging = memory[1:].view(case.staging.shape)
    gpu.gather_block_sections(there.pool, there.block_ids, there.offset, staging)
    assert torch.equal(staging.cpu(), gathered(case))


@pytest.mark.gpu
def test_kernel_copies_on_the_current_stream(rng: random.Random) -> None:
    case = make_case(MANY, rng)
    there = case.to("cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        # A kernel of another stream would not wait, and copy the rows as they still are.
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        there.staging.zero_()
        gpu.scatter_block_sections(*there)
    stream.synchronize()
    expected = scattered(case._replace(staging=torch.zeros_like(case.staging)))
    assert torch.equal(there.pool.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [LAST, BY_FOURS])
def test_kernel_copies_to_and_from_memory_of_the_host(sizes: Sizes, rng: random.Random) -> None:
    case = make_case(sizes, rng)
    there = case.to("cuda")
    host = torch.zeros_like(case.staging).pin_memory()
    view = device_view(host, there.pool.device)
    gpu.gather_block_sections(there.pool, there.block_ids, case.offset, view, thread_blocks=4)
    torch.cuda.synchronize()
    assert torch.equal(host, gathered(case))
    host.copy_(case.staging)
    gpu.scatter_block_sections(view, there.pool, there.block_ids, case.offset, thread_blocks=4)
    assert torch.equal(there.pool.cpu(), scattered(case))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"staging": torch.zeros(2, 32)}, TypeError, "staging: given torch.float32"),
        ({"pool": torch.zeros(4, 64, dtype=torch.int8)}, TypeError, "pool: given torch.int8"),
        ({"staging": torch.zeros(64, dtype=torch.uint8)}, ValueError, r"staging: given shape \[64"),
        (
            {"pool": torch.zeros(4, 128, dtype=torch.uint8)[:, ::2]},
            ValueError,
            "expected a contiguous matrix",
        ),
        (
            {"block_ids": torch.zeros(2, dtype=torch.int16)},
            TypeError,
            "block ids: given torch.int16",
        ),
        ({"block_ids": torch.zeros(3, dtype=torch.int64)}, ValueError, "one for each of 2 rows"),
        ({"offset_bytes": 33}, ValueError, "given bytes 33 to 65, expected inside a block of 64"),
        ({"offset_bytes": -1}, ValueError, "given bytes -1 to 31"),
        ({"pool": torch.zeros(4, 64, dtype=torch.uint8, device="meta")}, ValueError, "meta .pool"),
    ],
)
def test_copies_refuse_what_does_not_fit(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {
        "staging": torch.zeros(2, 32, dtype=torch.uint8),
        "pool": torch.zeros(4, 64, dtype=torch.uint8),
        "block_ids": torch.tensor([0, 1]),
        "offset_bytes": 0,
        **change,
    }
    for copy in (
        scatter_block_sections,
        gather_block_sections,
        gpu.scatter_block_sections,
        gpu.gather_block_sections,
    ):
        with pytest.raises(error, match=message):
            copy(**given)


def test_kernel_refuses_memory_of_the_host(rng: random.Random) -> None:
    with pytest.raises(ValueError, match="pool: given memory of cpu, expected of a CUDA device"):
        gpu.scatter_block_sections(*make_case(MANY, rng))


def test_grid_covers_all_tiles_within_its_bound() -> None:
    assert gpu.plan_grid(0, None) == (0, 0)
    assert gpu.plan_grid(7, None) == (7, 1)
    assert gpu.plan_grid(7, 7) == (7, 1)
    assert gpu.plan_grid(7, 3) == (3, 3)
    with pytest.raises(ValueError, match="thread blocks: given 0"):
        gpu.plan_grid(7, 0)
