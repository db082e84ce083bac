"""Page-locked memory of the host as a CUDA tensor: kernels read and write it over the bus.

Such a view holds no memory of the device. It is for kernels that touch each byte once; everything
else is better served by a copy to the device first.
"""

import ctypes
from functools import cache

import torch

CUDA_SUCCESS = 0


class _DeviceBytes:
    """What torch.as_tensor needs to know of memory at a device address, and the host memory's
    keeper: the tensor that is made from it keeps this object alive."""

    def __init__(self, address: int, host: torch.Tensor) -> None:
        self.host = host
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": tuple(host.shape),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
        }


def device_view(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The bytes of `host` as a tensor of `device`, of the same shape; nothing is copied.

    `host`: uint8, contiguous, not empty, in page-locked memory (of `pin_memory` or
    cudaHostRegister). It must stay page-locked as long as the view or a slice of it is in use.
    What a kernel wrote into it may be read on the host after the kernel has ended (an event, a
    synchronised stream); what the host wrote before a kernel was queued is seen by that kernel.

    Make it once for a whole area (some 10 us) and slice it. Raises TypeError and ValueError for
    other memory, RuntimeError if the driver gives no address for it.
    """
    if host.dtype != torch.uint8:
        raise TypeError(f"host memory: given {host.dtype}, expected torch.uint8")
    if host.device.type != "cpu" or not host.is_contiguous() or not host.numel():
        raise ValueError(
            f"host memory: given {list(host.shape)} of {host.device} with strides "
            f"{list(host.stride())}, expected some contiguous bytes of the host"
        )
    if device.type != "cuda":
        raise ValueError(f"device: given {device}, expected a CUDA device")
    if not host.is_pinned():
        raise ValueError("host memory: given pageable memory, expected page-locked memory")
    with torch.cuda.device(device):
        # A thread that has called nothing of CUDA's runtime yet has no context, which the driver
        # asks for: this call gives it the device's.
        torch.cuda.current_stream(device).query()
        address = _device_address(host.data_ptr())
    view = torch.as_tensor(_DeviceBytes(address, host), device=device)
    assert view.data_ptr() == address, "the view was copied"
    return view


def _device_address(host_address: int) -> int:
    """Where the current device sees an address of page-locked memory.

    Today's machines have one address space for both and give the same number back; asked is
    nevertheless, since a device may not be able to use a host's address of registered memory.
    """
    found = ctypes.c_uint64()
    status = _driver().cuMemHostGetDevicePointer_v2(
        ctypes.byref(found), ctypes.c_void_p(host_address), ctypes.c_uint(0)
    )
    if status != CUDA_SUCCESS:
        raise RuntimeError(
            f"cuMemHostGetDevicePointer: given host memory at {host_address:#x}, "
            f"expected a device address, got CUDA error {status}"
        )
    return found.value


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
