"""Reading what `training.pack` wrote, with numpy alone: where there is no tokenizer library."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .arrays_file import TEXT, read_arrays
from .command import InvalidInput
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

    Raises InvalidInput if the borders do not fit the ids or the file is of another kind.
    """
    kinds = {
        "ids": ("uint16", 1),
        "starts": ("int64", 1),
        "bytes": ("int64", 1),
        "paths": (TEXT, 1),
    }
    wanted = {f"{side.value}_{name}": kind for name, kind in kinds.items()}
    arrays = read_arrays(path, wanted, source="training.pack")
    ids, starts, sizes, paths = (arrays[name] for name in wanted)
    is_whole = len(starts) == len(sizes) + 1 == len(paths) + 1 and starts[-1] == len(ids)
    if not is_whole or (np.diff(starts, prepend=0) < 0).any():
        given = f"{side.value} borders that do not fit {len(ids)} ids"
        raise InvalidInput(f"packed corpus {path}", given=given, expected="borders of documents")
    return PackedSide(ids, starts, sizes, [str(path) for path in paths])
