"""What PyTorch makes of a division by a number on a GPU, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class GpuDivision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, a float32 tensor divided by a number of Python's is multiplied with the inverse of
    that number, rounded to float32: so do the kernels of a GPU, and differ from a quotient in the
    last bit. Divisions by tensors stay what they are, there as here. Nothing else is imitated.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        name = func._schema.name
        is_division = name in ("aten::div", "aten::div_") and "rounding_mode" not in kwargs
        if not is_division or torch.is_tensor(args[1]) or args[0].dtype != torch.float32:
            return func(*args, **kwargs)
        inverse = (torch.ones(()) / torch.tensor(args[1], dtype=torch.float32)).item()
        multiply = torch.ops.aten.mul_ if name.endswith("_") else torch.ops.aten.mul
        return multiply.Tensor(args[0], inverse)
