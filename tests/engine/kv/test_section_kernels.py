"""Sections moved by PyTorch's own operations, against the reference."""

import logging
from collections.abc import Callable
from typing import ClassVar, NoReturn

import pytest
import torch

from engine.errors import DeviceFull, DeviceLost
from engine.kv import section_kernels
from engine.kv.section_kernels import TorchKernels, find_kernels
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


WIDTHS = (48, 16, 32)


class Compiling(TorchKernels):
    """TileLang's kernels, where the compiler does what a test says; which copies it was asked
    for."""

    is_compiled = True
    compile: Callable[[], None]
    copies: ClassVar[list[tuple[str, int, int]]] = []

    def scatter(
        self,
        staging: torch.Tensor,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        offset_bytes: int,
        thread_blocks: int,
    ) -> None:
        self.copies.append(("scatter", offset_bytes, staging.shape[1]))
        type(self).compile()
        super().scatter(staging, pool, block_ids, offset_bytes, thread_blocks)

    def gather(
        self,
        staging: torch.Tensor,
        pool: torch.Tensor,
        block_ids: torch.Tensor,
        offset_bytes: int,
        thread_blocks: int,
    ) -> None:
        self.copies.append(("gather", offset_bytes, staging.shape[1]))
        super().gather(staging, pool, block_ids, offset_bytes, thread_blocks)


def lack_nvcc() -> NoReturn:
    raise RuntimeError("Compilation failed: nvcc not found\nand a trace")


def lack_compiler() -> NoReturn:
    raise FileNotFoundError(2, "No such file or directory", "g++")


@pytest.mark.parametrize("fail", [lack_nvcc, lack_compiler])
def test_kernels_that_cannot_be_compiled_are_pytorchs_and_the_log_says_why(
    fail: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(section_kernels, "CompiledKernels", Compiling)
    monkeypatch.setattr(Compiling, "compile", staticmethod(fail), raising=False)
    kernels = find_kernels(torch.zeros((2, 96), dtype=torch.uint8), WIDTHS)
    assert isinstance(kernels, TorchKernels)
    assert not kernels.is_compiled
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "nvcc and a C++ compiler" in record.getMessage()
    assert "trace" not in record.getMessage()


def find_no_memory() -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB.\nand advice")


def find_no_device() -> NoReturn:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nand advice")


@pytest.mark.parametrize(
    ("fail", "error", "said"),
    [
        (find_no_memory, DeviceFull, r"^CUDA out of memory. Tried to allocate 2 MiB.$"),
        (find_no_device, DeviceLost, r"^the device has failed: CUDA error: an illegal .*tered$"),
    ],
)
def test_device_that_is_full_or_lost_is_no_compiler_that_is_missing(
    fail: Callable[[], None],
    error: type[Exception],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(section_kernels, "CompiledKernels", Compiling)
    monkeypatch.setattr(Compiling, "compile", staticmethod(fail), raising=False)
    with pytest.raises(error, match=said):
        find_kernels(torch.zeros((2, 96), dtype=torch.uint8), WIDTHS)
    assert caplog.records == []


def test_kernel_that_fails_after_it_was_queued_is_found_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(section_kernels, "CompiledKernels", Compiling)
    monkeypatch.setattr(Compiling, "compile", staticmethod(lambda: None), raising=False)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda _: find_no_device())
    with pytest.raises(DeviceLost):
        find_kernels(torch.zeros((2, 96), dtype=torch.uint8), WIDTHS)


def test_kernels_that_can_be_compiled_are_taken_and_the_pool_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(section_kernels, "CompiledKernels", Compiling)
    monkeypatch.setattr(Compiling, "compile", staticmethod(lambda: None), raising=False)
    pool = torch.arange(192, dtype=torch.uint8).view(2, 96)
    Compiling.copies.clear()
    assert find_kernels(pool, WIDTHS).is_compiled
    assert torch.equal(pool, torch.arange(192, dtype=torch.uint8).view(2, 96))
    assert Compiling.copies == [
        (way, offset, width)
        for offset, width in ((0, 48), (48, 16), (64, 32))
        for way in ("gather", "scatter")
    ]
