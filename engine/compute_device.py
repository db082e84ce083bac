"""The device that a model is computed on: which one, with what arithmetic, by which operations."""

import logging
import os
from collections.abc import Mapping

import torch

from kernels.cuda.operations import CUDA_OPERATIONS
from kernels.operations import REFERENCE, Operations
from kvstore.errors import shown

from .errors import InvalidRequest
from .kv.device_errors import DEVICE_ERRORS, device_error
from .kv.mover import first_line
from .models.deepseek_v41.config import DeepseekV41Config

log = logging.getLogger(__name__)

TF32_OVERRIDE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
FULL_PRECISIONS = ("none", "ieee")
"""Of PyTorch's setting for float32 products; "none" is its own default, which is full float32."""


def choose_device(name: str) -> torch.device:
    """The device of that name, with its number. Raises InvalidRequest if there is none."""
    expected = "cpu, cuda, or cuda: and the number of a device that is there"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidRequest("device", given=shown(name), expected=expected) from error
    if device == torch.device("cpu"):
        return device
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # The library takes any number, and keeps 8 bits of it.
    is_named = device.type == "cuda" and str(device) == name
    if not is_named or (device.index or 0) >= devices:
        given = f"{name!r}; {devices} CUDA devices are there"
        raise InvalidRequest("device", given=given, expected=expected)
    return torch.device("cuda", device.index or 0)


def refuse_short_products(
    device: torch.device, environment: Mapping[str, str] = os.environ
) -> None:
    """Raise InvalidRequest if a GPU would multiply float32 numbers as TF32, which has 10 bits of
    mantissa: index scores would not be exact, and caches would differ under one namespace."""
    if device.type == "cpu":
        return
    precision = torch.backends.cuda.matmul.fp32_precision
    if environment.get(TF32_OVERRIDE) == "1":  # PyTorch takes no other value for a yes
        given = f"TF32, by {TF32_OVERRIDE}=1"
    elif precision not in FULL_PRECISIONS:
        given = f"{precision}, by torch.backends.cuda.matmul.fp32_precision or allow_tf32"
    else:
        return
    raise InvalidRequest("float32 products on a GPU", given=given, expected="full float32")


def name_arithmetic(compute: str, device: torch.device) -> str:
    """What last bits of a cache depend on, beside the model, for the namespace of its blocks.

    `compute`: the type that matrices run in. On a GPU also the kind of card (its capability and
    number of multiprocessors) and the releases of PyTorch and CUDA: by these the library chooses
    its products, and a hit has to give the bits of a cold run.
    """
    if device.type == "cpu":
        return compute
    card = torch.cuda.get_device_properties(device)
    torch_release = ".".join(torch.__version__.split(".")[:2])
    return (
        f"{compute} cuda sm{card.major}{card.minor}x{card.multi_processor_count} "
        f"torch{torch_release} cuda{torch.version.cuda}"
    )


def operations_for(device: torch.device, config: DeepseekV41Config) -> Operations:
    """The back end for a device. On a GPU bytes of cache rows are made by compiled kernels, which
    are compiled here, before any pass; where they cannot be, by PyTorch's operations. Raises
    DeviceFull, DeviceLost."""
    if device.type == "cpu":
        return REFERENCE
    try:
        # Here: TileLang is an optional package, and takes seconds to import.
        from kernels.gpu.operations import COMPILED_OPERATIONS, compile_ahead

        compile_ahead(device, entry_channels=config.head_dim, index_channels=config.index_dim)
    except DEVICE_ERRORS as error:
        raise device_error(error) from error
    except (ImportError, RuntimeError, OSError) as error:
        log.warning(
            "rows of the cache are made by PyTorch's own operations, the same bytes in more time; "
            "compiled kernels need the extra gpu, nvcc (or nvidia-cuda-nvcc) and a C compiler: %s",
            first_line(error),
        )
        return CUDA_OPERATIONS
    return COMPILED_OPERATIONS
