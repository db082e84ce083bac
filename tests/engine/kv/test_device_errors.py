"""Which errors of PyTorch end all work of a device."""

from __future__ import annotations

import pytest
import torch

from engine.errors import DeviceLost, TransferFailed
from engine.kv.device_errors import transfer_error


@pytest.mark.parametrize(("code", "is_lost"), [(2, False), (1, False), (700, True), (None, True)])
def test_errors_of_a_device_are_told_from_its_loss_by_their_number(
    code: int | None, is_lost: bool
) -> None:
    error = torch.AcceleratorError("CUDA error: words\nand advice")
    if code is not None:
        error.error_code = code  # type: ignore[attr-defined]
    told = transfer_error("a copy", error)
    assert type(told) is (DeviceLost if is_lost else TransferFailed)
    assert str(told) == "a copy: CUDA error: words"
