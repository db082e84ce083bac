"""Bytes of a pool or a state slot, for and from the host, whatever memory they lie in.

On the way from and to a GPU they pass through page-locked memory, which is what its copy engines
read and write at full speed; the library keeps such memory for the next time. For a few MB now and
then: blocks in numbers are for `engine.kv`.
"""

from typing import TypeAlias

import numpy as np
import torch

Buffer: TypeAlias = bytes | bytearray | memoryview


def on_host(memory: torch.Tensor) -> torch.Tensor:
    """`memory` itself if it is the host's, else a copy, taken when what the current stream was
    given is done."""
    if memory.device.type == "cpu":
        return memory
    host = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True)
    return host.copy_(memory)


def view_bytes(memory: torch.Tensor) -> memoryview:
    """Bytes of `on_host(memory)`: to be read or copied before `memory` changes."""
    return on_host(memory).numpy().data


def write_bytes(memory: torch.Tensor, data: Buffer) -> None:
    """Put `data` into `memory`, uint8 of as many bytes; `data` is not needed any more then.

    On a GPU it is there for what the current stream is given afterwards; nothing is waited for.
    """
    source = np.frombuffer(data, dtype=np.uint8)
    if memory.device.type == "cpu":
        memory.numpy()[:] = source
        return
    host = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True)
    host.numpy()[:] = source
    # Until it is copied, the library gives this memory to nobody else.
    memory.copy_(host, non_blocking=True)
