"""Bytes for a GPU are queued from page-locked memory; a CPU gets them at once.

PyTorch's side is recorded here; on a GPU it is in test_on_a_gpu.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.models.deepseek_v41.host_bytes import view_bytes, write_bytes
from engine.upload import PAGEABLE_COPY_MAX_BYTES, upload

GPU = torch.device("cuda")


class MemoryOfAGpu:
    """A tensor as far as it is written to; `copies` has what, and whether the host goes on."""

    device, dtype, shape = GPU, torch.uint8, torch.Size([4])

    def __init__(self) -> None:
        self.copies: list[tuple[list[int], bool]] = []

    def copy_(self, host: torch.Tensor, non_blocking: bool = False) -> None:
        self.copies.append((host.tolist(), non_blocking))


def test_bytes_for_a_gpu_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, is_pinned = torch.empty, []

    def allocate(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:  # noqa: ANN401
        is_pinned.append(pin_memory)
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", allocate)
    memory: Any = MemoryOfAGpu()
    write_bytes(memory, b"\1\2\3\4")
    assert memory.copies == [([1, 2, 3, 4], True)]
    assert is_pinned == [True]


def test_bytes_for_a_cpu_are_there_at_once() -> None:
    memory = torch.zeros(4, dtype=torch.uint8)
    write_bytes(memory, b"\1\2\3\4")
    assert bytes(view_bytes(memory)) == b"\1\2\3\4"


@pytest.mark.parametrize(
    ("device", "beyond_bytes", "is_pinned"),
    [("cuda", 0, False), ("cuda", 8, True), ("cpu", 8, False)],
)
def test_upload_is_by_page_locked_memory_where_the_driver_would_wait(
    device: str, beyond_bytes: int, is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def pin_memory(values: torch.Tensor) -> torch.Tensor:
        calls.append("pin")
        return values

    def to(values: torch.Tensor, there: torch.device, *, non_blocking: bool) -> torch.Tensor:
        calls.append((there, non_blocking))
        return values

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    values = torch.zeros((PAGEABLE_COPY_MAX_BYTES + beyond_bytes) // 8, dtype=torch.int64)
    upload(values, torch.device(device))
    assert calls == ["pin"] * is_pinned + [(torch.device(device), True)]
