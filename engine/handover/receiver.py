"""The side of a hand-over that takes the sequence: from a ticket to a sequence that decodes.

    begin   read the ticket; blocks and state of the engine for it; then, in the background, take
            the runs, copy into the pool, compare the checksums
    poll    unpack the state; the sequence joins the engine's schedule

Room is made sure of first: an engine without it leaves the offers where they are, for another one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from kvstore.client import BlockingAgentClient

from ..errors import EngineBusy, HandoverRefused
from ..model_runner import ModelRunner
from ..request import Request
from ..section_copy import SectionCopy
from ..sequence import Sequence
from .arrival import Pickup
from .sender import state_namespace
from .ticket import HandoverTicket, SentRun, read_ticket

TAKE_DEADLINE_S = 2.0
ARRIVALS_MAX = 64
THREADS = 2
"""One copies while another waits for an agent."""


class ReceivingEngine(Protocol):
    """What is asked of an engine for sequences from elsewhere; `LLMEngine` is one."""

    @property
    def runner(self) -> ModelRunner: ...

    def open_for_handover(self, request: Request) -> Sequence | None:
        """Blocks for the request's tokens, and a state; None if there is no room now."""

    def attach(self, sequence: Sequence) -> None:
        """Go on with it in decode."""

    def release(self, sequence: Sequence) -> None:
        """Take back what `open_for_handover` gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A sequence came (`refusal` is None), or could not be taken."""

    request_id: str
    moves: int
    """Of the ticket: how often a drained engine has sent it away."""
    refusal: HandoverRefused | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Pending:
    ticket: HandoverTicket
    sequence: Sequence
    collected: Future[bytearray | None]
    is_cancelled: bool = False


@dataclass(slots=True, kw_only=True)
class ReceiverCounts:
    """Sequences by what became of them after their tickets were read."""

    received: int = 0
    refused: int = 0
    cancelled: int = 0


class HandoverReceiver:
    """Takes sequences into one engine; all calls are for the engine's thread.

    `on_change` is called from any thread when `poll` has something to do.
    """

    def __init__(
        self,
        agent: BlockingAgentClient,
        engine: ReceivingEngine,
        *,
        on_change: Callable[[], None],
        take_deadline_s: float = TAKE_DEADLINE_S,
    ) -> None:
        self.counts = ReceiverCounts()
        self._engine = engine
        self._runner = engine.runner
        self._pickup = Pickup(
            agent=agent,
            copy=SectionCopy(engine.runner.pool, engine.runner.namespace.layout),
            namespace=engine.runner.namespace,
            state_namespace=state_namespace(engine.runner),
            deadline_s=take_deadline_s,
        )
        self._on_change = on_change
        self._pending: dict[str, _Pending] = {}
        self._takers = ThreadPoolExecutor(THREADS, thread_name_prefix="handover-receiver")

    @property
    def in_flight(self) -> int:
        """Sequences that are on their way in."""
        return len(self._pending)

    def begin(self, data: bytes, request_id: str) -> Request:
        """Let the sequence of a ticket come as `request_id`; `poll` says when it is there.

        Returns the request as it goes on: what it has in `answered_ids` has been given out. Raises
        HandoverRefused for a ticket that is none, or of another model; InvalidRequest for one that
        never fits; EngineBusy if there is no room now: the ticket is then as good as before.
        """
        ticket = read_ticket(data)
        request = ticket.request(request_id)
        self._check(ticket, request)
        assert request_id not in self._pending, request_id
        if len(self._pending) >= ARRIVALS_MAX:
            raise EngineBusy(waiting_requests=len(self._pending))
        sequence = self._engine.open_for_handover(request)
        if sequence is None:
            raise EngineBusy(waiting_requests=len(self._pending))
        block_ids = sequence.block_ids[: ticket.block_count]
        assert len(block_ids) == ticket.block_count, (len(block_ids), ticket.block_count)
        collected = self._takers.submit(self._pickup.collect, ticket, block_ids)
        self._pending[request_id] = _Pending(ticket=ticket, sequence=sequence, collected=collected)
        collected.add_done_callback(lambda _: self._on_change())
        return request

    def poll(self) -> list[Arrival]:
        """What has come, or could not be taken, since the last call."""
        ended = [name for name, pending in self._pending.items() if pending.collected.done()]
        arrivals = [self._end(name, self._pending.pop(name)) for name in ended]
        return [arrival for arrival in arrivals if arrival is not None]

    def cancel(self, request_id: str) -> None:
        """The sequence is not wanted any more; nothing happens if it is not on its way."""
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.is_cancelled = True

    def close(self, deadline_s: float) -> bool:
        """Give up what is on its way and end the threads; False if one hung, whose blocks stay
        taken. May be called again. To be closed before the client and the engine."""
        for pending in self._pending.values():
            pending.is_cancelled = True
        _, late = wait([p.collected for p in self._pending.values()], timeout=deadline_s)
        self.poll()
        self._takers.shutdown(wait=not late)
        return not late

    def _end(self, request_id: str, pending: _Pending) -> Arrival | None:
        """The background has done its part; None for a sequence that nobody waits for."""
        sequence, ticket = pending.sequence, pending.ticket
        refusal: HandoverRefused | None = None
        try:
            state = pending.collected.result()
            if not pending.is_cancelled:
                self._unpack(sequence, ticket, state)
        except HandoverRefused as error:
            refusal = error
        if refusal is not None or pending.is_cancelled:
            self._engine.release(sequence)
        else:
            self._engine.attach(sequence)
        if pending.is_cancelled:
            self.counts.cancelled += 1
            return None
        self.counts.received += refusal is None
        self.counts.refused += refusal is not None
        return Arrival(request_id=request_id, moves=ticket.moves, refusal=refusal)

    def _unpack(self, sequence: Sequence, ticket: HandoverTicket, state: bytearray | None) -> None:
        self._runner.unpack_state(sequence, ticket.marks, state)
        _expect(
            "computed tokens of the marks",
            sequence.computed_tokens,
            sequence.computed_tokens == ticket.computed_tokens,
            ticket.computed_tokens,
        )
        _expect(
            "replay start of the marks",
            sequence.replay_first,
            sequence.replay_first == ticket.replay_first,
            ticket.replay_first,
        )

    def _check(self, ticket: HandoverTicket, request: Request) -> None:
        """Of this model, by its namespace and the shapes of what was sent."""
        runner = self._runner
        given, own = ticket.namespace_id.hex(), runner.namespace.namespace_id.hex()
        _expect("namespace", given, given == own, own)
        _check_sections("blocks", ticket.blocks, len(runner.namespace.layout.sections))
        if runner.state_layout is None:
            _expect("state", "one", ticket.state is None, "none")
        else:
            _check_sections("state", ticket.state, len(runner.state_layout.sections))
        most = max(*request.prompt_ids, *request.answered_ids)
        _expect("token id", most, most < runner.vocabulary, f"below {runner.vocabulary}")


def _check_sections(what: str, sent: SentRun | None, sections: int) -> None:
    given = 0 if sent is None else len(sent.section_xxh3)
    _expect(f"sections of the {what}", given, given == sections, sections)


def _expect(what: str, given: object, is_right: bool, expected: object) -> None:
    if not is_right:
        raise HandoverRefused(what, given=given, expected=expected)
