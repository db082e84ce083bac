"""Window state at the end of a block, as it is stored, where it was made: on the device of the
engine. Its way to the host is a mover's, and its bytes are a model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .kv.mover import ComputeMark

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class WindowRecord:
    """`memory`: uint8 [`window_layout.block_bytes`], which nobody writes to any more. It is there
    when `after` is over, and at once for what the stream that made it is given later."""

    memory: torch.Tensor
    after: ComputeMark = None
