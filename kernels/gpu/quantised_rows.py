"""How rows are quantised and read back on a CUDA device, whatever their format.

A lane is a thread with 32 bytes of a row to quantise, or with 16 bytes of one to write back:
neighbours of a warp have neighbouring bytes, and every access to full numbers is of 16 bytes. Lanes
of one group tell each other their largest magnitude by shuffles. Nothing passes through shared
memory. A thread has `PIECES` lanes' work, far apart, and asks for all of its input before it
computes, because what bounds these kernels is how many bytes are on their way.

Not for the arithmetic of a format: `fp4`, `fp8` and the module of each kind of row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import tilelang.language as T
import torch
from tilelang import PassConfigKey

from .compiler import Program, launcher
from .fp8 import Expression, Registers

THREADS = 128
PIECES = 2
LANE_WORDS = 8
VECTOR_BYTES = 16
NUMBERS_MAX = 2**32
"""Of one call, so that lanes are counted in int32."""
SHORT_SIGNLESS, SIGNLESS = 0x7FFF7FFF, 0x7FFFFFFF
HIGH_HALF = 0xFFFF0000
TYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, eq=False)
class RowFormat:
    """A kind of row, as the programs need to know it.

    `encode`: a macro (words, magnitudes, top, numbers, codes, scale, is_short) that makes the
    codes of a lane, a byte each element of `codes`, and the code of its group's scale in scale[0].
    `decode`: a macro (codes, numbers) that gives the float32 values of codes. `decode_scale`: the
    float32 value of a scale's code.
    """

    group_channels: int
    channels_of_byte: int
    encode: Callable[..., None]
    decode: Callable[..., None]
    decode_scale: Callable[[Expression], Expression]


@dataclass(frozen=True)
class RowLayout:
    """Where the bytes of rows of C channels lie in two tensors [rows, *_stride], or one twice."""

    channels: int
    codes_stride: int
    scales_stride: int
    scales_start: int


def quantise(
    row_format: RowFormat,
    layout: RowLayout,
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Write the bytes of x [..., C] into codes and scales, contiguous uint8 tensors."""
    x = x.detach().reshape(-1, layout.channels).contiguous()
    if x.data_ptr() % VECTOR_BYTES:
        x = x.clone()
    if len(x):
        kernel = launcher(
            quantise_program,
            row_format,
            layout,
            x.dtype == torch.bfloat16,
            device_index=x.get_device(),
        )
        kernel(
            x.view(torch.int32),
            codes.view(-1, layout.codes_stride),
            scales.view(-1, layout.scales_stride),
        )


