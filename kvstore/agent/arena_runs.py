"""Runs of the arena as sessions use them: the lease book with the memory and the descriptors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from ..agent_messages import RunLeased, WindowFetched
from ..arena.allocator import RangeAllocator
from ..arena.region import ArenaRegion, RunMemory
from ..arena.run_layout import RunCode
from ..arena.wakeup import make_wakeup
from ..errors import InvalidArgument
from ..layout import BlockLayout
from .leases import PATIENCE_S, Lease, LeaseBook, LeaseRequest, RunState
from .parts import WindowOutcome
from .replies import Reply, RequestRefused
from .window_run import gather_record, space_for_record, spread_record

log = logging.getLogger(__name__)

QUARANTINE_INTERVAL_S = 0.25
"""A run whose quarantine is over is free so much later at most."""
NO_RUN = RunLeased(run=0, offset=0, blocks=0)
RecordFetch: TypeAlias = Callable[[memoryview, float], Awaitable[WindowOutcome]]
"""Brings a record into memory, within seconds."""


class ArenaRuns:
    """Belongs to the event loop. Run numbers of sessions are checked here."""

    def __init__(
        self,
        region: ArenaRegion,
        clock: Callable[[], float],
    ) -> None:
        self._region = region
        self._clock = clock
        self.book = LeaseBook(RangeAllocator(region.size_bytes), _close_waker, clock=clock)

    def ask(
        self,
        *,
        owner: int,
        namespace: int,
        layout: BlockLayout,
        blocks: int,
        is_window: bool,
        code: RunCode | None = None,
    ) -> LeaseRequest:
        """A wish for a run; it may be settled at once."""
        wish = LeaseRequest(
            owner=owner,
            layout=layout,
            blocks=blocks,
            namespace=namespace,
            is_window=is_window,
            code=code,
        )
        self.book.ask(wish)
        return wish

    async def wait(self, wish: LeaseRequest, deadline_s: float) -> Reply:
        """The answer to a wish that is in line, once it is settled, or after `deadline_s`."""
        await self.settle(wish, deadline_s)
        return self.reply_of(wish)

    async def settle(self, wish: LeaseRequest, deadline_s: float) -> None:
        """Returns when a wish that may be in line is settled, after `deadline_s` at the latest."""
        if not wish.is_settled:
            settled = asyncio.Event()
            wish.on_settled.append(settled.set)
            try:
                async with asyncio.timeout(deadline_s):
                    if not await _is_set_within(settled, PATIENCE_S):
                        # From now on it may be overtaken, perhaps at once.
                        self.book.serve_line()
                    await settled.wait()
            except TimeoutError:
                self.book.settle(wish)

    def reply_of(self, wish: LeaseRequest) -> Reply:
        """The answer to a settled wish. Raises RequestRefused if the system has no descriptor."""
        return Reply(NO_RUN) if wish.lease is None else self.tell(wish.lease)

    def tell(self, lease: Lease) -> Reply:
        """The answer that gives a session its run. Raises RequestRefused if the system has no
        descriptor, and the run is free then."""
        try:
            lease.waker, reader = make_wakeup()
        except OSError as error:
            self.book.release(lease)
            raise RequestRefused(f"no descriptor for a run: {error.strerror}") from error
        # What an earlier fetch of somebody else has noted there must not count for this one.
        layout = lease.layout
        self.memory(lease).view[: layout.table_bytes] = bytes(layout.table_bytes)
        leased = RunLeased(
            run=lease.number,
            offset=lease.offset,
            blocks=layout.blocks,
            code=(0, 0) if layout.code is None else layout.code,
        )
        # Nobody has the reading end but the session, once it is sent.
        return Reply(leased, reader, is_descriptor_given=True)

    async def run(self, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Looks for runs whose quarantine is over, until it is cancelled."""
        while True:
            await sleep(QUARANTINE_INTERVAL_S)
            self.book.end_quarantine()

    def memory(self, lease: Lease) -> RunMemory:
        """The bytes of a run."""
        return self._region.run(lease.offset, lease.layout)

    def find(self, owner: int, number: int) -> Lease:
        """A run that the session has been told of. Raises InvalidArgument."""
        lease = self.book.find(owner, number)
        if lease is None or lease.waker is None:
            raise InvalidArgument("run", given=number, expected="a run that this session has")
        return lease

    def find_idle(self, owner: int, number: int, *, is_window: bool) -> Lease:
        """A run of the session, of the right kind, that nothing is fetched into now. Raises
        InvalidArgument."""
        lease = self.find(owner, number)
        if lease.is_window != is_window:
            kinds = {True: "one for a window record", False: "one for blocks"}
            raise InvalidArgument(
                f"run {number}", given=kinds[lease.is_window], expected=kinds[is_window]
            )
        if lease.state is not RunState.LEASED:
            raise InvalidArgument(
                f"run {number}", given="one that is being filled", expected="one at rest"
            )
        return lease

    def begin_store(self, lease: Lease) -> None:
        """The run is to be saved, and its session has no part in it any more."""
        _close_waker(lease)
        self.book.begin_store(lease)

    def cut_off(self, lease: Lease) -> None:
        """The run has left its session, which has no part in it any more."""
        _close_waker(lease)

    # Window records -------------------------------------------------------------------------------

    def check_window_layout(self, lease: Lease, layout: BlockLayout) -> None:
        """The run was leased for records of this layout. Raises InvalidArgument."""
        if lease.layout.layout != layout:
            raise InvalidArgument(
                f"run {lease.number}",
                given="one for records of another layout",
                expected="one of the namespace's window layout",
            )

    def gather_record(self, lease: Lease) -> memoryview | bytearray:
        """The record in a run, in one piece. May be the run's own memory."""
        return gather_record(self.memory(lease))

    async def fetch_record(self, lease: Lease, fetch: RecordFetch, deadline_s: float) -> Reply:
        """Has a record fetched into a run; its sections are in their places then."""
        run = self.memory(lease)
        begun_s = self._clock()
        found = await fetch(space_for_record(run), deadline_s)
        if found.is_found:
            spread_record(run)
        elapsed_s = self._clock() - begun_s
        host = found.host or ""
        return Reply(WindowFetched(is_found=found.is_found, host=host, elapsed_s=elapsed_s))


def _close_waker(lease: Lease) -> None:
    if lease.waker is not None:
        lease.waker.close()
        lease.waker = None


async def _is_set_within(event: asyncio.Event, delay_s: float) -> bool:
    try:
        async with asyncio.timeout(delay_s):
            return await event.wait()
    except TimeoutError:
        return False
