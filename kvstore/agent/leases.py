"""Who has which run of the arena. Pure but for its clock and being told when to look: no memory.

A run is leased to a session, and goes back when the session ends, or when it hands the run over to
be saved and that is done. While a job works in a run it is not given to anybody else, whatever
happens to its session. A run that is offered belongs to no session until one takes it. One whose
session has ended is kept from others for a while: a process that lost its connection has the memory
still, and may be in the middle of a copy.

    leased <-> fetching         begin_fetch, end_fetch
    leased  -> (free)           release
    fetching -> releasing       release; free at end_fetch
    leased  -> storing          begin_store, when the run leaves its session; free at end_store
    leased  -> offered          begin_offer, when the run leaves its session; free at end_offer
    offered -> leased           take, by whatever session
    leased  -> quarantined      end_owner; free at end_quarantine
    releasing -> quarantined    end_fetch, if it was end_owner that released it

Who finds the arena full waits in line. Nobody is overtaken in his first second, so that a large
request is not starved by small ones. Who has waited longer is overtaken by whoever fits: a request
for nearly everything that may wait an hour would hold up all others beside an empty arena. He still
gets his run when it fits; when his time is up, he gets what fits at that moment.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from ..arena.allocator import RangeAllocator
from ..arena.run_layout import RUN_BLOCKS_MAX, RunCode, RunLayout
from ..arena.wakeup import Waker
from ..layout import BlockLayout

RUNS_MAX = 16_384
"""Leased at one time, in all: each costs the agent a descriptor."""


PATIENCE_S = 1.0
"""So long nobody is overtaken in line."""

QUARANTINE_S = 2.0
"""From the end of its session until a run is free. A process that is alive learns of that end in a
moment, and looks whether a run is its own before each section that it copies, which takes some tens
of milliseconds at most."""


class RunState(Enum):
    LEASED = "leased"
    FETCHING = "fetching"
    STORING = "storing"
    OFFERED = "offered"
    """Another session may take it."""
    RELEASING = "releasing"
    """Its session has no use for it, but a job still works in it."""
    QUARANTINED = "quarantined"
    """Its session ended while it had it."""


@dataclass(slots=True, eq=False)
class Lease:
    """A run that somebody has. `number` is never used again."""

    number: int
    offset: int
    layout: RunLayout
    namespace: int
    """As the session counts them."""
    is_window: bool
    owner: int | None
    """Number of the session; None for a run that is being saved, is offered or was given up."""
    state: RunState = RunState.LEASED
    is_orphan: bool = False
    """Its session ended while it had it: nobody said that he is done with the memory."""
    waker: Waker | None = None
    """Until the session was told of the run there is none."""
    cancel_job: Callable[[], object] | None = None
    """Ends the job that works in the run; set by whoever began it."""


@dataclass(slots=True, eq=False)
class LeaseRequest:
    """Somebody's wish for a run; `lease` once there is one. `blocks` is what can be had at most."""

    owner: int
    layout: BlockLayout
    blocks: int
    namespace: int
    is_window: bool
    code: RunCode | None = None
    """Of the parity that it is to have room for."""
    lease: Lease | None = None
    asked_s: float = 0.0
    run_bytes: int = 0
    """What it needs; both are set when it is asked."""
    is_settled: bool = False
    """There is a lease, or there will be none."""
    on_settled: list[Callable[[], None]] = field(default_factory=list)
    """Called when that becomes so while the request waits."""


