"""How many leading blocks of a chain are stored: a question to two nodes of each group.

Any node of a group can answer for its blocks, since it holds a shard of each. Two are asked, and
the longer run counts: a node whose disk was replaced knows nothing, and must not turn every hit
into a miss. The answer is a hint; only a fetched block is a fact. A group with fewer than k nodes
that can be reached has no block, whatever one of them says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .. import wire
from ..cluster.placement import SPAN_BLOCKS
from ..errors import NodeError
from .channel import NodeChannel
from .choose import delay_class
from .router import Lane, Router, split_into_batches

NODES_ASKED = 2
SECOND_ANSWER_WAIT_S = 0.01
"""How long a shorter run of the first node waits for the second."""


async def match_blocks(
    router: Router, keys: Sequence[bytes], deadline_s: float, loop: asyncio.AbstractEventLoop
) -> int:
    """Leading blocks of `keys` that are present. Returns within `deadline_s`; silence is a miss."""
    absent = np.flatnonzero(~await present_blocks(router, keys, 0, deadline_s, loop))
    return int(absent[0]) if len(absent) else len(keys)


async def present_blocks(
    router: Router,
    keys: Sequence[bytes],
    first_block: int,
    deadline_s: float,
    loop: asyncio.AbstractEventLoop,
) -> NDArray[np.bool_]:
    """For each block from `first_block` on: is it believed to be stored?"""
    questions = [
        GroupMatch(router, keys, blocks, loop, deadline_s)
        for blocks in _blocks_by_group(router, keys, first_block)
    ]
    try:
        async with asyncio.timeout(deadline_s):
            for question in questions:
                await question.done
    except TimeoutError:
        pass  # what was answered until now counts
    finally:
        for question in questions:
            question.settle()
    present = np.zeros(len(keys), np.bool_)
    for question in questions:
        present[question.blocks] = question.present
    return present[first_block:]


def _blocks_by_group(router: Router, keys: Sequence[bytes], first_block: int) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for start, end in split_into_batches(first_block, len(keys), batch_blocks=SPAN_BLOCKS):
        blocks = groups.setdefault(router.span_of(keys, start).group.name, [])
        blocks.extend(range(start, end))
    return list(groups.values())


class GroupMatch:
    """The question to one group. `present[i]`: block `blocks[i]` is believed stored."""

    def __init__(
        self,
        router: Router,
        keys: Sequence[bytes],
        blocks: list[int],
        loop: asyncio.AbstractEventLoop,
        deadline_s: float,
    ) -> None:
        self.blocks = blocks
        self.present: NDArray[np.bool_] = np.zeros(len(blocks), np.bool_)
        self.done: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._deadline_s = deadline_s
        self._keys = [keys[block] for block in blocks]
        self._patience: asyncio.TimerHandle | None = None
        self._pending: dict[NodeAnswer, NodeChannel] = {}
        placement = router.span_of(keys, blocks[0])
        channels = router.shard_channels(placement, Lane.READ)
        reachable = [one for one in channels if one.health.is_available]
        reachable.sort(key=lambda one: delay_class(one.health.delay_s))
        if len(reachable) < router.map.code.k:
            reachable = []
        self._unasked = reachable
        for _ in range(NODES_ASKED):
            self._ask_further()
        self._check()

    def _ask_further(self) -> None:
        if not self._unasked:
            return
        channel = self._unasked.pop(0)
        answer = NodeAnswer(self, len(self._keys))
        self._pending[answer] = channel
        for start in range(0, len(self._keys), wire.KEYS_PER_REQUEST_MAX):
            part = self._keys[start : start + wire.KEYS_PER_REQUEST_MAX]
            channel.submit(
                wire.Op.MATCH,
                answer,
                body=wire.join_keys(part),
                count=len(part),
                deadline_s=self._deadline_s,
            )

    def on_answer(self, answer: NodeAnswer) -> None:
        """One node has told all it knows."""
        self._pending.pop(answer, None)
        self.present |= answer.present
        self._check()

    def on_failure(self, answer: NodeAnswer) -> None:
        """One node will not answer; the next one is asked."""
        if self._pending.pop(answer, None) is not None:
            self._ask_further()
            self._check()

    def _check(self) -> None:
        if self.done.done():
            return
        if not self._pending or self.present.all():
            self.settle()
        elif len(self._pending) < NODES_ASKED and self._patience is None and self.present.any():
            self._patience = self._loop.call_later(SECOND_ANSWER_WAIT_S, self.settle)

    def settle(self) -> None:
        """Answers that come later are not listened to."""
        if self._patience is not None:
            self._patience.cancel()
        for answer, channel in self._pending.items():
            channel.detach(answer)
        self._pending.clear()
        if not self.done.done():
            self.done.set_result(None)


class NodeAnswer:
    """One node's bitmaps, for one or more requests of at most 1,024 keys."""

    def __init__(self, question: GroupMatch, key_count: int) -> None:
        self.is_detached = False
        self.present: NDArray[np.bool_] = np.zeros(key_count, np.bool_)
        self._question = question
        self._known = 0

    def on_frame(self, header: wire.Header, body: bytearray) -> Sequence[memoryview]:
        count = min(len(self.present) - self._known, wire.KEYS_PER_REQUEST_MAX)
        if header.count != count or len(body) != -(-count // 8) or not header.is_last:
            raise wire.FrameError(f"bitmap of {header.count} bits, expected {count}")
        bits = np.unpackbits(np.frombuffer(body, np.uint8), bitorder="little")
        self.present[self._known : self._known + count] = bits[:count]
        self._known += count
        return ()

    def on_payload(self) -> None:
        """There is none: `on_frame` names no place, and the channel refuses one."""

    def on_end(self) -> None:
        if self._known == len(self.present) and not self.is_detached:
            self._question.on_answer(self)

    def on_failure(self, error: NodeError) -> None:
        if not self.is_detached:
            self._question.on_failure(self)
