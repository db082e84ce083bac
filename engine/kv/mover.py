"""What moves sections of blocks between the arena and a pool, whatever memory the pool is in.

    to_pool      swap-in: a section of some blocks, consecutive in a run of the arena, into the pool
    from_pool    swap-out: the other way, for saves and hand-overs
    copy_in      bytes that lie together in both, such as parity, into memory of the pool's device
    copy_out     the other way, for window state

On a CPU a mover copies before it returns. On a GPU it starts the transfer and returns: the bytes
are there when the transfer has ended. Not for who may use which block, nor for the way between the
store and the arena.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ..errors import DeviceLost, InvalidRequest, TransferFailed, TransferStuck
from .block_list import BlockList
from .polling import poll

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

COMPUTE_DEADLINE_S = 600.0
"""For a pass, and those queued before it. One that is not over then hangs."""
COMPUTE_TOLD_EVERY_S = 30.0
COMPUTE_POLL_MAX_S = 0.005
"""A pass takes so many times that."""

ComputeMark: TypeAlias = "torch.cuda.Event | None"
"""What a compute stream had been given to do up to a moment. None: nothing has to be waited for."""


class Transfer(Protocol):
    """One call of a mover on its way. May be asked by any thread, as often as one likes."""

    @property
    def has_ended(self) -> bool:
        """Whether all bytes are there. Raises TransferFailed if they never will be."""

    def wait(self) -> None:
        """Return when all bytes are there. Raises TransferFailed: then nothing is written any more
        either; TransferStuck after a deadline, which begins when what it stands behind is computed,
        or if that hangs (`wait_for_compute`): then it is not known."""

    def order_compute(self) -> None:
        """What the calling thread gives to its current stream from now on begins when the bytes are
        there. A GPU waits then, not the thread. Raises as `wait`."""


class SectionMover(Protocol):
    """Moves between one pool and runs of its layout. Its calls may be made by several threads; no
    block is written by two transfers at one time.

    `part` is always a section of consecutive blocks, block after block; the pool's blocks are those
    of `block_ids`, in that order, each once. Both stay as they are until the transfer has ended,
    but for what it writes. Raises InvalidRequest for a part of another length, and for ids that
    are not in the pool or are there twice; TransferFailed if the device takes no more work, or if
    `after` has to be waited for here and hangs: then nothing was begun.
    """

    name: str
    """What people call the way it moves: "memcpy", "staged", "gather", "batched", "per_block" or
    "nixl"."""

    step_bytes: int
    """A part that is still growing is worth moving when it has grown by so much."""

    def mark_compute(self) -> ComputeMark:
        """What the calling thread has given to its current stream so far, to be named as `after`:
        the transfer begins when that is done. For blocks that were computed, or read, just now."""

    def to_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        """Move a section of some blocks into the pool."""

    def from_pool(
        self,
        part: memoryview,
        section: int,
        block_ids: Sequence[int],
        *,
        after: ComputeMark = None,
    ) -> Transfer:
        """Move a section of some blocks out of the pool."""

    def copy_in(
        self, part: memoryview, target: torch.Tensor, *, after: ComputeMark = None
    ) -> Transfer:
        """Copy `part` into `target`: uint8, contiguous, of as many bytes, on the pool's device."""

    def copy_out(
        self, source: torch.Tensor, part: memoryview, *, after: ComputeMark = None
    ) -> Transfer:
        """Copy `source` into `part`; else as `copy_in`."""

    def close(self) -> None:
        """Wait for what is under way and give back what was allocated. What has not ended by a
        deadline is left behind, with its memory, which the log tells. May be called again, and
        nothing else after it."""


class EndedTransfer:
    """A transfer that had ended before it was asked for."""

    has_ended = True

    def wait(self) -> None:
        """Nothing is under way."""

    def order_compute(self) -> None:
        """The bytes are there."""


ENDED = EndedTransfer()


def wait_for_compute(
    mark: ComputeMark, what: str, *, deadline_s: float = COMPUTE_DEADLINE_S
) -> None:
    """For who is about to write into memory that another may take away, such as a run of an agent:
    begun behind a long pass a transfer would write when it is somebody else's. From here on it
    takes milliseconds.

    `what`: that waits, such as "a transfer"; the log has it if it takes long. Raises DeviceLost,
    and TransferStuck after the deadline: then nothing was begun that stands behind the mark.
    """
    if mark is None:
        return
    waited_s = 0.0
    while not _is_computed(mark, step_s := min(COMPUTE_TOLD_EVERY_S, deadline_s - waited_s)):
        waited_s += step_s
        said = f"{what}: what was computed before it has not ended for {waited_s:.0f} s"
        if waited_s >= deadline_s:
            raise TransferStuck(said)
        log.warning("%s; it waits", said)


