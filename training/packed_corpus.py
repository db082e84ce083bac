"""Reading what `training.pack` wrote, with numpy alone: where there is no tokenizer library."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .corpus import Side


@dataclass(frozen=True)
class PackedSide:
    """One side: see the docstring of `training.pack`."""

    ids: NDArray[np.uint16]
    starts: NDArray[np.int64]
    sizes_bytes: NDArray[np.int64]
    paths: list[str]

    def document(self, index: int) -> NDArray[np.uint16]:
        """Ids of one document, from BOS to EOS."""
        return self.ids[self.starts[index] : self.starts[index + 1]]


def read_packed_side(path: Path, side: Side) -> PackedSide:
    """One side of a packed corpus, checked against its own borders.

    Raises ValueError if the borders do not fit the ids or the file is of another kind.
    """
    with np.load(path, allow_pickle=False) as arrays:
        names = ("ids", "starts", "bytes", "paths")
        missing = [name for name in names if f"{side.value}_{name}" not in arrays]
        if missing:
            raise ValueError(f"packed corpus {path}: has no {side.value} {', '.join(missing)}")
        ids, starts, sizes, paths = (arrays[f"{side.value}_{name}"] for name in names)
    is_whole = len(starts) == len(sizes) + 1 == len(paths) + 1 and starts[-1] == len(ids)
    if not is_whole or (np.diff(starts, prepend=0) < 0).any():
        raise ValueError(f"packed corpus {path}: {side.value} borders do not fit {len(ids)} ids")
    return PackedSide(ids, starts, sizes, [str(path) for path in paths])
