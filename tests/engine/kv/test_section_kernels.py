"""Sections moved by PyTorch's own operations, against the reference."""

import pytest
import torch

from engine.kv.section_kernels import TorchKernels
from kernels.reference.block_sections import gather_block_sections, scatter_block_sections


@pytest.mark.parametrize(
    ("block_bytes", "offset", "width"), [(96, 16, 48), (97, 16, 48), (64, 3, 5)]
)
def test_sections_are_those_of_the_reference(block_bytes: int, offset: int, width: int) -> None:
    generator = torch.Generator().manual_seed(1)
    pool = torch.randint(0, 256, (20, block_bytes), dtype=torch.uint8, generator=generator)
    staging = torch.randint(0, 256, (7, width), dtype=torch.uint8, generator=generator)
    ids = torch.randperm(20, generator=generator)[:7].to(torch.int32)
    expected = pool.clone()
    scatter_block_sections(staging, expected, ids, offset)
    TorchKernels().scatter(staging, pool, ids, offset, 1)
    assert torch.equal(pool, expected)
    found, wanted = torch.zeros_like(staging), torch.zeros_like(staging)
    gather_block_sections(pool, ids, offset, wanted)
    TorchKernels().gather(found, pool, ids, offset, 1)
    assert torch.equal(found, wanted)
    assert torch.equal(found, staging)