def _is_computed(mark: torch.cuda.Event, deadline_s: float) -> bool:
    """Whether it is, by then. Raises DeviceLost."""
    try:
        return poll(mark.query, deadline_s, poll_max_s=COMPUTE_POLL_MAX_S)
    except RuntimeError as error:
        raise DeviceLost(f"what was computed before has failed: {first_line(error)}") from error


def wait_to_end(*transfers: Transfer) -> None:
    """Wait for all of them, however long it takes, for whoever holds memory that is moved to or
    from: what is let go of before would be written to, or read, when it is somebody else's. Raises
    TransferFailed, when all have ended, if one has failed; DeviceLost, if one tells of that."""
    failure: TransferFailed | None = None
    for transfer in transfers:
        has_ended = False
        while not has_ended:
            try:
                transfer.wait()
                has_ended = True
            except TransferStuck as error:
                log.error("%s; its blocks stay taken until it has ended", error)
            except TransferFailed as error:
                has_ended = True
                if not isinstance(failure, DeviceLost):
                    failure = error
    if failure is not None:
        raise failure


left_behind: list[object] = []
"""What a device or a NIC may still read or write: it lives as long as the process."""


def wait_at_close(transfers: Sequence[Transfer], name: str, *keeps: object) -> bool:
    """Wait for transfers of a mover that is closed, as long as one of them waits; False if some
    have not ended then. They are left behind, with what they need."""
    is_late, stuck = False, 0
    for transfer in transfers:
        try:
            # A device that lets one of them hang is not waited for again.
            if is_late:
                is_stuck = not transfer.has_ended
            else:
                transfer.wait()
                is_stuck = False
        except TransferStuck:
            is_late = is_stuck = True
        except TransferFailed as error:
            is_stuck = False
            log.error("mover %s, at its end: %s", name, error)
        if is_stuck:
            stuck += 1
            left_behind.extend((transfer, *keeps))
    if stuck:
        log.error("mover %s: %d transfers have not ended; their memory stays taken", name, stuck)
    return not stuck


def first_line(error: BaseException) -> str:
    """What CUDA and PyTorch say of an error, without their advice how to debug it."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def move_out(mover: SectionMover, parts: Sequence[memoryview], block_ids: Sequence[int]) -> None:
    """Move all sections of some blocks, which are computed, out of the pool: every one is started
    before the first is waited for. When this ends, by an error too, nothing writes to `parts` any
    more. Raises as the mover does."""
    blocks = BlockList.of(block_ids)
    transfers: list[Transfer] = []
    try:
        for section, part in enumerate(parts):
            transfers.append(mover.from_pool(part, section, blocks))
    finally:
        wait_to_end(*transfers)


def check_copy(part: memoryview, memory: torch.Tensor, device: torch.device) -> None:
    """Raises InvalidRequest for bytes that cannot be copied as they are."""
    if part.nbytes != memory.nbytes:
        raise InvalidRequest(
            "part to copy", given=f"{part.nbytes} bytes", expected=f"{memory.nbytes} bytes"
        )
    if memory.device != device or not memory.is_contiguous():
        how = "together" if memory.is_contiguous() else "apart"
        raise InvalidRequest(
            "memory to copy",
            given=f"bytes that lie {how} on {memory.device}",
            expected=f"together on {device}",
        )


def check_part(
    part: memoryview, width: int, block_ids: Sequence[int], capacity_blocks: int
) -> BlockList:
    """The ids, if `part` is as long as they say and the pool has them. Raises InvalidRequest."""
    blocks = BlockList.of(block_ids)
    if part.nbytes != len(blocks) * width:
        expected = f"{len(blocks)} blocks of {width} bytes"
        raise InvalidRequest("part of a section", given=f"{part.nbytes} bytes", expected=expected)
    if blocks.id_bound >= capacity_blocks:
        raise InvalidRequest(
            "block ids", given=blocks.id_bound, expected=f"below {capacity_blocks}"
        )
    return blocks
