"""Rows in the blocks of a pool: written and read by their number in the sequence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.paged_rows import PagedRows

ROW_BYTES = 5


def random_bytes(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def rows_in(pages: torch.Tensor, *block_ids: int) -> PagedRows:
    return PagedRows(pages, torch.tensor(block_ids))


def test_row_g_lies_in_the_block_of_its_number_at_its_place() -> None:
    pages = random_bytes(1, 6, 4, ROW_BYTES)
    rows = rows_in(pages, 5, 0, 3)
    assert rows.rows_per_block == 4
    assert torch.equal(rows.read(torch.tensor([6]))[0], pages[0, 2])
    assert torch.equal(rows.read(torch.tensor([0, 3, 4, 11])), pages[[5, 5, 0, 3], [0, 3, 0, 3]])


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (2, 3), (3, 0), (2, 2, 2)])
def test_rows_read_have_the_shape_of_the_numbers_and_a_last_dimension(
    shape: tuple[int, ...],
) -> None:
    pages = random_bytes(2, 3, 4, ROW_BYTES)
    found = rows_in(pages, 2, 1).read(torch.zeros(shape, dtype=torch.int64))
    assert found.shape == (*shape, ROW_BYTES)
    assert torch.equal(found, pages[2, 0].expand(found.shape))


def test_rows_can_be_read_many_times_and_in_any_order() -> None:
    pages = random_bytes(3, 3, 4, ROW_BYTES)
    rows = rows_in(pages, 1, 2)
    found = rows.read(torch.tensor([7, 0, 7, 7]))
    assert torch.equal(found, pages[[2, 1, 2, 2], [3, 0, 3, 3]])


def test_rows_read_are_a_copy() -> None:
    pages = random_bytes(4, 2, 4, ROW_BYTES)
    found = rows_in(pages, 1).read(torch.tensor([0]))
    before = found.clone()
    pages.fill_(0)
    assert torch.equal(found, before)


@given(data=st.data())
def test_what_is_written_is_read_and_the_rest_of_the_pool_stays(data: st.DataObject) -> None:
    rows_per_block = data.draw(st.sampled_from([1, 2, 3, 8]), "rows per block")
    block_ids = data.draw(st.permutations(range(6)), "blocks")[:4]
    total = rows_per_block * len(block_ids)
    pages = random_bytes(5, 6, rows_per_block, ROW_BYTES)
    plain = {
        (block, place): pages[block, place].tolist()
        for block in range(6)
        for place in range(rows_per_block)
    }
    rows = rows_in(pages, *block_ids)
    for seed in range(data.draw(st.integers(1, 3), "writes")):
        first = data.draw(st.integers(0, total), "first")
        written = random_bytes(seed, data.draw(st.integers(0, total - first), "count"), ROW_BYTES)
        rows.write(first, written)
        for row, content in enumerate(written.tolist(), first):
            plain[block_ids[row // rows_per_block], row % rows_per_block] = content
    assert {key: pages[key].tolist() for key in plain} == plain
    in_order = [plain[block, place] for block in block_ids for place in range(rows_per_block)]
    assert rows.read(torch.arange(total)).tolist() == in_order


def test_pages_may_be_a_strided_part_of_wider_blocks() -> None:
    memory = random_bytes(6, 4, 64)
    before = memory.clone()
    pages = memory[:, 16:46].view(4, 6, ROW_BYTES)
    assert not pages.is_contiguous()
    rows = rows_in(pages, 3, 1)
    written = random_bytes(7, 4, ROW_BYTES)
    rows.write(4, written)
    assert torch.equal(rows.read(torch.arange(4, 8)), written)
    before[3, 36:46] = written[:2].flatten()
    before[1, 16:26] = written[2:].flatten()
    assert torch.equal(memory, before)


def test_two_sequences_share_a_block_by_its_number() -> None:
    pages = random_bytes(8, 4, 2, ROW_BYTES)
    first, second = rows_in(pages, 2, 0), rows_in(pages, 2, 3)
    first.write(0, random_bytes(9, 4, ROW_BYTES))
    shared = torch.arange(2)
    assert torch.equal(first.read(shared), second.read(shared))
    assert not torch.equal(first.read(shared + 2), second.read(shared + 2))


def test_rows_beyond_the_blocks_of_the_sequence_are_an_error() -> None:
    rows = rows_in(random_bytes(10, 4, 2, ROW_BYTES), 1, 2)
    with pytest.raises(IndexError):
        rows.read(torch.tensor([4]))
    with pytest.raises(IndexError):
        rows.write(3, random_bytes(11, 2, ROW_BYTES))
