"""Gives the bytes of offered runs to the agents of other hosts, out of the arena's own memory.

A run that is taken, withdrawn or free while a piece of it is being sent may be overwritten: then
the peer's checksum fails, or its TAKE finds nothing; either way it has not got the run.
"""

from __future__ import annotations

from collections.abc import Callable

from ..arena.region import RunMemory
from ..errors import InvalidArgument
from .leases import Lease
from .offers import OfferBook, OfferedRun
from .run_messages import RunPiece


class RunSender:
    """Belongs to the event loop. `memory` gives the bytes of a run."""

    def __init__(self, offers: OfferBook, memory: Callable[[Lease], RunMemory]) -> None:
        self.sent_bytes = 0
        self._offers = offers
        self._memory = memory

    def read(self, piece: RunPiece) -> memoryview | None:
        """The bytes that are meant, without a copy; None if the run is not on offer. Raises
        InvalidArgument if the run is not so long."""
        lease = self._offers.find(piece.run)
        if lease is None:
            return None
        data = self._memory(lease).data
        if piece.start + piece.bytes > len(data):
            raise InvalidArgument(
                "bytes of a run",
                given=f"{piece.start} to {piece.start + piece.bytes}",
                expected=f"at most {len(data)}",
            )
        self.sent_bytes += piece.bytes
        return data[piece.start : piece.start + piece.bytes]

    def give_away(self, run: OfferedRun) -> bool:
        """The peer has all bytes, and takes the run: whether nobody was faster."""
        return self._offers.give_away(run)
