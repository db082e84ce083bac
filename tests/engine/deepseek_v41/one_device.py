"""Watches that operations keep to one device, with torch's "meta" device in the place of a GPU.

A meta tensor has a shape and a device and no values, so whatever asks for values that a GPU would
have to be waited for, fails; and every operation that is given tensors of two devices is refused
here, also those where the library would help itself with a copy.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
HOST = torch.device("cpu")


class OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`calls` counts what was computed on the device, by operation, and `copies_in` the tensors
    that came from the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.copies_in = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        name = func._schema.name
        given = devices_of((args, kwargs))
        is_copy_in = name == "aten::copy_" and args[0].device == DEVICE and args[1].device == HOST
        if len(given) > 1 and not is_copy_in:
            raise AssertionError(f"{name} was given tensors of {given}")
        result = func(*args, **(kwargs or {}))
        made = devices_of(result)
        if given == {DEVICE} and made == {HOST}:
            raise AssertionError(f"{name} takes values from the device")
        if is_copy_in or (given == {HOST} and made == {DEVICE}):
            self.copies_in += 1
        elif DEVICE in made:
            self.calls[name] += 1
        return result


def devices_of(tree: Any) -> set[torch.device]:  # noqa: ANN401
    return {leaf.device for leaf in tree_leaves(tree) if torch.is_tensor(leaf)}
