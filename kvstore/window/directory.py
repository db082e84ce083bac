"""One part of the directory of window records: which hosts have the record of a key.

Soft state with the records' own time to live, made for a million entries and more: no object for
an entry, but a row in columns. What is said here is a hint: the host that is asked compares the
whole key. How hosts tell, and which part a key belongs to: `announcer`, `partition`. Layout and
figures: docs/formats/window.md.

    key -> its word (60 bits) -> row of the newest host -> row of the one before -> ...
    second after which it has expired -> row -> row -> ...
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from ..errors import InvalidArgument
from .directory_columns import HOST_NUMBERS, NO_ROW, EndingRows, Hosts, Rows

ENTRIES_MAX = 2_000_000
HOSTS_PER_KEY_MAX = 4
HOSTS_MAX = 1 << 14
TTL_S_MAX = 86_400.0
EXPIRE_STEP = 2048
"""Entries that one call of `expire` lets go at most; the next call goes on."""
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
        self._rows = Rows()
        self._hosts = Hosts(hosts_max)
        self._ending = EndingRows(self._rows)

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
        is_expired = self._rows.ends_at_s[row] <= self._clock()
        self._remove(row)
        if is_expired:
            self.counters.expired += 1
        else:
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


def _word_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "little") >> _WORD_SHIFT


def _words_of(keys: Sequence[bytes]) -> list[int]:
    return [word >> _WORD_SHIFT for word in array("Q", b"".join(keys))[::_WORDS_PER_KEY]]
