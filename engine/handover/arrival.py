"""What is done in the background for a sequence that arrives: its runs are taken, copied, checked.

Which sequences may come, and what the engine's thread does about them, is `receiver`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvstore.client import ArenaRun, BlockingAgentClient
from kvstore.key import Namespace

from ..errors import HandoverRefused
from ..section_copy import SectionCopy
from ..store_faults import STORE_ERRORS
from .ticket import HandoverTicket, SentRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Pickup:
    """Where runs are taken, and how long that takes at most."""

    agent: BlockingAgentClient
    copy: SectionCopy
    namespace: Namespace
    state_namespace: Namespace | None
    deadline_s: float

    def collect(self, ticket: HandoverTicket, block_ids: Sequence[int]) -> bytearray | None:
        """Take the runs of a ticket, put the blocks into the pool's `block_ids` and return the
        state, None for a model without. Raises HandoverRefused; bytes of the blocks are undefined
        then, and the runs are gone."""
        with self._take("blocks", self.namespace, ticket.blocks, ticket.block_count) as run:
            if self.state_namespace is None:
                self._copy_blocks(ticket.blocks, run, block_ids)
                return None
            assert ticket.state is not None
            with self._take("state", self.state_namespace, ticket.state, 1) as state_run:
                self._copy_blocks(ticket.blocks, run, block_ids)
                return _read_state(ticket.state, state_run)

    def _take(self, what: str, namespace: Namespace, sent: SentRun, blocks: int) -> ArenaRun:
        offer = sent.offer(namespace, blocks)
        expected = f"one of {blocks} block(s) that waits, and room in the arena"
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
            given = f"one of {run.blocks} blocks"
            raise HandoverRefused(f"run of {what}", given=given, expected=expected)
        return run

    def _copy_blocks(self, sent: SentRun, run: ArenaRun, block_ids: Sequence[int]) -> None:
        for section in range(len(self.namespace.layout.sections)):
            self.copy.to_pool(_section_of("blocks", run, section), section, block_ids)
            _check("blocks", sent, section, self.copy.xxh3(section, block_ids))


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
