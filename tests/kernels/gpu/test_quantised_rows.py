"""What holds for all kinds of quantised rows on a GPU: the source they become, and their doors."""

import re
from collections.abc import Callable

import pytest
import torch

from kernels.gpu import index_entries, main_entries, window_rows
from kernels.gpu.compiler import lower_to_cuda
from kernels.gpu.quantised_rows import check_count, dequantise_program, quantise_program
from kernels.reference import main_entries as reference
from tests.kernels.gpu.cuda_on_cpu import ARCHITECTURES

KINDS = {
    "main": (main_entries.FORMAT, main_entries.row_layout(512)),
    "index": (index_entries.FORMAT, index_entries.row_layout(128)),
    "window": (window_rows.FORMAT, window_rows.row_layout(512)),
}
STORES = {
    ("main", False): "uint",
    ("main", True): "uint2",
    ("index", False): "uint",
    ("index", True): "uint2",
    ("window", False): "uint2",
    ("window", True): "uint4",
}
"""The vector that the codes of a lane, 32 bytes of numbers, are stored as."""

# Spelled or not, float arithmetic that a flag may change: none but the intrinsics that round once.
INEXACT = re.compile(r"__fdividef|__expf|__saturatef|rsqrt|approx|\bhalf_t\b")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("is_short", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_quantised_with_whole_vectors(kind: str, is_short: bool, arch: str) -> None:
    source = lower_to_cuda(quantise_program(*KINDS[kind], is_short), arch)
    assert accesses(source, "x", r"=\s*\*\((\w+)\*\)\(x \+") == {"int4"}
    assert accesses(source, "codes", r"^\s*\*\((\w+)\*\)\(codes \+") == {STORES[kind, is_short]}
    assert "__shared__" not in source
    assert INEXACT.search(source) is None


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("is_short", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_written_back_as_whole_vectors(kind: str, is_short: bool, arch: str) -> None:
    source = lower_to_cuda(dequantise_program(*KINDS[kind], is_short), arch)
    vector = "uint4" if is_short else "float4"
    assert accesses(source, "out", r"^\s*\*\((\w+)\*\)\(out \+") == {vector}
    assert INEXACT.search(source) is None


def accesses(source: str, tensor: str, pattern: str) -> set[str]:
    """The vector types by which a tensor is accessed; nothing else of it is used."""
    found = re.findall(pattern, source, flags=re.MULTILINE)
    body = source[source.index("#pragma unroll") :]
    assert len(re.findall(rf"(?<![.\w]){tensor}\b", body)) == len(found)
    return set(found)


Function = Callable[..., object]

QUANTISE: list[tuple[Function, int]] = [
    (main_entries.quantise_main_entries, 16),
    (index_entries.quantise_index_entries, 32),
    (index_entries.round_index_entries, 32),
    (window_rows.quantise_window_rows, 32),
]
DEQUANTISE: list[tuple[Function, tuple[int, ...]]] = [
    (main_entries.dequantise_main_entries, (36,)),
    (index_entries.dequantise_index_entries, (32, 2)),
    (window_rows.dequantise_window_rows, (66,)),
]
"""Bytes of 64 channels in each tensor."""


@pytest.mark.parametrize(("function", "group"), QUANTISE)
def test_numbers_of_other_types_shapes_or_places_are_refused(
    function: Function, group: int
) -> None:
    for dtype in (torch.float64, torch.float16, torch.int32):
        with pytest.raises(TypeError, match=f"x: given {dtype}, expected torch.float32 or"):
            function(torch.zeros(2, 64, dtype=dtype))
    for shape in ((), (2, 0), (2, group - 8), (2, group + 8)):
        with pytest.raises(ValueError, match=f"x: given shape .*expected a multiple of {group} "):
            function(torch.zeros(shape))
    with pytest.raises(ValueError, match="x: given a tensor on cpu, expected one on a CUDA"):
        function(torch.zeros(2, 64))


@pytest.mark.parametrize(("function", "widths"), DEQUANTISE)
def test_rows_of_other_types_sizes_or_places_are_refused(
    function: Function, widths: tuple[int, ...]
) -> None:
    rows = [torch.zeros(2, width, dtype=torch.uint8) for width in widths]
    with pytest.raises(TypeError, match=r"dtype: given torch.float16, expected torch.float32 or"):
        function(*rows, torch.float16)
    for wrong in (rows[0][:, :-1], rows[0][:, :0], rows[0].int()):
        with pytest.raises(ValueError, match=r"expected uint8 \[\.\.\., "):
            function(wrong, *rows[1:])
    with pytest.raises(ValueError, match="given a tensor on cpu, expected one on a CUDA device"):
        function(*rows)


def test_more_numbers_than_a_call_can_count_are_refused() -> None:
    check_count("x", 2**32)
    with pytest.raises(ValueError, match="x: given 4294967297 numbers, expected at most"):
        check_count("x", 2**32 + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("leading", [(), (0,), (1,), (2, 3, 5)])
def test_rows_have_the_leading_dimensions_of_their_numbers(leading: tuple[int, ...]) -> None:
    wide = torch.randn(*leading, 3 * 64, device="cuda")
    x = wide[..., 64:128]
    rows = main_entries.quantise_main_entries(x)
    assert torch.equal(rows.cpu(), reference.quantise_main_entries(x.cpu()))
    inside = torch.zeros(*leading, 100, dtype=torch.uint8, device="cuda")[..., 7:43]
    inside.copy_(rows)
    found = main_entries.dequantise_main_entries(inside)
    assert torch.equal(found.cpu(), reference.dequantise_main_entries(rows.cpu()))
