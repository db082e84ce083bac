"""What is done in the background for a sequence that arrives: its runs are taken, copied, checked.

Which sequences may come, and what the engine's thread does about them, is `receiver`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvstore.client import ArenaRun, BlockingAgentClient
from kvstore.key import Namespace

from ..errors import HandoverRefused, TransferFailed, count_of
from ..kv.block_list import BlockList
from ..kv.mover import ComputeMark, SectionMover, Transfer, wait_to_end
from ..kv.section_digest import section_xxh3
from ..store_faults import STORE_ERRORS
from .ticket import HandoverTicket, SentRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Pickup:
    """Where runs are taken, and how long that takes at most."""

    agent: BlockingAgentClient
    mover: SectionMover
    namespace: Namespace
    state_namespace: Namespace | None
    deadline_s: float

    def collect(
        self, ticket: HandoverTicket, block_ids: Sequence[int], after: ComputeMark = None
    ) -> bytearray | None:
        """Take the runs of a ticket, put the blocks into the pool's `block_ids`, which are free of
        other uses when `after` is over, and return the state, None for a model without. Raises
        HandoverRefused; bytes of the blocks are undefined then, and the runs are gone."""
        with self._take("blocks", self.namespace, ticket.blocks, ticket.block_count) as run:
            if self.state_namespace is None:
                self._copy_blocks(ticket.blocks, run, block_ids, after)
                return None
            assert ticket.state is not None
            with self._take("state", self.state_namespace, ticket.state, 1) as state_run:
                self._copy_blocks(ticket.blocks, run, block_ids, after)
                return _read_state(ticket.state, state_run)

    def _take(self, what: str, namespace: Namespace, sent: SentRun, blocks: int) -> ArenaRun:
        offer = sent.offer(namespace, blocks)
        expected = f"one of {count_of(blocks, 'block')} that waits, and room in the arena"
        try:
            run = self.agent.take_run(namespace, offer, deadline_s=self.deadline_s)
        except STORE_ERRORS as error:
            given = f"one that could not be taken: {error}"
            raise HandoverRefused(f"run of {what}", given=given, expected=expected) from error
        if run is None:
            given = "one that is gone, or no room"
            raise HandoverRefused(f"run of {what}", given=given, expected=expected)
        if run.blocks != blocks:
            run.release()
            given = f"one of {count_of(run.blocks, 'block')}"
            raise HandoverRefused(f"run of {what}", given=given, expected=expected)
        return run

    def _copy_blocks(
        self, sent: SentRun, run: ArenaRun, block_ids: Sequence[int], after: ComputeMark
    ) -> None:
        blocks = BlockList(block_ids)
        widths = [section.bytes for section in self.namespace.layout.sections]
        transfers: list[Transfer] = []
        try:
            try:
                for section in range(len(widths)):
                    part = _section_of("blocks", run, section)
                    transfers.append(self.mover.to_pool(part, section, blocks, after=after))
            finally:
                wait_to_end(*transfers)
            for section, width in enumerate(widths):
                found = section_xxh3(self.mover, width, section, blocks)
                _check("blocks", sent, section, found)
        except TransferFailed as error:
            given = f"some that did not come: {error}"
            raise HandoverRefused("blocks", given=given, expected="all of them") from error


def _read_state(sent: SentRun, run: ArenaRun) -> bytearray:
    state = bytearray()
    for section in range(len(run.layout.layout.sections)):
        data = bytes(_section_of("state", run, section))
        _check("state", sent, section, xxhash.xxh3_64_intdigest(data))
        state += data
    return state


def _section_of(what: str, run: ArenaRun, index: int) -> memoryview:
    """A section of all blocks of a run. Raises HandoverRefused."""
    try:
        return run.section(index)
    except STORE_ERRORS as error:
        given = f"a run that is lost: {error}"
        raise HandoverRefused(f"run of {what}", given=given, expected="its bytes") from error


def _check(what: str, sent: SentRun, index: int, copied_xxh3: int) -> None:
    """Whether a section was copied as it was sent. It is the copy that is looked at: a run that is
    lost may be somebody else's before anybody here knows."""
    sent_xxh3 = sent.section_xxh3[index]
    if copied_xxh3 != sent_xxh3:
        name = f"checksum of section {index} of the {what}"
        raise HandoverRefused(name, given=f"{copied_xxh3:016x}", expected=f"{sent_xxh3:016x}")
