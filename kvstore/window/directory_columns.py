"""The columns of a directory part: its rows, which of them expire when, and numbers of hosts.

Plain arrays and lists within them; what an entry means, and who may have how many, is the business
of `directory`.
"""

from __future__ import annotations

import heapq
from array import array

HOST_NUMBERS = 1 << 16
"""Numbers of hosts, those of hosts that were forgotten and still have rows included."""
NO_ROW = 0xFFFF_FFFF


class Rows:
    """The columns, 34 bytes a row, and which rows are free. They grow and never shrink."""

    def __init__(self) -> None:
        self.word = array("Q")
        self.ends_at_s = array("d")
        self.size_bytes = array("I")
        self.host = array("H")
        self.after_in_key = array("I")
        self.before_in_second = array("I")
        self.after_in_second = array("I")
        """Of a free row: the next free one."""
        self._first_free = NO_ROW

    def add(self, word: int, host: int, size_bytes: int, ends_at_s: float, after: int) -> int:
        """A row with these values, in no list of a second yet."""
        row = self._first_free
        if row == NO_ROW:
            self.word.append(word)
            self.ends_at_s.append(ends_at_s)
            self.size_bytes.append(size_bytes)
            self.host.append(host)
            self.after_in_key.append(after)
            self.before_in_second.append(NO_ROW)
            self.after_in_second.append(NO_ROW)
            return len(self.word) - 1
        self._first_free = self.after_in_second[row]
        self.word[row] = word
        self.ends_at_s[row] = ends_at_s
        self.size_bytes[row] = size_bytes
        self.host[row] = host
        self.after_in_key[row] = after
        return row

    def release(self, row: int) -> None:
        self.after_in_second[row] = self._first_free
        self._first_free = row


class EndingRows:
    """Rows by the second after which they have expired; any of them can be taken out at once."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._first_by_second: dict[int, int] = {}
        self._seconds: list[int] = []
        """A heap of the seconds in the dict, those that have lost their rows included."""

    def add(self, row: int) -> None:
        rows = self._rows
        second = int(rows.ends_at_s[row]) + 1
        following = self._first_by_second.get(second)
        if following is None:
            heapq.heappush(self._seconds, second)
            following = NO_ROW
        elif following != NO_ROW:
            rows.before_in_second[following] = row
        rows.before_in_second[row] = NO_ROW
        rows.after_in_second[row] = following
        self._first_by_second[second] = row

    def remove(self, row: int) -> None:
        rows = self._rows
        before, following = rows.before_in_second[row], rows.after_in_second[row]
        if before == NO_ROW:
            self._first_by_second[int(rows.ends_at_s[row]) + 1] = following
        else:
            rows.after_in_second[before] = following
        if following != NO_ROW:
            rows.before_in_second[following] = before

    def first(self) -> int | None:
        """A row that expires in the earliest second, None if there is no row."""
        while self._seconds:
            row = self._first_by_second[self._seconds[0]]
            if row != NO_ROW:
                return row
            del self._first_by_second[heapq.heappop(self._seconds)]
        return None

    def first_until(self, second: int) -> int | None:
        """A row that has expired by `second`, None if there is none."""
        row = self.first()
        return row if row is not None and self._seconds[0] <= second else None


class Hosts:
    """Names of hosts as numbers of 16 bits, and how many rows each number has.

    A host that is forgotten loses its number; nobody else gets it while it has rows.
    """

    def __init__(self, hosts_max: int) -> None:
        self._hosts_max = hosts_max
        self._number_by_name: dict[str, int] = {}
        self.name_by_number: list[str | None] = []
        self.count_by_number: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._number_by_name)

    def find(self, host: str) -> int | None:
        return self._number_by_name.get(host)

    def number_for(self, host: str) -> int | None:
        """The number of a host, a new one if it has none; None if there are too many hosts."""
        number = self._number_by_name.get(host)
        if number is not None:
            return number
        if len(self._number_by_name) == self._hosts_max:
            return None
        if not self._free:
            if len(self.name_by_number) == HOST_NUMBERS:
                return None
            self._free.append(len(self.name_by_number))
            self.name_by_number.append(None)
            self.count_by_number.append(0)
        number = self._free.pop()
        self._number_by_name[host] = number
        self.name_by_number[number] = host
        return number

    def retire(self, host: str) -> int:
        """No name any more for the number of this host; returns its rows."""
        number = self._number_by_name.pop(host, None)
        if number is None:
            return 0
        self.name_by_number[number] = None
        return self.count_by_number[number]

    def remove_row(self, number: int) -> None:
        """A number without rows is free again, whoever had it."""
        self.count_by_number[number] -= 1
        if self.count_by_number[number]:
            return
        name = self.name_by_number[number]
        if name is not None:
            del self._number_by_name[name]
            self.name_by_number[number] = None
        self._free.append(number)

    def counts(self) -> dict[str, int]:
        return {name: self.count_by_number[row] for name, row in self._number_by_name.items()}
