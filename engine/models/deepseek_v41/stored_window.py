"""The stored window of a sequence, made where its state slot lies.

On a GPU the record is finished there and stays there (`engine.window_record`): who goes on from it
has it at hand, and who stores it has a mover copy it into the arena. PyTorch's operations are
enough for one window of 1.4 MB; the compiled kernel of `kernels.gpu.window_snapshot` pays for many
at a time.
"""

import torch

from kernels.reference.window_snapshot import WindowShape, snapshot_windows

from .config import DeepseekV41Config
from .layout import StateOffsets


def window_shape(config: DeepseekV41Config, offsets: StateOffsets) -> WindowShape:
    """The encoder's rings as a snapshot sees them."""
    rings = config.decoder_start
    assert offsets.stored_bytes % rings == 0, (offsets.stored_bytes, rings)
    return WindowShape(
        rings=rings,
        ring_rows=config.ring_rows,
        row_bytes=offsets.rings[0].row_bytes,
        ring_stride_bytes=offsets.stored_bytes // rings,
        window=config.window,
    )


def make_record(memory: torch.Tensor, position: int, shape: WindowShape) -> torch.Tensor:
    """The window before `position` as it is stored: uint8 [stored bytes], on `memory`'s device.

    `memory` is the slot, uint8 [state bytes], which must hold those rows.
    """
    record = torch.empty(1, shape.stored_bytes, dtype=torch.uint8, device=memory.device)
    number = torch.zeros(1, dtype=torch.int64, device=memory.device)
    snapshot_windows(memory[None], number, number + position, record, shape)
    return record[0]
