"""What a mover for a GPU does when its work cannot be queued. That it moves the right bytes is
tested with the other movers, where there is a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from threading import Lock
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest
import torch

from engine.errors import DeviceLost, TransferFailed
from engine.kv import cuda_mover
from engine.kv.cuda_mover import CudaMover, Lane
from engine.kv.mover import EndedTransfer
from engine.kv.per_block_mover import PerBlockMover

GPU = torch.device("cuda", 0)


class Queued(EndedTransfer):
    """What was queued before the failure. Notes whether the lane was free while it was waited
    for."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self.found_free: list[bool] = []

    def wait(self) -> None:
        self.found_free.append(not self._lock.locked())


@pytest.fixture
def lane() -> Lane:
    """Of a GPU that is not there."""
    lane = SimpleNamespace(lock=Lock(), on_device=nullcontext(), streams=("copies", "kernels"))
    return cast("Lane", lane)


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

    def list_queued(device: torch.device, *streams: object) -> list[Queued]:
        assert lane.lock.locked(), "another call may have queued more"
        assert (device, streams) == (GPU, ("copies", "kernels"))
        return [queued]

    def fail() -> NoReturn:
        raise error

    monkeypatch.setattr(cuda_mover, "all_queued", list_queued)
    with pytest.raises(TransferFailed, match=f"{said}$") as raised:
        mover._start(lane, fail, None)
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)
    assert queued.found_free == [True]
    assert not lane.lock.locked()
