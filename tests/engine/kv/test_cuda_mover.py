"""What a mover for a GPU does when its work cannot be queued. That it moves the right bytes is
tested with the other movers, where there is a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from threading import Lock
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest
import torch

from engine.block_pool import BlockPool
from engine.errors import DeviceLost, TransferFailed
from engine.kv import cuda_mover
from engine.kv.bounce import PinnedBounce
from engine.kv.cuda_mover import CudaMover, Lane
from engine.kv.cuda_runtime import CudaRuntime
from engine.kv.mover import ComputeMark, EndedTransfer, Transfer
from engine.kv.per_block_mover import PerBlockMover
from engine.kv.pinned import PinnedMemory
from kvstore.layout import BlockLayout, Section

GPU = torch.device("cuda", 0)


class Mark:
    """Of what a pass had been given to do, which is over when a test says so."""

    is_over = False

    def query(self) -> bool:
        return self.is_over


class Queued(EndedTransfer):
    """What was queued before the failure. Notes whether the lane was free while it was waited
    for."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self.found_free: list[bool] = []

    def wait(self) -> None:
        self.found_free.append(not self._lock.locked())


class LaneOfNothing(Lane):
    """Its streams are names."""

    @property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        return cast("tuple[torch.cuda.Stream, ...]", ("copies", "kernels"))


@pytest.fixture
def lane() -> Lane:
    """Of a GPU that is not there."""
    lane = object.__new__(LaneOfNothing)
    lane.lock, lane._marks = Lock(), ()
    lane.on_device = cast("torch.cuda.device", nullcontext())
    return lane


@pytest.fixture
def mover() -> CudaMover:
    mover = object.__new__(PerBlockMover)
    mover._device = GPU
    return mover


@pytest.mark.parametrize(
    ("error", "said", "kind"),
    [
        (ValueError("too many words"), "too many words", TransferFailed),
        (FileNotFoundError(2, "No such file", "nvcc"), "No such file: 'nvcc'", TransferFailed),
        (torch.OutOfMemoryError("full\nand advice"), "full", TransferFailed),
        (torch.AcceleratorError("lost\nand advice"), "lost", DeviceLost),
        (DeviceLost("cudaMemcpyAsync: lost"), "cudaMemcpyAsync: lost", DeviceLost),
    ],
)
def test_what_was_queued_before_a_failure_is_waited_for_while_others_may_queue(
    lane: Lane,
    mover: CudaMover,
    error: Exception,
    said: str,
    kind: type[TransferFailed],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queued = Queued(lane.lock)

    mark = cast("torch.cuda.Event", Mark())

    def list_queued(
        device: torch.device, *streams: object, behind: tuple[ComputeMark, ...]
    ) -> list[Queued]:
        assert lane.lock.locked(), "another call may have queued more"
        assert (device, streams, behind) == (GPU, ("copies", "kernels"), (mark,))
        return [queued]

    def fail() -> NoReturn:
        raise error

    monkeypatch.setattr(cuda_mover, "all_queued", list_queued)
    with pytest.raises(TransferFailed, match=f"{said}$") as raised:
        mover._start(lane, fail, mark)
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)
    assert queued.found_free == [True]
    assert not lane.lock.locked()


def test_transfer_stands_behind_all_that_its_streams_were_told_to_wait_for(
    lane: Lane, mover: CudaMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its deadline would begin while another one's pass still keeps it."""
    made: list[tuple[Mark, ...]] = []

    def make(*_: object, behind: tuple[Mark, ...]) -> Transfer:
        made.append(behind)
        return EndedTransfer()

    def start(mark: Mark | None) -> tuple[Mark, ...]:
        event = cast("torch.cuda.Event", object())
        mover._start(lane, lambda: event, cast("torch.cuda.Event", mark))
        return made[-1]

    monkeypatch.setattr(cuda_mover, "EventTransfer", make)
    first, later, last = Mark(), Mark(), Mark()
    assert start(None) == ()
    assert start(later) == (later,)
    assert start(first) == (later, first)
    assert start(first) == (later, first)
    assert start(None) == (later, first)
    first.is_over = later.is_over = True
    assert start(last) == (last,)


@pytest.mark.parametrize("is_in", [True, False], ids=["in", "out"])
def test_part_that_waits_for_a_pass_does_not_keep_the_buffer_from_others(
    lane: Lane, mover: CudaMover, is_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of memory that is not page-locked."""
    steps: list[str] = []
    mark = Mark()

    def query() -> bool:
        steps.append("wait")
        return True

    monkeypatch.setattr(mark, "query", query)
    bounce = SimpleNamespace(move=lambda *_, is_in: steps.append("in" if is_in else "out"))
    pinned = SimpleNamespace(use=lambda *_: nullcontext())
    mover._pinned = cast("PinnedMemory", pinned)
    lane.bounce = cast("PinnedBounce", bounce)
    other = object.__new__(LaneOfNothing)
    mover._in, mover._out = (lane, other) if is_in else (other, lane)
    memory = torch.zeros(4, dtype=torch.uint8)
    mover._device = memory.device
    after = cast("torch.cuda.Event", mark)
    if is_in:
        mover.copy_in(memoryview(bytearray(4)), memory, after=after)
    else:
        mover.copy_out(memory, memoryview(bytearray(4)), after=after)
    assert steps == ["wait", "in" if is_in else "out"]


def test_saves_and_loads_have_a_buffer_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for its pieces keeps none of the other direction."""
    bounces: list[object] = []

    def make_lane(device: torch.device, bounce: object) -> object:
        bounces.append(bounce)
        return object()

    monkeypatch.setattr(cuda_mover, "Lane", make_lane)
    layout = BlockLayout((Section("a", 1_024),))
    memory = SimpleNamespace(data_ptr=lambda: 0, device=GPU)
    pool = SimpleNamespace(block_bytes=1_024, capacity_blocks=1, device=GPU, memory=memory)
    runtime, pinned = cast("CudaRuntime", object()), cast("PinnedMemory", object())
    PerBlockMover(cast("BlockPool", pool), layout, pinned=pinned, runtime=runtime)
    assert len(bounces) == 2
    assert bounces[0] is not bounces[1]