def dequantise(
    row_format: RowFormat,
    layout: RowLayout,
    codes: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[rows, C] in `dtype` of contiguous uint8 tensors [rows, stride]."""
    check_count("rows", len(codes) * layout.channels)
    out = torch.empty(len(codes), layout.channels, dtype=dtype, device=codes.device)
    if len(out):
        kernel = launcher(
            dequantise_program,
            row_format,
            layout,
            dtype == torch.bfloat16,
            device_index=codes.get_device(),
        )
        kernel(codes, scales, out)
    return out


def aligned_rows(rows: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, bytes] of [..., bytes], contiguous and at a whole vector; a copy if need be."""
    rows = rows.reshape(-1, rows.shape[-1]).contiguous()
    return rows.clone() if rows.data_ptr() % VECTOR_BYTES else rows


def check_numbers(x: torch.Tensor, group_channels: int) -> None:
    """Raise TypeError or ValueError unless x [..., C] is something to quantise here."""
    check_dtype("x", x.dtype)
    if x.dim() == 0 or x.shape[-1] == 0 or x.shape[-1] % group_channels:
        raise ValueError(
            f"x: given shape {list(x.shape)}, expected a multiple of {group_channels} channels last"
        )
    check_device("x", x)
    check_count("x", x.numel())


def check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in TYPE_NAMES:
        raise TypeError(f"{name}: given {dtype}, expected torch.float32 or torch.bfloat16")


def check_count(name: str, numbers: int) -> None:
    if numbers > NUMBERS_MAX:
        raise ValueError(f"{name}: given {numbers} numbers, expected at most {NUMBERS_MAX}")


def check_device(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_cuda:
        raise ValueError(
            f"{name}: given a tensor on {tensor.device}, expected one on a CUDA device"
        )


def quantise_program(row_format: RowFormat, layout: RowLayout, is_short: bool) -> Program:
    """TileLang program: x [rows, C] as int32 words of float32, or of bfloat16 if it is short."""
    channels_of_lane = LANE_WORDS * (2 if is_short else 1)
    lanes_of_row = layout.channels // channels_of_lane
    lanes_of_group = row_format.group_channels // channels_of_lane
    code_bytes = channels_of_lane // row_format.channels_of_byte
    vector = gcd(layout.codes_stride, code_bytes)
    rows = T.dynamic("rows")

    @T.prim_func
    def main(
        x: T.Tensor((rows, lanes_of_row * LANE_WORDS), "int32"),
        codes: T.Tensor((rows, layout.codes_stride), "uint8"),
        scales: T.Tensor((rows, layout.scales_stride), "uint8"),
    ) -> None:
        # The lanes of all threads are bounded by hand: loads by the last lane, stores by a branch.
        T.annotate_pass_configs({PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True})
        lanes = rows * lanes_of_row
        with T.Kernel(T.ceildiv(lanes, THREADS * PIECES), threads=THREADS) as block:
            given = T.alloc_local((PIECES, LANE_WORDS), "int32")
            words = T.alloc_local((LANE_WORDS,), "uint32")
            magnitudes = T.alloc_local((LANE_WORDS,), "uint32")
            numbers = T.alloc_local((channels_of_lane,), "float32")
            made = T.alloc_local((code_bytes,), "uint8")
            scale = T.alloc_local((1,), "uint8")
            first = block * (THREADS * PIECES) + T.get_thread_binding()
            for piece in T.unroll(PIECES):
                lane = T.min(first + piece * THREADS, lanes - 1)
                row, place = lane // lanes_of_row, lane % lanes_of_row
                for half in T.unroll(2):
                    for v in T.vectorized(4):
                        given[piece, half * 4 + v] = x[row, place * LANE_WORDS + half * 4 + v]
            for piece in T.unroll(PIECES):
                for at in T.unroll(LANE_WORDS):
                    words[at] = T.cast(given[piece, at], "uint32")
                    magnitudes[at] = words[at] & T.uint32(SHORT_SIGNLESS if is_short else SIGNLESS)
                top = find_top(magnitudes, lanes_of_group, is_short)
                row_format.encode(words, magnitudes, top, numbers, made, scale, is_short)
                lane = first + piece * THREADS
                if lane < lanes:
                    row, place = lane // lanes_of_row, lane % lanes_of_row
                    for part in T.unroll(code_bytes // vector):
                        for v in T.vectorized(vector):
                            codes[row, place * code_bytes + part * vector + v] = made[
                                part * vector + v
                            ]
                    if place % lanes_of_group == 0:
                        scales[row, layout.scales_start + place // lanes_of_group] = scale[0]

    return main


def dequantise_program(row_format: RowFormat, layout: RowLayout, is_short: bool) -> Program:
    """TileLang program: out [rows, C] in float32, or in bfloat16 if it is short."""
    channels_of_lane = VECTOR_BYTES // (2 if is_short else 4)
    lanes_of_row = layout.channels // channels_of_lane
    lanes_of_group = row_format.group_channels // channels_of_lane
    code_bytes = channels_of_lane // row_format.channels_of_byte
    vector = gcd(layout.codes_stride, code_bytes)
    out_type = "bfloat16" if is_short else "float32"
    rows = T.dynamic("rows")

    @T.prim_func
    def main(
        codes: T.Tensor((rows, layout.codes_stride), "uint8"),
        scales: T.Tensor((rows, layout.scales_stride), "uint8"),
        out: T.Tensor((rows, layout.channels), out_type),
    ) -> None:
        T.annotate_pass_configs({PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True})
        lanes = rows * lanes_of_row
        with T.Kernel(T.ceildiv(lanes, THREADS * PIECES), threads=THREADS) as block:
            given = T.alloc_local((PIECES, code_bytes), "uint8")
            scale_codes = T.alloc_local((PIECES,), "uint8")
            one = T.alloc_local((code_bytes,), "uint8")
            numbers = T.alloc_local((channels_of_lane,), "float32")
            made = T.alloc_local((channels_of_lane,), out_type)
            first = block * (THREADS * PIECES) + T.get_thread_binding()
            for piece in T.unroll(PIECES):
                lane = T.min(first + piece * THREADS, lanes - 1)
                row, place = lane // lanes_of_row, lane % lanes_of_row
                for part in T.unroll(code_bytes // vector):
                    for v in T.vectorized(vector):
                        given[piece, part * vector + v] = codes[
                            row, place * code_bytes + part * vector + v
                        ]
                scale_codes[piece] = scales[row, layout.scales_start + place // lanes_of_group]
            for piece in T.unroll(PIECES):
                for at in T.unroll(code_bytes):
                    one[at] = given[piece, at]
                row_format.decode(one, numbers)
                scale = row_format.decode_scale(T.cast(scale_codes[piece], "uint32"))
                for channel in T.unroll(channels_of_lane):
                    numbers[channel] = T.ieee_mul(numbers[channel], scale)
                for v in T.vectorized(channels_of_lane):
                    made[v] = T.cast(numbers[v], out_type)
                lane = first + piece * THREADS
                if lane < lanes:
                    row, place = lane // lanes_of_row, lane % lanes_of_row
                    for v in T.vectorized(channels_of_lane):
                        out[row, place * channels_of_lane + v] = made[v]

    return main


@T.macro
def find_top(magnitudes: Registers, lanes_of_group: int, is_short: bool) -> Expression:
    """The largest of the float32 bits, without signs, of a group, in each of its lanes."""
    top = T.alloc_var("uint32")
    top = magnitudes[0]
    for at in T.unroll(1, LANE_WORDS):
        top = larger(top, magnitudes[at], is_short)
    if is_short:
        top = T.max(top << T.uint32(16), top & T.uint32(HIGH_HALF))
    for step in T.unroll(lanes_of_group.bit_length() - 1):
        top = T.max(top, T.shfl_xor(top, 1 << step))
    return top


def larger(a: Expression, b: Expression, is_short: bool) -> Expression:
    """The larger of two words without a sign; of each half its own if they are short."""
    return T.call_extern("uint32", "__vmaxu2", a, b) if is_short else T.max(a, b)


def smaller(a: Expression, b: Expression, is_short: bool) -> Expression:
    """As `larger`."""
    return T.call_extern("uint32", "__vminu2", a, b) if is_short else T.min(a, b)


@T.macro
def unpack(magnitudes: Registers, numbers: Registers, is_short: bool) -> None:
    """float32 values of the words of a lane."""
    for at in T.unroll(LANE_WORDS):
        if is_short:
            numbers[2 * at] = T.reinterpret(magnitudes[at] << T.uint32(16), "float32")
            numbers[2 * at + 1] = T.reinterpret(magnitudes[at] & T.uint32(HIGH_HALF), "float32")
        else:
            numbers[at] = T.reinterpret(magnitudes[at], "float32")
