"""The side of a hand-over that takes the sequence: from a ticket to a sequence that decodes.

    begin   the ticket is read and checked, in the background: it may have a million tokens
    poll    blocks and state of the engine for it; then, in the background, the runs are taken,
            copied into the pool, and the checksums compared
    poll    unpack the state; the sequence joins the engine's schedule

Room is made sure of before a run is taken: an engine without it leaves the offers where they are,
for another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeAlias

from kvstore.client import BlockingAgentClient
from kvstore.key import KeyChain

from ..errors import EngineBusy, HandoverRefused, InvalidRequest
from ..kv.memcpy_mover import MemcpyMover
from ..kv.mover import SectionMover
from ..model_runner import ModelRunner
from ..request_checks import PreparedRequest
from ..sequence import Sequence
from ..work_threads import WorkThreads
from .arrival import Pickup
from .sender import state_namespace
from .ticket import expect
from .ticket_reader import ReadTicket, TicketReader

TAKE_DEADLINE_S = 2.0
ARRIVALS_MAX = 64
TAKERS = 2
"""One copies while another waits for an agent."""
MOVED_ON_MAX = 8
"""Sequences that one `poll` moves on: each costs the engine's thread a part of a step."""

Refusal: TypeAlias = HandoverRefused | InvalidRequest | EngineBusy


class ReceivingEngine(Protocol):
    """What is asked of an engine for sequences from elsewhere; `LLMEngine` is one."""

    @property
    def runner(self) -> ModelRunner: ...

    def open_for_handover(self, asked: PreparedRequest, /) -> Sequence | None:
        """Blocks for the request's tokens, and a state; None if there is no room now. Raises
        InvalidRequest."""

    def attach(self, sequence: Sequence, chain: KeyChain, /) -> None:
        """Go on with it in decode. `chain`: the keys of its full blocks."""

    def release(self, sequence: Sequence) -> None:
        """Take back what `open_for_handover` gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A sequence came (`refusal` is None), or could not be taken.

    The refusal is a HandoverRefused for a ticket that is none, or of another model, or whose runs
    cannot be had; an InvalidRequest for one that never fits; EngineBusy if there is no room now:
    the ticket is then as good as before.
    """

    request_id: str
    moves: int = 0
    """Of the ticket: how often a drained engine has sent the sequence away."""
    refusal: Refusal | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Pending:
    """`sequence` and `collected` are there once the ticket was read and there was room."""

    reading: Future[ReadTicket]
    sequence: Sequence | None = None
    collected: Future[bytearray | None] | None = None
    is_cancelled: bool = False

    @property
    def in_background(self) -> Future[Any]:
        """What is waited for now."""
        return self.reading if self.collected is None else self.collected


@dataclass(slots=True, kw_only=True)
class ReceiverCounts:
    """Sequences that were to come, by what became of them."""

    received: int = 0
    refused: int = 0
    """Their tickets were no good, or their runs could not be had."""
    busy: int = 0
    """There was no room for them."""
    cancelled: int = 0