def choose_blocks_that_fit(
    layout: BlockLayout, blocks: int, room_bytes: int, code: RunCode | None = None
) -> int:
    """The most blocks, at most `blocks`, whose run fits in `room_bytes`; 0 if not even one does."""
    low, high = 0, min(blocks, RUN_BLOCKS_MAX, room_bytes // layout.block_bytes)
    if high and RunLayout(layout, high, code).run_bytes <= room_bytes:
        return high  # as a rule: a run layout of many sections takes a while to lay out
    while low < high:
        middle = (low + high + 1) // 2
        if RunLayout(layout, middle, code).run_bytes <= room_bytes:
            low = middle
        else:
            high = middle - 1
    return low


class LeaseBook:
    """All leases of one arena, and who waits for one.

    `on_freed` is called with each lease when its run is free again. Not for use by several threads.
    """

    def __init__(
        self,
        allocator: RangeAllocator,
        on_freed: Callable[[Lease], None],
        *,
        clock: Callable[[], float],
        runs_max: int = RUNS_MAX,
    ) -> None:
        self._allocator = allocator
        self._on_freed = on_freed
        self._clock = clock
        self._runs_max = runs_max
        self._leases: dict[int, Lease] = {}
        self._by_owner: dict[int, dict[int, Lease]] = {}
        self._waiting: OrderedDict[int, LeaseRequest] = OrderedDict()
        self._waiting_by_owner: dict[int, dict[int, LeaseRequest]] = {}
        self._quarantined: deque[tuple[float, Lease]] = deque()
        """With the time at which each is free, the first one first."""
        self._last_number = 0
        self._least_waiting_bytes = sys.maxsize
        """Nobody in line needs less."""

    # What there is --------------------------------------------------------------------------------

    @property
    def runs(self) -> int:
        """Runs that are not free."""
        return len(self._leases)

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._waiting)

    @property
    def leased_bytes(self) -> int:
        return self._allocator.size_bytes - self._allocator.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        return self._allocator.largest_free_bytes

    @property
    def size_bytes(self) -> int:
        return self._allocator.size_bytes

    def can_hold(self, layout: BlockLayout, blocks: int) -> bool:
        """Whether a run of so many blocks fits in the arena if nobody else is there."""
        return choose_blocks_that_fit(layout, blocks, self.size_bytes) == blocks

    def states(self) -> dict[str, int]:
        """Number of runs in each state."""
        counts = {state.value: 0 for state in RunState}
        for lease in self._leases.values():
            counts[lease.state.value] += 1
        return counts

    def runs_of(self, owner: int) -> int:
        """Runs that a session has or waits for."""
        return len(self._by_owner.get(owner, ())) + len(self._waiting_by_owner.get(owner, ()))

    def find(self, owner: int, number: int) -> Lease | None:
        """The run of this number if it is the session's."""
        return self._by_owner.get(owner, {}).get(number)

    # Asking ---------------------------------------------------------------------------------------

    def ask(self, request: LeaseRequest) -> None:
        """Settles the request at once, or puts it in line.

        A request for more than the whole arena can hold is made as small as that. One for which
        not even a single block would fit is settled without a lease.
        """
        request.blocks = choose_blocks_that_fit(
            request.layout, request.blocks, self.size_bytes, request.code
        )
        if request.blocks == 0:
            request.is_settled = True
            return
        request.asked_s = self._clock()
        request.run_bytes = RunLayout(request.layout, request.blocks, request.code).run_bytes
        if self._may_overtake() and self._try_grant(request, request.blocks):
            return
        self._least_waiting_bytes = min(self._least_waiting_bytes, request.run_bytes)
        self._waiting[id(request)] = request
        self._waiting_by_owner.setdefault(request.owner, {})[id(request)] = request

    def settle(self, request: LeaseRequest) -> None:
        """The request's time is up: it gets what fits now, which may be nothing."""
        if request.is_settled:
            return
        self._leave_line(request)
        layout, room_bytes = request.layout, self.largest_free_bytes
        blocks = choose_blocks_that_fit(layout, request.blocks, room_bytes, request.code)
        if not blocks or not self._try_grant(request, blocks):
            request.is_settled = True
        self.serve_line()

    def serve_line(self) -> None:
        """Gives runs to those in line whose turn it is. Called here whenever a run is free; to be
        called too when a request has waited for PATIENCE_S."""
        room_bytes = self.largest_free_bytes
        if room_bytes < self._least_waiting_bytes:
            return
        least_bytes = sys.maxsize
        for request in list(self._waiting.values()):
            if len(self._leases) >= self._runs_max:
                return
            if request.run_bytes <= room_bytes and self._try_grant(request, request.blocks):
                self._leave_line(request)
                room_bytes = self.largest_free_bytes
                for call in request.on_settled:
                    call()
                continue
            if not self._is_patient(request):
                return
            least_bytes = min(least_bytes, request.run_bytes)
        self._least_waiting_bytes = least_bytes

    # Using ----------------------------------------------------------------------------------------

    def begin_fetch(self, lease: Lease, cancel: Callable[[], object]) -> None:
        """A job begins to write into the run; `cancel` makes it end soon."""
        assert lease.state is RunState.LEASED, lease.state
        lease.state = RunState.FETCHING
        lease.cancel_job = cancel

    def end_fetch(self, lease: Lease) -> None:
        """No job writes into the run any more."""
        assert lease.state in (RunState.FETCHING, RunState.RELEASING), lease.state
        lease.cancel_job = None
        if lease.state is RunState.RELEASING:
            self._let_go(lease)
        else:
            lease.state = RunState.LEASED

    def begin_store(self, lease: Lease) -> None:
        """The run leaves its session: it is to be saved, and belongs to the agent."""
        assert lease.state is RunState.LEASED, lease.state
        self._leave_owner(lease)
        lease.state = RunState.STORING

    def end_store(self, lease: Lease) -> None:
        """The run was saved or dropped, and nobody reads it any more."""
        assert lease.state is RunState.STORING, lease.state
        self._free(lease)

    def begin_offer(self, lease: Lease) -> None:
        """The run leaves its session: another may take it, and it belongs to the agent so long."""
        assert lease.state is RunState.LEASED, lease.state
        self._leave_owner(lease)
        lease.state = RunState.OFFERED

    def take(self, lease: Lease, *, owner: int, namespace: int) -> None:
        """A session takes a run that was offered; `namespace`: as that session counts them."""
        assert lease.state is RunState.OFFERED, lease.state
        lease.state = RunState.LEASED
        lease.owner, lease.namespace = owner, namespace
        self._by_owner.setdefault(owner, {})[lease.number] = lease

    def end_offer(self, lease: Lease) -> None:
        """Nobody may take the run any more."""
        assert lease.state is RunState.OFFERED, lease.state
        self._free(lease)

    # Giving back ----------------------------------------------------------------------------------

    def release(self, lease: Lease) -> None:
        """The session has no use for the run. A job in it is told to end, and then it is free."""
        self._leave_owner(lease)
        if lease.state is RunState.LEASED:
            self._let_go(lease)
            return
        assert lease.state is RunState.FETCHING, lease.state
        assert lease.cancel_job is not None
        lease.state = RunState.RELEASING
        lease.cancel_job()

    def end_owner(self, owner: int) -> None:
        """The session is gone: what it has is released, and free after QUARANTINE_S; what it waits
        for is not wanted."""
        for request in list(self._waiting_by_owner.get(owner, {}).values()):
            self._leave_line(request)
            request.is_settled = True
        for lease in list(self._by_owner.get(owner, {}).values()):
            lease.is_orphan = True
            self.release(lease)
        self.serve_line()

    def end_quarantine(self) -> None:
        """Frees the runs whose time in quarantine is up. To be called every now and then."""
        now_s = self._clock()
        while self._quarantined and self._quarantined[0][0] <= now_s:
            _, lease = self._quarantined.popleft()
            self._free(lease)

    # Inside ---------------------------------------------------------------------------------------

    def _try_grant(self, request: LeaseRequest, blocks: int) -> bool:
        if len(self._leases) >= self._runs_max:
            return False
        layout = RunLayout(request.layout, blocks, request.code)
        offset = self._allocator.allocate(layout.run_bytes)
        if offset is None:
            return False
        self._last_number += 1
        lease = Lease(
            number=self._last_number,
            offset=offset,
            layout=layout,
            namespace=request.namespace,
            is_window=request.is_window,
            owner=request.owner,
        )
        self._leases[lease.number] = lease
        self._by_owner.setdefault(request.owner, {})[lease.number] = lease
        request.lease = lease
        request.is_settled = True
        return True

    def _let_go(self, lease: Lease) -> None:
        """No job works in the run, and no session has it."""
        if not lease.is_orphan:
            self._free(lease)
            return
        lease.state = RunState.QUARANTINED
        self._quarantined.append((self._clock() + QUARANTINE_S, lease))

    def _free(self, lease: Lease) -> None:
        del self._leases[lease.number]
        self._allocator.release(lease.offset)
        self._on_freed(lease)
        self.serve_line()

    def _may_overtake(self) -> bool:
        """Whether a new request need not wait: nobody in line is in his first
        second, and all of them who fit have their runs."""
        if not self._waiting:
            return True
        last = next(reversed(self._waiting.values()))
        if not self._is_patient(last):
            return False
        self.serve_line()
        return True

    def _is_patient(self, request: LeaseRequest) -> bool:
        """It has waited for so long that it may be overtaken."""
        return self._clock() - request.asked_s >= PATIENCE_S

    def _leave_line(self, request: LeaseRequest) -> None:
        del self._waiting[id(request)]
        mine = self._waiting_by_owner[request.owner]
        del mine[id(request)]
        if not mine:
            del self._waiting_by_owner[request.owner]

    def _leave_owner(self, lease: Lease) -> None:
        assert lease.owner is not None
        mine = self._by_owner[lease.owner]
        del mine[lease.number]
        if not mine:
            del self._by_owner[lease.owner]
        lease.owner = None
