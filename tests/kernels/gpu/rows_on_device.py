"""Quantised rows on a CUDA device or, from the same generated source, on the CPU.

Each check compares with the reference in `kernels.reference`, which the tests beside this folder
hold to golden vectors and to exact arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from kernels.gpu.compiler import Program
from kernels.gpu.quantised_rows import (
    LANE_WORDS,
    PIECES,
    THREADS,
    VECTOR_BYTES,
    RowFormat,
    RowLayout,
    dequantise_program,
    quantise_program,
)
from tests.kernels.gpu.cuda_on_cpu import run_on_cpu

Parts = tuple[torch.Tensor, ...]
"""The bytes of rows: one tensor, or data and scales."""

DEVICES = [
    pytest.param("cpu", id="generated-source-on-cpu"),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
DTYPES = [torch.float32, torch.bfloat16]
POISON = 0xA5


@dataclass(frozen=True)
class Kind:
    """One kind of row: its kernels, its reference, and the channels of V4.1-Flash."""

    row_format: RowFormat
    row_layout: Callable[[int], RowLayout]
    quantise: Callable[[torch.Tensor], torch.Tensor | Parts]
    dequantise: Callable[..., torch.Tensor]
    reference_quantise: Callable[[torch.Tensor], torch.Tensor | Parts]
    reference_dequantise: Callable[..., torch.Tensor]
    channels: int

    def rows_of_groups(self, groups: torch.Tensor, channels: int | None = None) -> torch.Tensor:
        """[rows, channels] of [n, group], the last row filled up with zeros."""
        channels = channels or self.channels
        missing = -groups.numel() % channels
        return torch.cat([groups.flatten(), groups.new_zeros(missing)]).view(-1, channels)


def check_quantise(kind: Kind, x: torch.Tensor, device: str) -> None:
    """The bytes of x [rows, C] are those of the reference."""
    expected = as_parts(kind.reference_quantise(x))
    found = quantise_on(kind, x, device)
    assert len(found) == len(expected)
    for part, expected_part in zip(found, expected, strict=True):
        assert part.shape == expected_part.shape
        rows = (part != expected_part).flatten(1).any(1).nonzero().flatten()
        assert rows.tolist() == []


def check_dequantise(kind: Kind, parts: Parts, dtype: torch.dtype, device: str) -> None:
    """The numbers of the bytes of rows are those of the reference, or NaN where those are."""
    expected = kind.reference_dequantise(*parts, dtype)
    found = dequantise_on(kind, parts, dtype, device)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    assert torch.equal(found.isnan(), expected.isnan())
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    differ = (found.view(bits) != expected.view(bits)) & ~expected.isnan()
    assert differ.any(1).nonzero().flatten().tolist() == []


def quantise_on(kind: Kind, x: torch.Tensor, device: str) -> Parts:
    if device == "cuda":
        return tuple(part.cpu() for part in as_parts(kind.quantise(x.cuda())))
    layout = kind.row_layout(x.shape[1])
    codes = poisoned(len(x), layout.codes_stride)
    is_apart = layout.scales_start == 0
    scales = poisoned(len(x), layout.scales_stride) if is_apart else codes
    run_on_cpu(
        program("quantise", kind, layout, x.dtype == torch.bfloat16),
        (blocks_of(x.numel() * x.element_size() // (4 * LANE_WORDS)),),
        x=x.contiguous().view(torch.int32),
        codes=codes,
        scales=scales,
        rows=len(x),
    )
    return (codes, scales) if is_apart else (codes,)


def dequantise_on(kind: Kind, parts: Parts, dtype: torch.dtype, device: str) -> torch.Tensor:
    if device == "cuda":
        return kind.dequantise(*(part.cuda() for part in parts), dtype).cpu()
    channels = kind.reference_dequantise(*(part[:0] for part in parts), dtype).shape[-1]
    out = torch.full((len(parts[0]), channels), 7, dtype=dtype)
    run_on_cpu(
        program("dequantise", kind, kind.row_layout(channels), dtype == torch.bfloat16),
        (blocks_of(out.numel() * out.element_size() // VECTOR_BYTES),),
        codes=parts[0],
        scales=parts[-1],
        out=out,
        rows=len(out),
    )
    return out


@cache
def program(operation: str, kind: Kind, layout: RowLayout, is_short: bool) -> Program:
    make = quantise_program if operation == "quantise" else dequantise_program
    return make(kind.row_format, layout, is_short)


def blocks_of(lanes: int) -> int:
    return -(-lanes // (THREADS * PIECES))


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=torch.uint8)


def as_parts(found: torch.Tensor | Parts) -> Parts:
    return (found,) if isinstance(found, torch.Tensor) else found


def random_bits(rows: int, channels: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of any numbers of a type, most of them far from each other; some are no numbers."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (rows, channels), generator=generator)
    if dtype == torch.float32:
        return bits.int().view(torch.float32)
    return (bits >> 16).short().view(torch.bfloat16)


def random_numbers(rows: int, channels: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of normal numbers, of another magnitude each."""
    generator = torch.Generator().manual_seed(seed)
    spread = (8 * torch.randn(rows, 1, generator=generator)).exp()
    return (torch.randn(rows, channels, generator=generator) * spread).to(dtype)


def random_bytes(parts: Parts, seed: int = 0) -> Parts:
    """Parts of the same shapes with any bytes."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randint(0, 256, part.shape, generator=generator).to(torch.uint8) for part in parts
    )


def special_groups(group_channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of both signs, subnormal and largest numbers, infinities and NaN, alone and mixed."""
    info = torch.finfo(dtype)
    values = [0.0, -0.0, info.smallest_normal, -info.smallest_normal, info.max, -info.max]
    # Some are below what a format keeps, some saturate; 2^-133 is the least of bfloat16.
    values += [2.0**-133, -(2.0**-133), 2.0**-127, 2.0**-20, -1e-4, 2688.0, 2689.0, -1e6, 448.0]
    values += [torch.inf, -torch.inf, torch.nan]
    groups = []
    for value in values:
        alone, mixed = torch.zeros(group_channels), torch.linspace(-6, 6, group_channels)
        alone[3], mixed[5] = value, value
        groups += [alone, mixed, torch.full((group_channels,), value)]
    return torch.stack(groups).to(dtype)
