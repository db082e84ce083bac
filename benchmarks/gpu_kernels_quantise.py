"""Cases of `gpu_kernels`: rows of the cache, quantised and read back.

Numbers are normal ones. Each call's output is kept until its turn comes again, so that outputs,
too, are written to memory and not over the last ones in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kernels.reference import index_entries, main_entries, window_rows

from .gpu_roofline import Call, Case, Prepared, Workspace

GOAL = 0.85
ROTATIONS_MAX = 32
COMPARED_ROWS = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Parts = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Rows:
    """A kind of row of V4.1-Flash: channels, and bytes in each tensor that it is kept in."""

    name: str
    channels: int
    part_bytes: tuple[int, ...]


KINDS = (
    Rows("main_entries", 512, (288,)),
    Rows("index_entries", 128, (64, 4)),
    Rows("window_rows", 512, (528,)),
)


def quantise_cases() -> Iterator[Case]:
    """A chunk of a prompt, which fits into the L2 cache, and what fills the card."""
    for operation, prepare in (("quantise", _prepare_quantise), ("dequantise", _prepare_back)):
        for kind in KINDS:
            for dtype in DTYPES:
                for values in (2**22, 2**27):
                    rows = values // kind.channels
                    yield Case(
                        operation=f"{operation}_{kind.name}",
                        sizes={"rows": rows, "channels": kind.channels, "dtype": dtype},
                        prepare=partial(prepare, kind, rows, DTYPES[dtype]),
                        goal=GOAL if operation == "quantise" and values > 2**22 else None,
                    )


def _prepare_quantise(kind: Rows, rows: int, dtype: torch.dtype, workspace: Workspace) -> Prepared:
    row_bytes = kind.channels * dtype.itemsize
    rows = min(rows, workspace.size_bytes // row_bytes)
    rotations = min(ROTATIONS_MAX, workspace.size_bytes // (rows * row_bytes))
    numbers = workspace.source[: rotations * rows * row_bytes].view(dtype)
    generator = torch.Generator(workspace.device).manual_seed(0)
    turns = numbers.normal_(generator=generator).view(rotations, rows, kind.channels)
    function = _function(kind, "quantise", workspace.device)
    reference = _function(kind, "quantise", torch.device("cpu"))

    def is_right() -> bool:
        found = _as_parts(function(turns[0]))
        return all(
            all(map(torch.equal, [part[at].cpu() for part in found], _as_parts(expected)))
            for at in _compared(rows)
            for expected in (reference(turns[0][at].cpu()),)
        )

    return Prepared(
        calls=_keeping([partial(function, x) for x in turns]),
        moved_bytes=rows * (row_bytes + sum(kind.part_bytes)),
        is_right=is_right,
    )


def _prepare_back(kind: Rows, rows: int, dtype: torch.dtype, workspace: Workspace) -> Prepared:
    row_bytes = sum(kind.part_bytes)
    rows = min(rows, workspace.size_bytes // (kind.channels * dtype.itemsize))
    rotations = min(ROTATIONS_MAX, workspace.size_bytes // (rows * kind.channels * dtype.itemsize))
    given = workspace.source[: rotations * rows * row_bytes].view(rotations, -1)
    turns = [_parts_of(kind, rows, part) for part in given]
    function = _function(kind, "dequantise", workspace.device)
    reference = _function(kind, "dequantise", torch.device("cpu"))

    def is_right() -> bool:
        found = function(*turns[0], dtype)
        assert isinstance(found, torch.Tensor)
        for at in _compared(rows):
            expected = reference(*(part[at].cpu() for part in turns[0]), dtype)
            assert isinstance(expected, torch.Tensor)
            # Any byte may be a NaN; which of them is left open.
            numbers = ~expected.isnan()
            given = found[at].cpu()
            bits = torch.int32 if dtype == torch.float32 else torch.int16
            if not torch.equal(~given.isnan(), numbers) or not torch.equal(
                given.view(bits)[numbers], expected.view(bits)[numbers]
            ):
                return False
        return True

    return Prepared(
        calls=_keeping([partial(function, *parts, dtype) for parts in turns]),
        moved_bytes=rows * (row_bytes + kind.channels * dtype.itemsize),
        is_right=is_right,
    )


def _function(kind: Rows, operation: str, device: torch.device) -> Callable[..., object]:
    """The operation for the device: of `kernels.gpu` or, on a CPU, of `kernels.reference`."""
    modules: list[object] = [index_entries, main_entries, window_rows]
    if device.type == "cuda":
        from kernels.gpu import index_entries as index_gpu
        from kernels.gpu import main_entries as main_gpu
        from kernels.gpu import window_rows as window_gpu

        modules = [index_gpu, main_gpu, window_gpu]
    name = f"{operation}_{kind.name}"
    found: Callable[..., object] = next(
        getattr(module, name) for module in modules if hasattr(module, name)
    )
    return found


def _parts_of(kind: Rows, rows: int, given: torch.Tensor) -> Parts:
    sizes = [rows * part_bytes for part_bytes in kind.part_bytes]
    return tuple(part.view(rows, -1) for part in torch.split(given, sizes))


def _keeping(calls: list[Call]) -> list[Call]:
    """The same calls, each of which keeps its last output."""
    kept: list[object] = [None] * len(calls)

    def call_and_keep(turn: int) -> None:
        kept[turn] = calls[turn]()

    return [partial(call_and_keep, turn) for turn in range(len(calls))]


def _compared(rows: int) -> list[slice]:
    """The first rows and the last: the reference is slow."""
    return [slice(0, COMPARED_ROWS), slice(max(0, rows - COMPARED_ROWS), rows)]


def _as_parts(found: object) -> Parts:
    if isinstance(found, torch.Tensor):
        return (found,)
    assert isinstance(found, tuple)
    return found
