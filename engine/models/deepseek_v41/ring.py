"""Rows of the newest positions of a sequence, kept in a ring of fixed bytes.

A ring's memory is used again by other sequences without being cleared, so the ring keeps account of
what may be read. What the rows mean is not known here.
"""

import torch


class Ring:
    """The rows of the newest positions: that of position p stands at `rows[p mod len(rows)]`.

    Positions max(`start`, `first`) .. `end` - 1 may be read. `start` is the caller's own bound;
    `first` and `end` follow from what was written: an older row has been overwritten or was never
    there, a newer one is of another sequence or was taken back.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.start = 0
        self.first = 0
        self.end = 0

    @property
    def readable_from(self) -> int:
        return max(self.start, self.first)

    def write(self, position: int, rows: torch.Tensor) -> None:
        """Put rows at `position` and after it; of more than the ring has room for, the last.

        Rows of later positions count as taken back. A write that does not continue or replace what
        is there makes all rows before it unreadable. No rows change nothing.
        """
        assert position >= 0, position
        assert rows.shape[1:] == self.rows.shape[1:], (rows.shape, self.rows.shape)
        assert rows.dtype == self.rows.dtype, (rows.dtype, self.rows.dtype)
        if len(rows) == 0:
            return
        if not self.first <= position <= self.end:
            self.first = position
        self.end = position + len(rows)
        self.first = max(self.first, self.end - len(self.rows))
        kept = rows[-len(self.rows) :]
        at = 0
        for run in self._runs(self.end - len(kept), self.end):
            count = run.stop - run.start
            self.rows[run] = kept[at : at + count]
            at += count

    def read(self, first: int, end: int) -> torch.Tensor:
        """A copy of the rows of positions first .. end - 1, in order of position."""
        is_readable = self.readable_from <= first <= end <= self.end
        assert is_readable or first == end, (
            f"rows {first} to {end - 1} asked for, readable are "
            f"{self.readable_from} to {self.end - 1}"
        )
        return torch.cat([self.rows[run] for run in self._runs(first, end)])

    def rewind(self, length: int) -> None:
        """Take back the rows of positions `length` and after; what comes there may be read."""
        self.end = min(self.end, length)
        self.first = min(self.first, self.end)
        self.start = min(self.start, length)

    def hold(self, first: int, end: int) -> None:
        """Say that the rows of positions first .. end - 1 stand in the ring."""
        assert 0 <= first <= end <= first + len(self.rows), (first, end, len(self.rows))
        self.first, self.end = first, end

    def clear_unreadable(self) -> None:
        """Zero the rows that may not be read, so that none of another sequence gets out."""
        if self.readable_from >= self.end:
            self.rows[:] = 0
            return
        # What is not read of a ring stands behind its end, up to where it begins once more.
        for run in self._runs(self.end, self.readable_from + len(self.rows)):
            self.rows[run] = 0

    def _runs(self, first: int, end: int) -> list[slice]:
        """Where the rows of positions first .. end - 1 stand: in one run, or around the end."""
        size = len(self.rows)
        begin = first % size
        stop = begin + end - first
        if stop <= size:
            return [slice(begin, stop)]
        return [slice(begin, size), slice(0, stop - size)]
