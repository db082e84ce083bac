"""Arrays of a compressed numpy file, each checked to be of the type and shape that is needed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .command import InvalidInput, reading

TEXT = "U"
"""Kind of arrays of str, of whatever length."""


def read_arrays(
    path: Path, wanted: Mapping[str, tuple[str, int]], *, source: str
) -> dict[str, NDArray[Any]]:
    """The arrays `wanted`: by name the type, "uint16" or TEXT, and the number of dimensions.

    `source` names the program that writes such files. Raises InvalidInput with the file's name.
    """
    expected = f"what {source} writes"
    with reading("arrays", path, expected=expected):
        arrays = _read_present(path, wanted)
    missing = [name for name in wanted if name not in arrays]
    if missing:
        given = f"no {', '.join(missing)}"
        raise InvalidInput(f"arrays {path}", given=given, expected=expected)
    for name, (kind, dimensions) in wanted.items():
        array = arrays[name]
        is_of_kind = array.dtype.kind == TEXT if kind == TEXT else array.dtype == kind
        if not is_of_kind or array.ndim != dimensions:
            given = f"{name} as {array.dtype} of {array.ndim} dimension(s)"
            needed = f"{'str' if kind == TEXT else kind} of {dimensions}, {expected}"
            raise InvalidInput(f"arrays {path}", given=given, expected=needed)
    return arrays


def _read_present(path: Path, wanted: Mapping[str, object]) -> dict[str, NDArray[Any]]:
    # Of a file that it opened itself, the library leaves some open that it cannot read.
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in wanted if name in arrays}
