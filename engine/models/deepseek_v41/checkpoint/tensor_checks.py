"""What keeps a set of tensors from being the weights of a model: names, shapes, types, values."""

from collections.abc import Container, Iterator, Mapping

import torch

from .tensor_file import StoredTensor
from .tensor_schema import Storage, TensorSpec, scale_name

PLAIN_DTYPES = ("BF16", "F32")
SCALE_DTYPE = "F8_E8M0"
PACKED_DTYPES = {
    Storage.FP8_BLOCKS: "F8_E4M3",
    Storage.FP4_ROWS: "I8",
    Storage.FP8_ROWS: "F8_E4M3",
}
DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: SCALE_DTYPE,
    torch.int8: "I8",
}

SCALE_CODE_MAX = 127 + 119
"""2^119 x 448 is the last product that float32 can hold; no quantiser writes a scale above, and
code 255 is NaN."""
VALUES_AT_ONCE = 1 << 22


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, StoredTensor]:
    """Tensors in memory as a file would tell of them."""
    return {
        name: StoredTensor(DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def find_tensor_problems(
    schema: Mapping[str, TensorSpec], stored: Mapping[str, StoredTensor]
) -> list[str]:
    """Every name, shape and dtype that `schema` does not allow, in words; empty if all fit."""
    return [*find_unfit(schema, stored), *find_missing(schema, stored, stored.keys())]


def find_unfit(schema: Mapping[str, TensorSpec], stored: Mapping[str, StoredTensor]) -> list[str]:
    """Tensors that are unknown, misshapen or of a wrong type, and scales that do not fit theirs."""
    scales = {scale_name(name) for name, spec in schema.items() if spec.may_be_quantised}
    unknown = stored.keys() - schema.keys() - scales
    found = [f"unknown tensor {name!r:.120}" for name in sorted(unknown)]
    for name, spec in schema.items():
        if name in stored:
            found += _unfit(name, spec, stored)
    return found


def find_missing(
    schema: Mapping[str, TensorSpec], stored: Mapping[str, StoredTensor], names: Container[str]
) -> list[str]:
    """Tensors of `schema`, and scales of quantised ones, that are not among `names`."""
    found = []
    for name, spec in schema.items():
        scale = scale_name(name)
        if name not in names:
            found.append(f"missing tensor {name}")
            if spec.may_be_quantised and scale in names:
                found.append(f"{scale}: a scale without its tensor")
        elif name in stored and _is_packed(spec, stored[name]) and scale not in names:
            found.append(f"missing tensor {scale}, the scale of {name}")
    return found


def _is_packed(spec: TensorSpec, tensor: StoredTensor) -> bool:
    return spec.may_be_quantised and tensor.dtype == PACKED_DTYPES[spec.storage]


def _unfit(name: str, spec: TensorSpec, stored: Mapping[str, StoredTensor]) -> Iterator[str]:
    tensor = stored[name]
    scale = stored.get(scale_name(name)) if spec.may_be_quantised else None
    is_packed = _is_packed(spec, tensor)
    expected = spec.packed_shape if is_packed else spec.shape
    if not is_packed and not _is_plain(spec, tensor.dtype):
        yield f"{name}: dtype {tensor.dtype}, expected {_expected_dtypes(spec)}"
    elif tensor.shape != expected:
        yield f"{name}: shape {list(tensor.shape)}, expected {list(expected)}"
    elif is_packed and not spec.fits_quantised:
        yield f"{name}: {spec.shape[-1]} channels cannot be stored as {spec.storage.value}"
    if scale is None:
        return
    if not is_packed:
        yield f"{scale_name(name)}: a scale beside a tensor that is not quantised"
    elif scale.dtype != SCALE_DTYPE:
        yield f"{scale_name(name)}: dtype {scale.dtype}, expected {SCALE_DTYPE}"
    elif scale.shape != spec.scale_shape:
        shape = list(scale.shape)
        yield f"{scale_name(name)}: shape {shape}, expected {list(spec.scale_shape)}"


def _is_plain(spec: TensorSpec, dtype: str) -> bool:
    return dtype == "F32" or (dtype == "BF16" and spec.storage is not Storage.FLOAT32)


def _expected_dtypes(spec: TensorSpec) -> str:
    if spec.storage is Storage.FLOAT32:
        return "F32"
    packed = [PACKED_DTYPES[spec.storage]] if spec.may_be_quantised else []
    return " or ".join([*PLAIN_DTYPES, *packed])


def find_value_problems(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Every tensor with infinity or NaN, or with scales that are none; reads all of them."""
    found = []
    for name, tensor in tensors.items():
        bad = sum(_count_bad(part) for part in tensor.flatten().split(VALUES_AT_ONCE))
        if bad:
            what = "scales are" if tensor.dtype == torch.float8_e8m0fnu else "values are"
            found.append(f"{name}: {bad} of {tensor.numel()} {what} NaN, infinite or out of range")
    return found


def _count_bad(values: torch.Tensor) -> int:
    if values.dtype == torch.int8:
        return 0
    if values.dtype == torch.float8_e8m0fnu:
        return int((values.view(torch.uint8) > SCALE_CODE_MAX).sum())
    if values.dtype == torch.float8_e4m3fn:
        # The one NaN of e4m3, of either sign; there is no infinity.
        return int(((values.view(torch.uint8) & 0x7F) == 0x7F).sum())
    return int((~values.isfinite()).sum())
