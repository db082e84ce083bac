"""The side of a hand-over that has the sequence: its bytes into the arena, and a ticket for them.

    begin (before the last pass)   lease runs, copy the blocks that are complete: while it computes
    finish (after it)              the blocks that were missing, the open block, the state; offers

The engine's thread packs the state and goes on; leases, copies and offers are made by a thread of
the sender. Who takes the sequence is not known here, and no store is asked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, ParamSpec, TypeVar

from kvstore.client import BlockingAgentClient
from kvstore.errors import AgentRefused
from kvstore.key import Namespace
from kvstore.layout import BLOCK_TOKENS

from ..errors import TransferFailed
from ..kv.memcpy_mover import MemcpyMover
from ..kv.mover import ComputeMark, SectionMover
from ..model_runner import ModelRunner
from ..sequence import Sequence
from ..store_faults import STORE_ERRORS, StoreFaults
from ..work_threads import WorkThreads
from .departure import ArenaFull, Departure, Dispatch, Parting
from .ticket import read_ticket

log = logging.getLogger(__name__)

LEASE_DEADLINE_S = 1.0
"""From when a sequence leaves until there is room for it in the arena."""
OFFER_TTL_S = 30.0
IN_FLIGHT_MAX = 128
"""Jobs of the copying thread that wait or run; beyond it sequences are not sent."""

REASON_CHARACTERS_MAX = 300

Arguments = ParamSpec("Arguments")
ResultT = TypeVar("ResultT")


def tell_nobody(reason: str) -> None:
    """Nobody asks why a sequence was not sent."""


def state_namespace(runner: ModelRunner) -> Namespace | None:
    """Of the runs that a state lies in: that of the blocks, with the layout of a state slot."""
    if runner.state_layout is None:
        return None
    return replace(runner.namespace, layout=runner.state_layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderCounts:
    """Sequences that were to leave, by what became of them."""

    sent: int = 0
    failed: int = 0
    refused: int = 0
    """The agent would not have them: it has too much on offer already, or as many runs as it may.
    That is no fault of it."""


class HandoverSender:
    """Sends sequences of one engine. `begin`, `finish` and `drop` are for the engine's thread.

    An arena without room, an agent that refuses, or a fault of it, which is counted in `faults`,
    costs the ticket: the request is then run again elsewhere, from what the store has.
    """

    def __init__(
        self,
        agent: BlockingAgentClient,
        runner: ModelRunner,
        *,
        faults: StoreFaults,
        lease_deadline_s: float = LEASE_DEADLINE_S,
        offer_ttl_s: float = OFFER_TTL_S,
        mover: SectionMover | None = None,
        ticket_key: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`mover`: for the runner's pool, None for one of the host. It is the caller's.
        `ticket_key`: see `ticket.write_ticket`."""
        self._runner = runner
        self._pool = runner.pool
        self._mover = mover or MemcpyMover(runner.pool, runner.namespace.layout)
        self._dispatch = Dispatch(
            agent=agent,
            mover=self._mover,
            namespace=runner.namespace,
            state_namespace=state_namespace(runner),
            clock=clock,
            offer_ttl_s=offer_ttl_s,
            ticket_key=ticket_key,
        )
        self._faults = faults
        self._clock = clock
        self._lease_deadline_s = lease_deadline_s
        self._departures: dict[str, Departure] = {}
        # One thread: what is asked of it for a sequence happens in that order.
        self._copier = WorkThreads("handover-sender", count=1, clock=clock)
        self._jobs: set[Future[Any]] = set()
        self._counts = SenderCounts()
        self._lock = Lock()

    @property
    def counts(self) -> SenderCounts:
        return self._counts

    @property
    def in_flight(self) -> int:
        """Jobs of the copying thread that wait or run."""
        return len(self._jobs)

    def begin(self, sequence: Sequence) -> None:
        """The last pass over the sequence's prompt is about to be computed: copy the blocks before
        it meanwhile. They must be in the pool whole: not for a pass that waits for sections.

        May be called again for the same request, whose earlier beginning then counts for nothing.
        """
        request_id = sequence.request.request_id
        self.drop(request_id)
        if len(self._jobs) >= IN_FLIGHT_MAX:
            return
        departure = self._departures[request_id] = Departure(self._dispatch)
        block_count = -(-len(sequence.token_ids) // BLOCK_TOKENS)
        complete_ids = sequence.block_ids[: sequence.complete_blocks]
        self._pool.retain(complete_ids)
        after = self._mover.mark_compute()
        self._submit(self._copy_early, departure, block_count, complete_ids, after)

    def finish(
        self,
        sequence: Sequence,
        *,
        moves: int = 0,
        on_unsent: Callable[[str], None] = tell_nobody,
    ) -> Future[bytes | None]:
        """Send a sequence that has left its engine's schedule: the ticket, or None if it could not
        be sent; never an error of the agent. It waits for room `lease_deadline_s` from this call at
        most: those in line wait beside each other, and an arena that is full costs the last of them
        what it costs the first.

        What is needed of the sequence is copied or retained at the call: it can be released at
        once. `moves`: how often a drained engine has sent it away, this time included. The future
        must not be cancelled; `withdraw` is for that. `on_unsent` is told why there is no ticket,
        in any thread, before the future says so.
        """
        departure = self._departures.pop(sequence.request.request_id, None)
        if len(self._jobs) >= IN_FLIGHT_MAX:
            if departure is not None:
                self._submit(departure.release)
            self._count(is_sent=False)
            on_unsent("too many sequences leave it at one time")
            not_sent: Future[bytes | None] = Future()
            not_sent.set_result(None)
            return not_sent
        parting = self._part_with(sequence, moves)
        departure = departure or Departure(self._dispatch)
        until_s = self._clock() + self._lease_deadline_s
        return self._submit(self._complete, departure, parting, until_s, on_unsent)

    def drop(self, request_id: str) -> None:
        """The request ended where it was; nothing happens if it was not begun."""
        departure = self._departures.pop(request_id, None)
        if departure is not None:
            self._submit(departure.release)

    def withdraw(self, sent: Future[bytes | None]) -> None:
        """Nobody will use the ticket that `finish` promised: what was offered does not have to wait
        for its end."""
        self._submit(self._withdraw, sent)

    def close(self, deadline_s: float) -> bool:
        """Give up what was begun and wait for what is being sent; False if that took longer. May be
        called again, and nothing else after it. To be closed before the client and the engine."""
        end_s = self._clock() + deadline_s
        for request_id in list(self._departures):
            self.drop(request_id)
        wait(list(self._jobs), timeout=deadline_s)
        return self._copier.close(max(0.0, end_s - self._clock()))

    def _part_with(self, sequence: Sequence, moves: int) -> Parting:
        layout = self._runner.state_layout
        state = None if layout is None else bytearray(layout.block_bytes)
        into = None if state is None else memoryview(state)
        marks = self._runner.pack_state(sequence, into)
        complete_ids = sequence.block_ids[: sequence.complete_blocks]
        self._pool.retain(complete_ids)
        return Parting(
            request=sequence.request,
            token_ids=list(sequence.token_ids),
            computed_tokens=sequence.computed_tokens,
            replay_first=sequence.replay_first,
            complete_ids=complete_ids,
            open_block=self._runner.open_block_bytes(sequence),
            state=state,
            marks=marks,
            moves=moves,
            after=self._mover.mark_compute(),
        )

    # In the copying thread ------------------------------------------------------------------------

    def _copy_early(
        self,
        departure: Departure,
        block_count: int,
        complete_ids: list[int],
        after: ComputeMark,
    ) -> None:
        try:
            departure.copy_early(block_count, complete_ids, after)
        except (ArenaFull, AgentRefused):
            departure.release()
        except (*STORE_ERRORS, TransferFailed) as error:
            self._note_fault(departure, error)
            departure.release()
        finally:
            self._pool.release(complete_ids)

    def _complete(
        self,
        departure: Departure,
        parting: Parting,
        until_s: float,
        on_unsent: Callable[[str], None],
    ) -> bytes | None:
        ticket, is_refused = None, False
        try:
            ticket = departure.complete(parting, until_s)
        except ArenaFull:
            on_unsent("no room in the arena of its agent")
        except AgentRefused as error:
            is_refused = True
            on_unsent(str(error)[:REASON_CHARACTERS_MAX])
        except TransferFailed as error:
            self._note_fault(departure, error)
            on_unsent(str(error)[:REASON_CHARACTERS_MAX])
        except STORE_ERRORS as error:
            self._note_fault(departure, error)
            on_unsent(f"its agent fails: {error}"[:REASON_CHARACTERS_MAX])
        finally:
            self._pool.release(parting.complete_ids)
            departure.release()
        self._count(is_sent=ticket is not None, is_refused=is_refused)
        return ticket

    def _withdraw(self, sent: Future[bytes | None]) -> None:
        # It was made in this thread, so it is there.
        ticket = sent.result()
        if ticket is None:
            return
        try:
            self._dispatch.withdraw(read_ticket(ticket, self._dispatch.ticket_key))
        except STORE_ERRORS as error:
            self._faults.note("hand over", error)

    def _note_fault(self, departure: Departure, error: Exception) -> None:
        if not departure.is_fault_noted:
            self._faults.note("hand over", error)
        departure.is_fault_noted = True

    def _count(self, *, is_sent: bool, is_refused: bool = False) -> None:
        with self._lock:
            counts = self._counts
            self._counts = SenderCounts(
                sent=counts.sent + is_sent,
                failed=counts.failed + (not is_sent and not is_refused),
                refused=counts.refused + is_refused,
            )

    def _submit(
        self,
        job: Callable[Arguments, ResultT],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Future[ResultT]:
        future = self._copier.call(job, *args, **kwargs)
        self._jobs.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, job: Future[Any]) -> None:
        self._jobs.discard(job)
        error = job.exception()
        if error is not None:
            log.error("a job of the hand-over has failed", exc_info=error)
