"""Tensors of the host on their way to a device that is busy: nothing waits for what it does.

For small ones, such as ids that a pass or a copy needs: blocks in numbers are for `engine.kv`.
"""

import torch

PAGEABLE_COPY_MAX_BYTES = 64 << 10
"""What CUDA copies out of memory that is not page-locked before the call returns, at once; for more
its driver may wait until all that was queued before is done."""


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values`, of the host, on `device`, in the order of its current stream.

    The copy is queued and not waited for; `values` may be written to as soon as this returns. What
    is of some size passes through page-locked memory, which the library keeps until it is copied.
    """
    if device.type == "cuda" and values.nbytes > PAGEABLE_COPY_MAX_BYTES:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
