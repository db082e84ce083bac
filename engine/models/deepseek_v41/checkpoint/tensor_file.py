"""What a safetensors file says it holds, with everything that is wrong with it.

The format: a little-endian u64, that many bytes of JSON (name -> dtype, shape, byte range), then
the bytes, in one piece and without holes. The library that reads the tensors stops at the first
fault; here only headers are read, and every fault of every file is found before anything is loaded.
"""

import math
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from ....errors import ModelFileError
from ..json_file import parse_json
from ..regular_file import open_regular

HEADER_BYTES_MAX = 32 << 20
"""A third of what the format allows; twice what V4.1-Flash would need in a single file."""
DIMENSIONS_MAX = 8
LENGTH = struct.Struct("<Q")
METADATA = "__metadata__"

DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`dtype` as safetensors spells it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def stored_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(slots=True)
class TensorFile:
    """`tensors` are those whose entries are sound, `names` all that are entered.

    `is_readable`: whether the header could be read. `problems` name the file.
    """

    path: Path
    is_readable: bool = False
    names: set[str] = field(default_factory=set)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def note(self, problem: str) -> None:
        self.problems.append(f"{self.path.name}: {problem}")


def read_tensor_file(path: Path) -> TensorFile:
    """Read and check a file's header. Never raises for what is in the file or for its absence."""
    file = TensorFile(path)
    try:
        with open_regular(path) as (stream, size):
            header = _read_header(file, stream.read(LENGTH.size), size)
            text = stream.read(header)
    except ModelFileError as error:
        for problem in error.problems:
            file.note(problem)
        return file
    if header:
        _parse_header(file, text, size - LENGTH.size - header)
    return file


def _read_header(file: TensorFile, start: bytes, size: int) -> int:
    """How many bytes the header has; 0 if that cannot be."""
    if len(start) < LENGTH.size:
        file.note(f"{size} bytes, too short for a safetensors file")
        return 0
    (length,) = LENGTH.unpack(start)
    assert isinstance(length, int)
    if not 2 <= length <= HEADER_BYTES_MAX:
        file.note(f"no safetensors file: header of {length} bytes")
        return 0
    if length > size - LENGTH.size:
        file.note(f"cut off: header of {length} bytes in a file of {size}")
        return 0
    return length


def _parse_header(file: TensorFile, text: bytes, data_bytes: int) -> None:
    try:
        header = parse_json(text)
    except ValueError as error:
        file.note(f"header: {error}")
        return
    file.is_readable = True
    file.names = set(header) - {METADATA}
    ranges = []
    for name, entry in header.items():
        if name == METADATA:
            if not _is_text_map(entry):
                file.note(f"header: {METADATA} is expected to map text to text")
            continue
        problem = _entry_problem(entry)
        if problem:
            file.note(f"{name!r:.120}: {problem}")
            continue
        stored = StoredTensor(entry["dtype"], tuple(entry["shape"]))
        begin, end = entry["data_offsets"]
        if end - begin != stored.stored_bytes:
            expected = stored.stored_bytes
            file.note(f"{name!r:.120}: {end - begin} bytes, expected {expected}")
            continue
        file.tensors[name] = stored
        ranges.append((begin, end))
    if not file.problems:
        _check_ranges(file, sorted(ranges), data_bytes)


def _is_text_map(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _entry_problem(entry: object) -> str | None:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return "expected dtype, shape and data_offsets"
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        return f"dtype {dtype!r:.40} is not known"
    if not _is_sizes(entry["shape"]) or len(entry["shape"]) > DIMENSIONS_MAX:
        return f"shape is expected to be a list of at most {DIMENSIONS_MAX} sizes"
    offsets = entry["data_offsets"]
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return "data_offsets are expected to be a begin and an end"
    return None


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )


def _check_ranges(file: TensorFile, ranges: list[tuple[int, int]], data_bytes: int) -> None:
    end = ranges[-1][1] if ranges else 0
    if end > data_bytes:
        file.note(f"cut off: {data_bytes} bytes of tensors, expected {end}")
    elif end < data_bytes:
        file.note(f"{data_bytes - end} bytes after the last tensor")
    starts_at_0 = not ranges or ranges[0][0] == 0
    if not starts_at_0 or any(later[0] != earlier[1] for earlier, later in pairwise(ranges)):
        file.note("tensors overlap or leave holes")
