"""Hosts and entrypoints with real pools and real parts of the directory, in virtual time.

Only what lies between them is missing: an announcement arrives at once, and that an entrypoint is
gone is known after the times that the announcer has. Records are a kibibyte long, because how many
there are does not depend on their size.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.layout import BlockLayout, Section
from kvstore.window.directory import DirectoryPart
from kvstore.window.partition import choose_entrypoint, plan_moves
from kvstore.window.pool import WindowPool

LAYOUT = BlockLayout((Section("swa", 1024),))
NAMESPACE_ID = b"window namespace"
RECORD_BYTES = 1_415_040
"""Of a record of V4.1-Flash, for what is said about memory."""
SETTLED_AFTER_S = 3.0
"""An entrypoint silent for 2 s counts as gone; within a second its share is announced anew."""


@dataclass
class FleetCounts:
    """What became of the records that were looked for."""

    asked: int = 0
    found_here: int = 0
    found_elsewhere: int = 0
    stale: int = 0
    records_peak: int = 0
    """On all hosts together."""

    @property
    def found(self) -> int:
        return self.found_here + self.found_elsewhere


@dataclass
class Fleet:
    """`host_count` hosts with `records_each` records of room; the directory lies on `names`. A host
    that is alone needs none: nobody else has anything."""

    host_count: int
    names: Sequence[str]
    ttl_s: float
    records_each: int
    rng: random.Random
    is_announced_anew: bool = True
    """Whether hosts tell the others again what a lost entrypoint knew."""
    now_s: float = 0.0
    counts: FleetCounts = field(default_factory=FleetCounts)

    def __post_init__(self) -> None:
        self.pools = [
            WindowPool(self.records_each * LAYOUT.block_bytes, lambda: self.ttl_s, self.clock)
            for _ in range(self.host_count)
        ]
        self.parts = {name: DirectoryPart(self.clock) for name in self.names}
        self.believed = list(self.names)
        """The entrypoints that hosts believe alive, so those that they ask."""
        self.settles: list[tuple[float, str]] = []
        self._name_by_key: dict[bytes, str] = {}

    def clock(self) -> float:
        return self.now_s

    def go_to(self, now_s: float) -> None:
        """Time passes."""
        self.now_s = now_s
        while self.settles and self.settles[0][0] <= now_s:
            self._settle(self.settles.pop(0)[1])
        for pool in self.pools:
            pool.expire()
        for part in self.parts.values():
            part.expire()

    def choose_host(self) -> int:
        """Requests of one session land anywhere."""
        return self.rng.randrange(self.host_count)

    def put(self, host: int, key: bytes) -> None:
        """The request that ran on `host` leaves its window state there."""
        gone = self.pools[host].put(key, NAMESPACE_ID, LAYOUT, key * 32)
        assert gone is not None
        if self.names:
            self._announce(host, [key])
            for old in gone:
                self._part_of(old).withdraw(address(host), [old])
        records = sum(map(len, self.pools))
        self.counts.records_peak = max(self.counts.records_peak, records)

    def find(self, host: int, key: bytes) -> bool:
        """Look for a record from `host`: in its own memory, then by the directory."""
        self.counts.asked += 1
        if key in self.pools[host]:
            self.counts.found_here += self._fetch(host, key)
            return True
        if not self.names:
            return False
        part = self._part_of(key)
        told = part.look_up([key])[0]
        if not told:
            return False
        if not self._fetch(number_of(told[0]), key):
            part.withdraw(told[0], [key])
            self.counts.stale += 1
            return False
        self.counts.found_elsewhere += 1
        return True

    def lose(self, name: str) -> None:
        """An entrypoint is killed. Until it is noticed, whoever asks it gets no answer."""
        self.parts[name] = DirectoryPart(self.clock)
        self.settles.append((self.now_s + SETTLED_AFTER_S, name))
        self.settles.sort()

    def bring_back(self, name: str) -> None:
        """It serves again, and everybody knows."""
        before = list(self.believed)
        self.believe([other for other in self.names if other in {*self.believed, name}])
        self._announce_moved(before)

    def believe(self, names: Sequence[str]) -> None:
        """From now on hosts ask these entrypoints."""
        self.believed = list(names)
        self._name_by_key.clear()

    def reachable_share(self) -> float:
        """Of the records in memory, those that another host would find."""
        held = known = 0
        for host, pool in enumerate(self.pools):
            alive = list(filter(pool.__contains__, pool.keys()))
            held += len(alive)
            known += sum(address(host) in self._part_of(key).look_up([key])[0] for key in alive)
        return known / held

    def _settle(self, name: str) -> None:
        before = list(self.believed)
        self.believe([other for other in self.believed if other != name])
        if self.is_announced_anew:
            self._announce_moved(before)

    def _announce_moved(self, before: Sequence[str]) -> None:
        for host, pool in enumerate(self.pools):
            for moved in plan_moves(pool.keys(), before, self.believed).values():
                self._announce(host, moved)

    def _announce(self, host: int, keys: Iterable[bytes]) -> None:
        for key in keys:
            record = self.pools[host].peek(key)
            if record is not None:
                ttl_ms = int(self.pools[host].ttl_left_s(record) * 1e3)
                said = [(key, RECORD_BYTES, max(1, min(ttl_ms, 86_400_000)))]
                self._part_of(key).announce(address(host), said)

    def _part_of(self, key: bytes) -> DirectoryPart:
        name = self._name_by_key.get(key)
        if name is None:
            name = self._name_by_key[key] = choose_entrypoint(key, self.believed)
        return self.parts[name]

    def _fetch(self, host: int, key: bytes) -> bool:
        record = self.pools[host].get(key)
        assert record is None or bytes(record.view[:32]) == key
        return record is not None


def address(host: int) -> str:
    return f"10.0.0.{host}:7400"


def number_of(host: str) -> int:
    return int(host.removeprefix("10.0.0.").removesuffix(":7400"))
