"""What PyTorch and CUDA say of a device that is full or has failed, in the engine's own errors.

Both are RuntimeErrors of PyTorch, as is what a compiler says that is not there: whoever goes on
without the latter has to tell them apart.
"""

from __future__ import annotations

import torch

from ..errors import DeviceFull, DeviceLost, TransferFailed
from .mover import first_line

DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)

LOSSES = frozenset({214, 220, 226, 700, 702, 710, *range(714, 720), 721, 911})
"""Errors of cudaError_t behind which every call gives the same one, until the process ends: of the
memory (ECC, NVLink, contained), illegal address, time-out, assertion or trap, hardware stack,
illegal instruction, misaligned address, address space, program counter, failed launch, leaked
tensor memory, external device."""


def device_error(error: BaseException) -> DeviceFull | DeviceLost:
    """For one of DEVICE_ERRORS, met where nothing is moved."""
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceFull(first_line(error))
    return DeviceLost(f"the device has failed: {first_line(error)}")


def transfer_error(what: str, error: BaseException) -> TransferFailed:
    """For whatever a transfer has met; DeviceLost if no other one will do better."""
    # A release of PyTorch that does not tell the number leaves only the worse to be believed.
    is_lost = isinstance(error, torch.AcceleratorError) and (
        getattr(error, "error_code", None) in (None, *LOSSES)
    )
    kind = DeviceLost if is_lost else TransferFailed
    return kind(f"{what}: {first_line(error)}")
