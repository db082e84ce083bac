"""The entrypoints of the map as one host sees them: which of them answer, and whose share a key is.

Shares follow those that answer, by rendezvous hashing; nobody coordinates that, so for a moment two
hosts may differ. Speaks with nobody: what they are told and asked is `announcer`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .entrypoint_link import EntrypointLink
from .part_transport import PartTransport
from .partition import choose_entrypoints, plan_moves


class Place(NamedTuple):
    """Where an entrypoint of the map is."""

    name: str
    address: str


OpenPart = Callable[[Place], PartTransport]


class Move(NamedTuple):
    """Keys that are another entrypoint's from now on. `old`: None if it is not there any more."""

    old: EntrypointLink | None
    new: EntrypointLink
    keys: list[bytes]


class Entrypoints:
    """Belongs to one event loop. `places` gives the entrypoints of the map in force."""

    def __init__(
        self,
        *,
        places: Callable[[], Sequence[Place]],
        open_part: OpenPart,
        clock: Callable[[], float],
    ) -> None:
        self._places = places
        self._open_part = open_part
        self._clock = clock
        self._links: dict[str, EntrypointLink] = {}
        self._parts: dict[str, PartTransport] = {}
        self.alive: tuple[str, ...] = ()
        """Names of those that answer, sorted: the shares are by these."""

    @property
    def links(self) -> Iterable[EntrypointLink]:
        """All of the map, alive or not."""
        return self._links.values()

    def part(self, name: str) -> PartTransport:
        """How an entrypoint of the map is reached."""
        return self._parts[name]

    def has(self, link: EntrypointLink) -> bool:
        """Whether it is of the map in force, and not one that was there before."""
        return self._links.get(link.name) is link

    def follow_map(self) -> None:
        """Takes over the entrypoints of the map; others than before get a fresh link."""
        wanted = {place.name: place for place in self._places()}
        for name, link in list(self._links.items()):
            if name not in wanted or wanted[name].address != link.address:
                del self._links[name]
                self._parts.pop(name).close()
        for name, place in wanted.items():
            if name not in self._links:
                self._links[name] = EntrypointLink(name, place.address, self._clock)
                self._parts[name] = self._open_part(place)

    def follow_alive(self, keys: Callable[[], list[bytes]]) -> list[Move] | None:
        """Which of `keys` are another's share now; None if the same entrypoints answer as before,
        or none does."""
        before = self.alive
        self.alive = tuple(sorted(name for name, link in self._links.items() if link.is_alive))
        if self.alive == before or not self.alive:
            return None
        moves = plan_moves(keys(), before, self.alive)
        return [
            Move(self._links[old] if old in self.alive else None, self._links[new], share)
            for (old, new), share in moves.items()
        ]

    def links_of(self, keys: Sequence[bytes]) -> list[EntrypointLink] | None:
        """Of each key the entrypoint whose share it is now; None if none answers."""
        if not self.alive:
            return None
        chosen = choose_entrypoints(keys, self.alive).tolist()
        return [self._links[self.alive[index]] for index in chosen]

    def close(self) -> None:
        """Ends at once; none is there from now on."""
        for part in self._parts.values():
            part.close()
        self._links.clear()
        self._parts.clear()
        self.alive = ()

    def describe(self) -> list[dict[str, Any]]:
        """Of each entrypoint what is known, for the status document."""
        return [
            {
                "name": link.name,
                "address": link.address,
                "is_alive": link.is_alive,
                "queued": link.queued,
                "entries": link.last_answer.entries if link.last_answer else 0,
                "entries_of_host": link.last_answer.host_entries if link.last_answer else 0,
            }
            for link in self._links.values()
        ]
