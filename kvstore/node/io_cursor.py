"""A list of byte views that the kernel fills or takes, a bit at a time."""

from __future__ import annotations

from collections.abc import Sequence

VIEWS_PER_CALL_MAX = 256
"""Views handed to one system call. Below the kernel's 1,024: each one costs time in each call."""


class IoCursor:
    """Where in `views` the transfer stands. `left_bytes` is 0 when it is done."""

    __slots__ = ("_index", "_views", "left_bytes")

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = list(views)
        self._index = 0
        self.left_bytes = sum(map(len, self._views))

    def window(self) -> list[memoryview]:
        """The next views, for one system call."""
        if self._index == 0 and len(self._views) <= VIEWS_PER_CALL_MAX:
            return self._views
        return self._views[self._index : self._index + VIEWS_PER_CALL_MAX]

    def advance(self, count: int) -> None:
        """`count` bytes of the window were transferred."""
        assert 0 <= count <= self.left_bytes
        self.left_bytes -= count
        if not self.left_bytes:
            return
        views, index = self._views, self._index
        while count >= len(views[index]):
            count -= len(views[index])
            index += 1
        if count:
            views[index] = views[index][count:]
        self._index = index

    def fill(self, data: memoryview) -> int:
        """Copy from `data` what there is room for; returns how many bytes that was."""
        taken = min(len(data), self.left_bytes)
        done = 0
        while done < taken:
            view = self._views[self._index]
            count = min(len(view), taken - done)
            view[:count] = data[done : done + count]
            done += count
            self.advance(count)
        return taken
