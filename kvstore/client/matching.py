"""How many leading blocks of a chain are stored: a question to two nodes of each group.

Any node of a group can answer for its blocks, since it holds a shard of each. Two are asked, and
what either has counts as there: a node whose disk was replaced knows nothing, and must not turn
every hit into a miss. The answer is a hint; only a fetched block is a fact. A group with fewer
than k nodes that can be reached has no block, whatever one of them says.
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
from .inquiry import SingleFrameSink, require_single_frame
from .router import Lane, Router, split_into_batches

NODES_ASKED = 2
PATIENCE_S = 0.02
"""A node that is silent for so long costs the question to one more node, not the whole deadline."""


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
    *,
    is_probe: bool = False,
) -> NDArray[np.bool_]:
    """For each block from `first_block` on: is it believed to be stored?

    `is_probe`: nobody wants to read them, so what is absent is no miss in the nodes' statistics.
    """
    questions = [
        GroupMatch(router, keys, blocks, loop, deadline_s, is_probe=is_probe)
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
    """Blocks of each group, in pieces that fit a request."""
    groups: dict[str, list[int]] = {}
    for start, end in split_into_batches(first_block, len(keys), batch_blocks=SPAN_BLOCKS):
        blocks = groups.setdefault(router.span_of(keys, start).group.name, [])
        blocks.extend(range(start, end))
    size = wire.KEYS_PER_REQUEST_MAX
    return [
        blocks[at : at + size] for blocks in groups.values() for at in range(0, len(blocks), size)
    ]


class GroupMatch:
    """The question to one group about at most 1,024 blocks. `present[i]`: block `blocks[i]` is
    believed to be stored."""

    def __init__(
        self,
        router: Router,
        keys: Sequence[bytes],
        blocks: list[int],
        loop: asyncio.AbstractEventLoop,
        deadline_s: float,
        *,
        is_probe: bool,
    ) -> None:
        self.blocks = blocks
        self.present: NDArray[np.bool_] = np.zeros(len(blocks), np.bool_)
        self.done: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._deadline_s = deadline_s
        self._is_probe = is_probe
        self._body = wire.join_keys([keys[block] for block in blocks])
        self._answered = 0
        self._patience: asyncio.TimerHandle | None = None
        self._pending: dict[NodeAnswer, NodeChannel] = {}
        channels = router.shard_channels(router.span_of(keys, blocks[0]), Lane.READ)
        reachable = [one for one in channels if one.health.is_available]
        reachable.sort(key=lambda one: delay_class(one.health.delay_s))
        self._unasked = reachable if len(reachable) >= router.map.code.k else []
        for _ in range(NODES_ASKED):
            self._ask_further()
        self._check()

    def _ask_further(self) -> None:
        if not self._unasked or self.done.done():
            return
        channel = self._unasked.pop(0)
        answer = NodeAnswer(self, len(self.blocks))
        self._pending[answer] = channel
        channel.submit(
            wire.Op.MATCH,
            answer,
            body=self._body,
            count=len(self.blocks),
            deadline_s=self._deadline_s,
            is_probe=self._is_probe,
        )
        if self._patience is not None:
            self._patience.cancel()
        self._patience = self._loop.call_later(PATIENCE_S, self._ask_further)

    def on_answer(self, answer: NodeAnswer, present: NDArray[np.bool_]) -> None:
        """One node has told what it has."""
        self._pending.pop(answer, None)
        self._answered += 1
        self.present |= present
        self._check()

    def on_failure(self, answer: NodeAnswer) -> None:
        """One node will not answer; the next one is asked."""
        self._pending.pop(answer, None)
        self._ask_further()
        self._check()

    def _check(self) -> None:
        is_enough = self._answered >= NODES_ASKED or bool(self.present.all())
        if is_enough or not self._pending:
            self.settle()

    def settle(self) -> None:
        """Answers that come later are not listened to."""
        if self._patience is not None:
            self._patience.cancel()
        for answer, channel in self._pending.items():
            channel.detach(answer)
        self._pending.clear()
        if not self.done.done():
            self.done.set_result(None)


class NodeAnswer(SingleFrameSink):
    """One node's bitmap. Once detached it knows nothing of the question any more."""

    def __init__(self, question: GroupMatch, key_count: int) -> None:
        self._question: GroupMatch | None = question
        self._key_count = key_count
        self._present: NDArray[np.bool_] = np.zeros(key_count, np.bool_)

    def detach(self) -> None:
        super().detach()
        self._question = None

    def on_frame(self, header: wire.Header, body: bytes) -> Sequence[memoryview]:
        require_single_frame(header)
        if header.count != self._key_count or len(body) != -(-self._key_count // 8):
            raise wire.FrameError(f"bitmap of {header.count} bits, expected {self._key_count}")
        bits = np.unpackbits(np.frombuffer(body, np.uint8), bitorder="little")
        self._present = bits[: self._key_count].astype(np.bool_)
        return ()

    def on_end(self) -> None:
        if self._question is not None:
            self._question.on_answer(self, self._present)

    def on_failure(self, error: NodeError) -> None:
        if self._question is not None:
            self._question.on_failure(self)
