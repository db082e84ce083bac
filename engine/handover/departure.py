"""One sequence on its way out, as the copying thread sees it: two runs that are filled and offered.

What the engine's thread does, and in which order things happen, is `sender`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.client import BlockingAgentClient, RunOffer
from kvstore.key import Namespace
from kvstore.layout import BLOCK_TOKENS

from ..kv.mover import ComputeMark, SectionMover, wait_for_compute
from ..model_runner import Buffer
from ..request import Request
from .outgoing_run import OutgoingRun
from .ticket import HandoverTicket, SentRun, encode_ids, write_ticket

LEASE_LEAST_S = 0.001
"""Of who does not wait: long enough for the agent to give what is free."""


class ArenaFull(Exception):
    """The arena has no room for a run of the size. The sequence is not sent; no fault."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parting:
    """Everything of a sequence at the moment it leaves, so that its engine can let go of it.

    References to `complete_ids` are held as long as this is used; they are computed when `after` is
    over. `open_block` is empty if there is none, `state` None for a model without.
    """

    request: Request
    token_ids: list[int]
    computed_tokens: int
    replay_first: int | None
    complete_ids: list[int]
    open_block: bytes
    state: Buffer | None
    marks: bytes
    moves: int
    after: ComputeMark = None

    @property
    def block_count(self) -> int:
        return -(-self.computed_tokens // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Where runs come from, and how long they are on offer. `clock`: of the deadlines."""

    agent: BlockingAgentClient
    mover: SectionMover
    namespace: Namespace
    state_namespace: Namespace | None
    clock: Callable[[], float]
    offer_ttl_s: float
    ticket_key: bytes = b""

    def lease(self, namespace: Namespace, blocks: int, until_s: float) -> OutgoingRun:
        """A run of so many blocks; room for it is waited for until `until_s`. Raises ArenaFull,
        StoreError."""
        left_s = max(LEASE_LEAST_S, until_s - self.clock())
        run = self.agent.lease_run(namespace, blocks, deadline_s=left_s)
        if run is None:
            raise ArenaFull
        if run.blocks < blocks:
            run.release()
            raise ArenaFull
        return OutgoingRun(run)

    def withdraw(self, ticket: HandoverTicket) -> None:
        """Nobody shall take the runs of a ticket that was written here. Raises StoreError."""
        self.agent.withdraw_offer(ticket.blocks.offer(self.namespace, ticket.block_count))
        if self.state_namespace is not None and ticket.state is not None:
            self.agent.withdraw_offer(ticket.state.offer(self.state_namespace, 1))


class Departure:
    """Runs of one sequence, from the lease to the offer. `release` may be called at any time."""

    def __init__(self, dispatch: Dispatch) -> None:
        self.is_fault_noted = False
        """An error of the agent has been counted; an agent that is lost fails all that follows."""
        self._dispatch = dispatch
        self._blocks: OutgoingRun | None = None
        self._state: OutgoingRun | None = None
        self._copied_ids: list[int] = []

    def copy_early(self, block_count: int, complete_ids: Sequence[int], after: ComputeMark) -> None:
        """Lease runs for a sequence of so many blocks, and copy the complete ones, which are
        computed when `after` is over. Raises ArenaFull, StoreError, TransferFailed."""
        # First: else room in the arena would be idle as long.
        wait_for_compute(after, "a hand-over")
        # It waits for no room: who is behind it in line may stand still for its ticket.
        self._lease(block_count, until_s=self._dispatch.clock())
        assert self._blocks is not None
        self._blocks.add_from_pool(self._dispatch.mover, complete_ids)
        self._copied_ids = list(complete_ids)

    def complete(self, parting: Parting, until_s: float) -> bytes:
        """Copy what is not copied yet, offer the runs and write the ticket. What room is lacking
        has to be there at `until_s`. Raises ArenaFull, StoreError, TransferFailed."""
        wait_for_compute(parting.after, "a hand-over")
        copied = len(self._copied_ids)
        if (
            self._blocks is None
            or self._blocks.blocks != parting.block_count
            or self._copied_ids != parting.complete_ids[:copied]
        ):
            # Nothing was copied early, or not of what the sequence came to be.
            self.release()
            self._lease(parting.block_count, until_s)
            copied = 0
        assert self._blocks is not None
        missing_ids = parting.complete_ids[copied:]
        self._blocks.add_from_pool(self._dispatch.mover, missing_ids)
        if parting.open_block:
            self._blocks.add_block(parting.open_block)
        if self._state is not None:
            assert parting.state is not None
            self._state.add_block(parting.state)
        return self._write_ticket(parting, *self._offer())

    def release(self) -> None:
        """Give back what is leased and not offered."""
        for run in (self._blocks, self._state):
            if run is not None:
                run.release()
        self._blocks = self._state = None
        self._copied_ids = []

    def _lease(self, block_count: int, until_s: float) -> None:
        dispatch = self._dispatch
        self._blocks = dispatch.lease(dispatch.namespace, block_count, until_s)
        if dispatch.state_namespace is not None:
            self._state = dispatch.lease(dispatch.state_namespace, 1, until_s)

    def _offer(self) -> tuple[SentRun, SentRun | None]:
        assert self._blocks is not None
        agent, ttl_s = self._dispatch.agent, self._dispatch.offer_ttl_s
        offer = agent.offer_run(self._blocks.run, ttl_s=ttl_s)
        blocks, state = _sent(offer, self._blocks), None
        if self._state is not None:
            try:
                state = _sent(agent.offer_run(self._state.run, ttl_s=ttl_s), self._state)
            except BaseException:
                # Half a sequence is of no use to anybody.
                agent.withdraw_offer(offer)
                raise
        return blocks, state

    def _write_ticket(self, parting: Parting, blocks: SentRun, state: SentRun | None) -> bytes:
        request = parting.request
        prompt_tokens = len(request.prompt_ids)
        ticket = HandoverTicket(
            namespace_id=self._dispatch.namespace.namespace_id,
            prompt_ids=encode_ids(parting.token_ids[:prompt_tokens]),
            answer_ids=encode_ids(parting.token_ids[prompt_tokens:]),
            max_tokens=request.max_tokens,
            temperature=request.sampling.temperature,
            top_k=request.sampling.top_k,
            top_p=request.sampling.top_p,
            seed=request.sampling.seed,
            stop_ids=sorted(request.stop_ids),
            ttl_class=request.ttl_class,
            replay_first=parting.replay_first,
            computed_tokens=parting.computed_tokens,
            marks=parting.marks,
            blocks=blocks,
            state=state,
            moves=parting.moves,
        )
        return write_ticket(ticket, self._dispatch.ticket_key)


def _sent(offer: RunOffer, run: OutgoingRun) -> SentRun:
    return SentRun(ticket=offer.ticket, host=offer.host, section_xxh3=run.checksums())
