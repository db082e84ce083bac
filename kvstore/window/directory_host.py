"""A part of the window directory as an entrypoint serves it: which hosts are there, who has what.

A host that was not heard of for a while is forgotten with all its entries, and so is one that
began anew: it is told in the answer that it must say everything again. Knows no sockets; entries
are kept by `directory`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..errors import InvalidArgument
from .directory import HOSTS_MAX, DirectoryPart
from .messages import SOMEBODY, AnnounceAnswer, Announcement

HOST_SILENT_S = 5.0
"""Hosts speak once a second; one that is silent for so long is believed to be gone."""
HOSTS_SHOWN_MAX = 256
HOSTS_MISSED_MAX = 64
MISSED_S = 600.0
"""So long it is told which hosts fell silent; nothing else is kept of them."""


@dataclass(slots=True)
class _KnownHost:
    instance: int
    records: int
    heard_at_s: float


class DirectoryHost:
    """One part, and the hosts that announce to it. Belongs to one event loop.

    `instance`: random once for a process, so that hosts see when a part begins anew.
    """

    def __init__(self, part: DirectoryPart, *, instance: int, clock: Callable[[], float]) -> None:
        self._part = part
        self._instance = instance
        self._clock = clock
        self._hosts: OrderedDict[str, _KnownHost] = OrderedDict()
        """The one that was heard of longest ago first."""
        self.silent_hosts = 0
        self._missed: OrderedDict[str, float] = OrderedDict()
        """When hosts that fell silent were heard of last; the one longest ago first."""
        self.lookups = 0

    @property
    def entries(self) -> int:
        """Entries that the part holds."""
        return len(self._part)

    def announce(self, said: Announcement) -> AnnounceAnswer:
        """Takes what a host says. Raises InvalidArgument if there are too many hosts."""
        kept = [item for item in said.items if item.ttl_ms]
        gone = [item.key for item in said.items if not item.ttl_ms]
        is_new = False
        if said.is_leaving:
            self._forget(said.host, said.instance)
        elif said.instance != SOMEBODY:
            is_new = self._hear(said)
            self._part.announce(said.host, kept)
        if gone:
            self._part.withdraw(said.host, gone)
        return AnnounceAnswer(
            self._instance, len(self._part), self._part.count_of(said.host), is_new
        )

    def _hear(self, said: Announcement) -> bool:
        """Notes that the host lives; True if it was not known, or began anew."""
        known = self._hosts.get(said.host)
        is_new = known is None or known.instance != said.instance
        if known is None and len(self._hosts) >= HOSTS_MAX:
            raise InvalidArgument("host", given=said.host, expected=f"at most {HOSTS_MAX} hosts")
        if known is not None and is_new:
            self._part.forget_host(said.host)
        self._missed.pop(said.host, None)
        self._hosts[said.host] = _KnownHost(said.instance, said.records, self._clock())
        self._hosts.move_to_end(said.host)
        return is_new

    def _forget(self, host: str, instance: int) -> None:
        known = self._hosts.get(host)
        # The farewell of a process whose successor has spoken already says nothing of that one.
        if known is None or known.instance == instance:
            self._hosts.pop(host, None)
            self._missed.pop(host, None)
            self._part.forget_host(host)

    def look_up(self, keys: Sequence[bytes]) -> list[str | None]:
        """For each key the host that announced its record last, or None."""
        self.lookups += len(keys)
        return [hosts[0] if hosts else None for hosts in self._part.look_up(keys)]

    def expire(self) -> None:
        """Lets go what has expired, and hosts that are silent. Call it now and then."""
        self._part.expire()
        silent_before_s = self._clock() - HOST_SILENT_S
        while self._hosts:
            host, known = next(iter(self._hosts.items()))
            if known.heard_at_s > silent_before_s:
                break
            del self._hosts[host]
            self._part.forget_host(host)
            self.silent_hosts += 1
            self._missed[host] = known.heard_at_s
            if len(self._missed) > HOSTS_MISSED_MAX:
                self._missed.popitem(last=False)

    def forgive(self, stalled_s: float) -> None:
        """This process itself stood still for so long, and may not have read what hosts said."""
        for known in self._hosts.values():
            known.heard_at_s += stalled_s

    def describe(self) -> dict[str, Any]:
        """What status and metrics show; `hosts_seen` names those heard of last,
        and `hosts_missed` those that fell silent lately without a farewell."""
        now_s = self._clock()
        newest = islice(reversed(self._hosts), HOSTS_SHOWN_MAX)
        return {
            **self._part.describe(),
            "lookups": self.lookups,
            "silent_hosts": self.silent_hosts,
            "hosts_seen": [
                {"address": host, "records": self._hosts[host].records} for host in sorted(newest)
            ],
            "hosts_missed": [
                {"address": host, "silent_s": round(now_s - heard_at_s, 1)}
                for host, heard_at_s in self._missed.items()
                if now_s - heard_at_s < MISSED_S
            ],
        }