class HandoverReceiver:
    """Takes sequences into one engine; all calls are for the engine's thread, and take it no longer
    for a longer prompt.

    `on_change` is called from any thread when `poll` has something to do.
    """

    def __init__(
        self,
        agent: BlockingAgentClient,
        engine: ReceivingEngine,
        *,
        on_change: Callable[[], None],
        take_deadline_s: float = TAKE_DEADLINE_S,
        mover: SectionMover | None = None,
        ticket_key: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`mover`: for the engine's pool, None for one of the host. It is the caller's.
        `ticket_key`: see `ticket.write_ticket`."""
        self.counts = ReceiverCounts()
        self._engine = engine
        self._runner = engine.runner
        self._tickets = TicketReader(engine.runner, ticket_key)
        layout = engine.runner.namespace.layout
        self._mover = mover or MemcpyMover(engine.runner.pool, layout)
        self._pickup = Pickup(
            agent=agent,
            mover=self._mover,
            namespace=engine.runner.namespace,
            state_namespace=state_namespace(engine.runner),
            deadline_s=take_deadline_s,
        )
        self._on_change = on_change
        self._clock = clock
        self._pending: dict[str, _Pending] = {}
        self._readers = WorkThreads("handover-reader", count=1, clock=clock)
        self._takers = WorkThreads("handover-taker", count=TAKERS, clock=clock)

    @property
    def in_flight(self) -> int:
        """Sequences that are on their way in."""
        return len(self._pending)

    def is_arriving(self, request_id: str) -> bool:
        """Whether it was begun, and `poll` has not said yet what became of it."""
        return request_id in self._pending

    def begin(self, data: bytes, request_id: str) -> None:
        """Let the sequence of a ticket come as `request_id`; `poll` says when it is there, or why
        it does not come. Raises EngineBusy if as many are on their way as may be."""
        assert request_id not in self._pending, request_id
        if len(self._pending) >= ARRIVALS_MAX:
            self.counts.busy += 1
            raise EngineBusy(
                waiting_requests=len(self._pending),
                reason=f"{ARRIVALS_MAX} hand-overs are on their way to it",
            )
        reading = self._readers.call(self._tickets.read, data, request_id)
        self._pending[request_id] = _Pending(reading=reading)
        reading.add_done_callback(lambda _: self._on_change())

    def poll(self) -> list[Arrival]:
        """Move on a few of those that can be; who has come, or could not be taken, since the last
        call."""
        due = ((name, one) for name, one in self._pending.items() if one.in_background.done())
        chosen = list(islice(due, MOVED_ON_MAX))
        if next(due, None) is not None:
            self._on_change()
        arrivals = [self._move_on(request_id, pending) for request_id, pending in chosen]
        return [arrival for arrival in arrivals if arrival is not None]

    def cancel(self, request_id: str) -> None:
        """The sequence is not wanted any more; nothing happens if it is not on its way."""
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.is_cancelled = True

    def close(self, deadline_s: float) -> bool:
        """Give up what is on its way and end the threads; False if one hung, whose blocks stay
        taken. May be called again. To be closed before the client and the engine."""
        end_s = self._clock() + deadline_s
        for pending in self._pending.values():
            pending.is_cancelled = True
        wait([pending.in_background for pending in self._pending.values()], timeout=deadline_s)
        while any(pending.in_background.done() for pending in self._pending.values()):
            self.poll()
        has_read = self._readers.close(max(0.0, end_s - self._clock()))
        return self._takers.close(max(0.0, end_s - self._clock())) and has_read

    def _move_on(self, request_id: str, pending: _Pending) -> Arrival | None:
        """The background has done its part; None for a sequence that has a part to come, or that
        nobody waits for."""
        refusal: Refusal | None = None
        try:
            pending.in_background.result()
            if not pending.is_cancelled:
                if pending.collected is None:
                    self._take_in(pending)
                    return None
                self._unpack(pending)
        except (HandoverRefused, InvalidRequest, EngineBusy) as error:
            refusal = error
        return self._end(request_id, pending, refusal)

    def _take_in(self, pending: _Pending) -> None:
        """Make room for a sequence whose ticket is good, and have its runs taken. Raises
        InvalidRequest, EngineBusy."""
        ticket, prepared = pending.reading.result()
        sequence = self._engine.open_for_handover(prepared)
        if sequence is None:
            raise EngineBusy(
                waiting_requests=len(self._pending), reason="no room for a hand-over now"
            )
        block_ids = sequence.block_ids[: ticket.block_count]
        assert len(block_ids) == ticket.block_count, (len(block_ids), ticket.block_count)
        pending.sequence = sequence
        after = self._mover.mark_compute()
        pending.collected = self._takers.call(self._pickup.collect, ticket, block_ids, after)
        pending.collected.add_done_callback(lambda _: self._on_change())

    def _unpack(self, pending: _Pending) -> None:
        """Raises HandoverRefused."""
        ticket, sequence = pending.reading.result().ticket, pending.sequence
        assert sequence is not None
        assert pending.collected is not None
        self._runner.unpack_state(sequence, ticket.marks, pending.collected.result())
        computed, first = sequence.computed_tokens, sequence.replay_first
        is_right = computed == ticket.computed_tokens
        expect("computed tokens of the marks", computed, is_right, ticket.computed_tokens)
        is_right = first == ticket.replay_first
        expect("replay start of the marks", first, is_right, ticket.replay_first)

    def _end(self, request_id: str, pending: _Pending, refusal: Refusal | None) -> Arrival | None:
        del self._pending[request_id]
        if pending.sequence is not None:
            if refusal is not None or pending.is_cancelled:
                self._engine.release(pending.sequence)
            else:
                self._engine.attach(pending.sequence, pending.reading.result().prepared.chain)
        self._count(refusal, is_cancelled=pending.is_cancelled)
        if pending.is_cancelled:
            return None
        return Arrival(request_id=request_id, moves=_moves_of(pending.reading), refusal=refusal)

    def _count(self, refusal: Refusal | None, *, is_cancelled: bool) -> None:
        if is_cancelled:
            self.counts.cancelled += 1
        elif refusal is None:
            self.counts.received += 1
        elif isinstance(refusal, EngineBusy):
            self.counts.busy += 1
        else:
            self.counts.refused += 1


def _moves_of(reading: Future[ReadTicket]) -> int:
    return 0 if reading.exception() is not None else reading.result().ticket.moves
