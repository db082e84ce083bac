"""The ids of the blocks of one transfer, and what movers need to know of them; looked at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex, overload

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidRequest


class BlockList(Sequence[int]):
    """Ids of blocks, each once. A slice of it shares what was made of the whole list, such as a
    copy in the memory of a device: whoever moves blocks in parts makes one list and cuts it.

    Raises InvalidRequest for an id that is there twice or is negative.
    """

    def __init__(self, block_ids: Sequence[int]) -> None:
        self.array: NDArray[np.int32] = np.asarray(block_ids, dtype=np.int32)
        self.whole: BlockList = self
        """The list that this one is a slice of; itself for one that is none."""
        self.first = 0
        """Where this one begins in `whole`."""
        self.on_device: dict[object, Any] = {}
        """Of `whole` only: what movers made of the ids, for as long as the list lives."""
        self._last_id: int | None = None
        self._is_run: bool | None = None
        if len(self.array) and int(self.array.min()) < 0:
            raise InvalidRequest("block ids", given=int(self.array.min()), expected="0 or more")
        if len(set(block_ids)) != len(self.array):
            ids, counts = np.unique(self.array, return_counts=True)
            given = f"block {ids[counts > 1][0]} more than once"
            raise InvalidRequest("block ids", given=given, expected="each block once")

    @staticmethod
    def of(block_ids: Sequence[int]) -> BlockList:
        """The list itself, if it is one already."""
        return block_ids if isinstance(block_ids, BlockList) else BlockList(block_ids)

    @property
    def id_bound(self) -> int:
        """The highest one of `whole`, or -1: no id is above it."""
        whole = self.whole
        if whole._last_id is None:
            whole._last_id = int(whole.array.max(initial=-1))
        return whole._last_id

    @property
    def first_of_run(self) -> int | None:
        """The first id, if each one is followed by the next higher one; else None."""
        first = int(self.array[0])
        return first if self.whole._follow_each_other() or self._follow_each_other() else None

    def _follow_each_other(self) -> bool:
        if self._is_run is None:
            self._is_run = bool((np.diff(self.array) == 1).all())
        return self._is_run

    def cut(self, first: int, end: int) -> BlockList:
        """Ids first .. end - 1 of this list."""
        part = object.__new__(BlockList)
        part.array = self.array[first:end]
        part.whole = self.whole
        part.first = self.first + first
        part.on_device = self.on_device
        part._is_run = None
        return part

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> BlockList: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | BlockList:
        if not isinstance(index, slice):
            return int(self.array[index])
        first, end, step = index.indices(len(self.array))
        assert step == 1, index
        return self.cut(first, max(first, end))
