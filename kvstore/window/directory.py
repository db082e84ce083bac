"""One part of the directory of window records: which hosts have the record of a key.

Soft state with the records' own time to live, made for a million entries and more: no object for
an entry, but a row in columns. What is said here is a hint: the host that is asked compares the
whole key. How hosts tell, and which part a key belongs to: `announcer`, `partition`. Layout and
figures: docs/formats/window.md.

    key -> its word (60 bits) -> row of the newest host -> row of the one before -> ...
    second after which it has expired -> row -> row -> ...
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from ..errors import InvalidArgument

ENTRIES_MAX = 2_000_000
HOSTS_PER_KEY_MAX = 4
HOSTS_MAX = 1 << 14
HOST_NUMBERS = 1 << 16
"""Numbers of hosts, those of hosts that were forgotten and still have rows included."""
TTL_S_MAX = 86_400.0
EXPIRE_STEP = 4096
"""Entries that one call of `expire` lets go at most; the next call goes on."""
NO_ROW = 0xFFFF_FFFF
_WORDS_PER_KEY = 4
_WORD_SHIFT = 4
"""Of the first word of a key 60 bits are kept: Python keeps such a number in 32 bytes, not 48."""


@dataclass(slots=True)
class DirectoryCounters:
    """What happened since the start. `crowded_out`: for want of room, before their time; `refused`:
    announced by one host more than there is room for; `hits`, `misses`: keys that were looked up.
    """

    announced: int = 0
    renewed: int = 0
    withdrawn: int = 0
    expired: int = 0
    crowded_out: int = 0
    forgotten: int = 0
    refused: int = 0
    hits: int = 0
    misses: int = 0


class DirectoryPart:
    """At most `entries_max` entries, one for each key and host. Belongs to the event loop."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        entries_max: int = ENTRIES_MAX,
        hosts_max: int = HOSTS_MAX,
    ) -> None:
        if not 1 <= entries_max < NO_ROW:
            raise InvalidArgument("directory entries", given=entries_max, expected="1 to 2^32 - 2")
        if not 1 <= hosts_max <= HOST_NUMBERS // 2:
            raise InvalidArgument(
                "hosts of a directory", given=hosts_max, expected=f"1 to {HOST_NUMBERS // 2}"
            )
        self.counters = DirectoryCounters()
        self._clock = clock
        self._entries_max = entries_max
        self._entries = 0
        self._row_by_word: dict[int, int] = {}
        self._rows = _Rows()
        self._hosts = _Hosts(hosts_max)
        self._ending = _EndingRows(self._rows)

    def __len__(self) -> int:
        """Entries that are held; those of hosts that were forgotten count until they expire."""
        return self._entries

    def announce(self, host: str, items: Iterable[tuple[bytes, int, int]]) -> int:
        """`host` has these records: (key, bytes, milliseconds for which it will have them).

        What it said of a key before is replaced. A fifth host of a key takes the place of the one
        that announced it longest ago; where all is full, the entry that would expire next goes.
        Returns how many were taken: all, or none from a host for which there is no room. A TTL over
        a day counts as a day. InvalidArgument for one below 1 ms; those before it are taken.
        """
        number = self._hosts.number_for(host)
        taken = 0
        if number is None:
            self.counters.refused += sum(1 for _ in items)
            return taken
        now_s = self._clock()
        # The announcement counts as a row, so that the number stays whatever is crowded out.
        self._hosts.count_by_number[number] += 1
        try:
            for key, size_bytes, ttl_ms in items:
                if ttl_ms < 1:
                    raise InvalidArgument("TTL of a record", given=ttl_ms, expected="1 ms or more")
                ends_at_s = now_s + min(ttl_ms / 1e3, TTL_S_MAX)
                self._take(_word_of(key), number, size_bytes, ends_at_s)
                taken += 1
        finally:
            self._hosts.remove_row(number)
        return taken

    def withdraw(self, host: str, keys: Sequence[bytes]) -> int:
        """`host` has the records of these keys no more. Returns how many were known."""
        number = self._hosts.find(host)
        if number is None:
            return 0
        rows = self._rows
        withdrawn = 0
        for word in _words_of(keys):
            for row in self._chain(word):
                if rows.host[row] == number:
                    self._remove(row)
                    withdrawn += 1
                    break
        self.counters.withdrawn += withdrawn
        return withdrawn

    def look_up(self, keys: Sequence[bytes]) -> list[tuple[str, ...]]:
        """For each key the hosts that have its record, who announced it last first; () is nobody.

        No entry lives longer for it.
        """
        now_s = self._clock()
        ends_at_s, host, names = self._rows.ends_at_s, self._rows.host, self._hosts.name_by_number
        answers: list[tuple[str, ...]] = []
        hits = 0
        for word in _words_of(keys):
            found = tuple(
                name
                for row in self._chain(word)
                if ends_at_s[row] > now_s and (name := names[host[row]]) is not None
            )
            hits += bool(found)
            answers.append(found)
        self.counters.hits += hits
        self.counters.misses += len(answers) - hits
        return answers

    def size_of(self, host: str, key: bytes) -> int | None:
        """Bytes of the record of `key` that `host` announced; None if it did not, or no more."""
        number, now_s, rows = self._hosts.find(host), self._clock(), self._rows
        for row in self._chain(_word_of(key)):
            if rows.host[row] == number and rows.ends_at_s[row] > now_s:
                return rows.size_bytes[row]
        return None

    def forget_host(self, host: str) -> int:
        """Nothing that `host` announced is told from now on. Returns how many entries it had.

        Takes the same time whatever their number: they go when they expire.
        """
        forgotten = self._hosts.retire(host)
        self.counters.forgotten += forgotten
        return forgotten

    def expire(self, entries_max: int = EXPIRE_STEP) -> int:
        """Let go what has expired, at most `entries_max`; returns how many. Call it now and then:
        an expired entry is told to nobody, but it needs its memory until this."""
        second = int(self._clock())
        expired = 0
        while expired < entries_max and (row := self._ending.first_until(second)) is not None:
            self._remove(row)
            expired += 1
        self.counters.expired += expired
        return expired

    def count_of(self, host: str) -> int:
        """Entries of one host."""
        number = self._hosts.find(host)
        return 0 if number is None else self._hosts.count_by_number[number]

    def counts(self) -> dict[str, int]:
        """Entries by host, of all hosts that have any."""
        return self._hosts.counts()

    def describe(self) -> dict[str, int]:
        """What status and metrics show."""
        return {
            "entries": self._entries,
            "entries_max": self._entries_max,
            "keys": len(self._row_by_word),
            "hosts": len(self._hosts),
            **asdict(self.counters),
        }

    def _chain(self, word: int) -> Iterator[int]:
        """Rows of a key, that of the host which announced it last first."""
        row = self._row_by_word.get(word, NO_ROW)
        after = self._rows.after_in_key
        while row != NO_ROW:
            following = after[row]
            yield row
            row = following

    def _take(self, word: int, number: int, size_bytes: int, ends_at_s: float) -> None:
        """One record of one host."""
        chain = list(self._chain(word))
        own = next((row for row in chain if self._rows.host[row] == number), None)
        if own is not None:
            self._remove(own)
            self.counters.renewed += 1
        else:
            self.counters.announced += 1
            if len(chain) == HOSTS_PER_KEY_MAX:
                self._crowd_out(chain[-1])
        if self._entries == self._entries_max:
            first = self._ending.first()
            assert first is not None, "a full directory without a row"
            self._crowd_out(first)
        before = self._row_by_word.get(word, NO_ROW)
        row = self._rows.add(word, number, size_bytes, ends_at_s, before)
        self._row_by_word[word] = row
        self._ending.add(row)
        self._hosts.count_by_number[number] += 1
        self._entries += 1

    def _crowd_out(self, row: int) -> None:
        self._remove(row)
        self.counters.crowded_out += 1

    def _remove(self, row: int) -> None:
        rows = self._rows
        word, number, following = rows.word[row], rows.host[row], rows.after_in_key[row]
        first = self._row_by_word[word]
        if first != row:
            before = next(one for one in self._chain(word) if rows.after_in_key[one] == row)
            rows.after_in_key[before] = following
        elif following == NO_ROW:
            del self._row_by_word[word]
        else:
            self._row_by_word[word] = following
        self._ending.remove(row)
        rows.release(row)
        self._entries -= 1
        self._hosts.remove_row(number)


class _Rows:
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


class _EndingRows:
    """Rows by the second after which they have expired; any of them can be taken out at once."""

    def __init__(self, rows: _Rows) -> None:
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


class _Hosts:
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


def _word_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "little") >> _WORD_SHIFT


def _words_of(keys: Sequence[bytes]) -> list[int]:
    return [word >> _WORD_SHIFT for word in array("Q", b"".join(keys))[::_WORDS_PER_KEY]]
