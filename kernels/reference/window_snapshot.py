"""Copies the windows of sequences between their state slots and records of their own.

The first bytes of a state slot are rings, one after the other, each beginning at a multiple of the
same number of bytes (docs/formats/v41-state.md). A ring's row of position p stands at p mod rows. A
record has the same rings at the same places, but only the rows of the window count there.

    slots    uint8 [slots, state bytes]
    records  uint8 [copies, stored bytes]; stored bytes = rings * ring stride, at most state bytes
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowShape:
    """`rings` rings of `ring_rows` rows of `row_bytes`; a ring begins every `ring_stride_bytes`.

    The window before a position are the `window` positions before it, fewer near the start.
    """

    rings: int
    ring_rows: int
    row_bytes: int
    ring_stride_bytes: int
    window: int

    def __post_init__(self) -> None:
        if not (
            self.rings > 0
            and self.row_bytes > 0
            and 0 < self.window <= self.ring_rows
            and self.ring_rows * self.row_bytes <= self.ring_stride_bytes
        ):
            raise ValueError(
                f"window: given {self}, expected positive sizes, a window of at most the rows of "
                "a ring, and a stride of at least a ring's bytes"
            )

    @property
    def stored_bytes(self) -> int:
        return self.rings * self.ring_stride_bytes


def snapshot_windows(
    slots: torch.Tensor,
    slot_ids: torch.Tensor,
    positions: torch.Tensor,
    records: torch.Tensor,
    shape: WindowShape,
) -> None:
    """Fill record i with the window before positions[i] of slot slot_ids[i]; all else in it is 0.

    `slot_ids`, `positions`: int64 [copies]. That the slot holds these rows is the caller's to know.
    All tensors are contiguous and on one device. Raises TypeError and ValueError for other types
    and shapes.
    """
    check_windows(slots, slot_ids, records, shape, positions)
    rings = slots[:, : shape.stored_bytes][slot_ids]
    rings = rings.view(-1, shape.rings, shape.ring_stride_bytes)
    used_bytes = shape.ring_rows * shape.row_bytes
    rows = rings[..., :used_bytes].unflatten(-1, (shape.ring_rows, shape.row_bytes))
    kept = _is_in_window(positions, shape)[:, None, :, None]
    records.zero_()
    into = records.view(-1, shape.rings, shape.ring_stride_bytes)[..., :used_bytes]
    into.unflatten(-1, (shape.ring_rows, shape.row_bytes)).copy_(torch.where(kept, rows, 0))


def restore_windows(
    records: torch.Tensor, slots: torch.Tensor, slot_ids: torch.Tensor, shape: WindowShape
) -> None:
    """Write each record over the first bytes of its slot; other bytes of the slots stay.

    `slot_ids`: int64 [copies], none twice. Else as `snapshot_windows`.
    """
    check_windows(slots, slot_ids, records, shape)
    slots[:, : shape.stored_bytes].index_copy_(0, slot_ids, records)


def check_windows(
    slots: torch.Tensor,
    slot_ids: torch.Tensor,
    records: torch.Tensor,
    shape: WindowShape,
    positions: torch.Tensor | None = None,
) -> None:
    """Raise TypeError or ValueError for arguments that do not fit; ids are not looked at."""
    for name, tensor in (("slots", slots), ("records", records)):
        if tensor.dtype != torch.uint8:
            raise TypeError(f"{name}: given {tensor.dtype}, expected torch.uint8")
        if tensor.ndim != 2 or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: given shape {list(tensor.shape)} with strides {list(tensor.stride())}, "
                "expected a contiguous matrix"
            )
    if records.shape[1] != shape.stored_bytes or slots.shape[1] < shape.stored_bytes:
        raise ValueError(
            f"bytes: given {records.shape[1]} of a record and {slots.shape[1]} of a slot, expected "
            f"{shape.stored_bytes} and at least as many"
        )
    for name, numbers in (("slot ids", slot_ids), ("positions", positions)):
        if numbers is None:
            continue
        if numbers.dtype != torch.int64:
            raise TypeError(f"{name}: given {numbers.dtype}, expected torch.int64")
        if numbers.shape != records.shape[:1] or not numbers.is_contiguous():
            raise ValueError(
                f"{name}: given shape {list(numbers.shape)}, expected one for each of "
                f"{len(records)} records"
            )
        if numbers.device != records.device:
            raise ValueError(f"{name}: given on {numbers.device}, expected {records.device}")
    if slots.device != records.device:
        raise ValueError(f"slots: given on {slots.device}, expected {records.device}")


def _is_in_window(positions: torch.Tensor, shape: WindowShape) -> torch.Tensor:
    """bool [copies, ring rows]: row r is of position first + (r - first) mod rows, if of any."""
    firsts = (positions - shape.window).clamp_min(0)[:, None]
    rows = torch.arange(shape.ring_rows, device=positions.device)
    return torch.remainder(rows - firsts, shape.ring_rows) < positions[:, None] - firsts
