"""What the mover of NIXL does when the package fails, and what it gives back. That it moves the
right bytes is tested with the other movers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from threading import Lock
from typing import cast

import numpy as np
import pytest
import torch

from engine.block_pool import BlockPool
from engine.errors import DeviceLost, MoverUnavailable, TransferFailed, TransferStuck
from engine.kv import mover as mover_module
from engine.kv import nixl_transfer, polling
from engine.kv.mover import wait_to_end
from engine.kv.nixl_mover import NixlMover
from kvstore.layout import BlockLayout, Section
from tests.engine.kv.fake_nixl import FakeNixl

LAYOUT = BlockLayout((Section("a", 640), Section("b", 1280)))
BLOCKS = 6


class Host:
    """A mover over a fake package, and an arena that may be another one later."""

    def __init__(self) -> None:
        self.nixl = FakeNixl()
        self.pool = BlockPool(block_bytes=LAYOUT.block_bytes, capacity_blocks=BLOCKS)
        self.arena = self.map_arena()

    def map_arena(self) -> memoryview:
        return np.zeros(BLOCKS * LAYOUT.block_bytes, np.uint8).data

    def make_mover(self) -> NixlMover:
        return NixlMover(self.pool, LAYOUT, arena=lambda: self.arena, api=self.nixl.module)

    def part(self, blocks: int) -> memoryview:
        return self.arena[: blocks * 640]


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A deadline of a few looks; and nothing that one test leaves behind is another's."""
    monkeypatch.setattr(nixl_transfer, "DEADLINE_S", 3 * polling.POLL_FIRST_S)
    before = len(mover_module.left_behind)
    yield
    del mover_module.left_behind[before:]


def test_all_that_was_registered_is_given_back_at_the_end(host: Host) -> None:
    mover = host.make_mover()
    wait_to_end(mover.to_pool(host.part(2), 0, [3, 1]))
    assert len(host.nixl.registered) == 3  # pool, buffer, arena
    mover.close()
    mover.close()
    assert host.nixl.registered == {}
    with pytest.raises(TransferFailed, match="nixl: the mover is closed"):
        mover.to_pool(host.part(2), 0, [3, 1])
    assert host.nixl.registered == {}


def test_arena_of_an_agent_that_came_back_takes_the_place_of_the_one_before(host: Host) -> None:
    mover = host.make_mover()
    wait_to_end(mover.to_pool(host.part(2), 0, [3, 1]))
    before = set(host.nixl.registered)
    host.arena = host.map_arena()
    wait_to_end(mover.to_pool(host.part(2), 0, [3, 1]))
    assert len(set(host.nixl.registered) & before) == 2
    assert len(host.nixl.registered) == 3


def test_arena_is_kept_beside_a_transfer_that_may_be_in_it(host: Host) -> None:
    mover = host.make_mover()
    host.nixl.state = "PROC"
    transfer = mover.to_pool(host.part(2), 0, [3, 1])
    host.arena = host.map_arena()
    mover.to_pool(host.part(2), 0, [4, 5])
    assert len(host.nixl.registered) == 4
    host.nixl.state = "DONE"
    wait_to_end(transfer)
    mover.close()
    assert host.nixl.registered == {}


class BusyLock:
    """Something else happens just before it is taken for the first time."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._lock = Lock()
        self._before: list[Callable[[], None]] = [before]

    def __enter__(self) -> None:
        while self._before:
            self._before.pop()()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_arena_that_is_let_go_of_while_a_transfer_is_begun_is_not_moved_from_by_nixl(
    host: Host,
) -> None:
    mover = host.make_mover()
    part = host.part(2)
    wait_to_end(mover.to_pool(part, 0, [3, 1]))
    part[:] = b"\7" * part.nbytes

    def come_back() -> None:
        host.arena = host.map_arena()
        wait_to_end(mover.to_pool(host.part(1), 0, [5]))

    mover._lock = cast("Lock", BusyLock(come_back))
    wait_to_end(mover.to_pool(part, 0, [3, 1]))
    assert (host.pool.memory[[3, 1], :640] == 7).all()
    mover.close()
    assert host.nixl.registered == {}


class LongPass:
    """A mark of a pass that is over when it has been looked at three times."""

    looks = 0

    def query(self) -> bool:
        self.looks += 1
        return self.looks >= 3


def test_pass_before_a_transfer_is_waited_for(host: Host) -> None:
    mover, mark = host.make_mover(), LongPass()
    wait_to_end(mover.to_pool(host.part(2), 0, [3, 1], after=cast("torch.cuda.Event", mark)))
    assert mark.looks == 3
    mover.close()


@pytest.mark.parametrize(
    ("fault", "is_lost"),
    [(torch.OutOfMemoryError, False), (torch.AcceleratorError, True), (RuntimeError, False)],
)
def test_device_that_does_not_copy_is_a_transfer_that_failed(
    host: Host, monkeypatch: pytest.MonkeyPatch, fault: type[RuntimeError], is_lost: bool
) -> None:
    def fail(*_: object) -> None:
        raise fault("CUDA error: no luck\nand advice")

    mover, memory = host.make_mover(), torch.zeros(4, dtype=torch.uint8)
    monkeypatch.setattr(torch.Tensor, "copy_", fail)
    for arguments, copy in (
        ((memoryview(bytearray(4)), memory), mover.copy_in),
        ((memory, memoryview(bytearray(4))), mover.copy_out),
    ):
        with pytest.raises(TransferFailed, match=r"^nixl: a copy: CUDA error: no luck$") as raised:
            cast("Callable[..., object]", copy)(*arguments)
        assert isinstance(raised.value, DeviceLost) is is_lost
    mover.close()


@pytest.mark.parametrize("call", ["nixl_agent", "register_memory"])
def test_package_that_fails_at_the_start_is_a_mover_that_is_not_to_be_had(
    host: Host, call: str
) -> None:
    host.nixl.fails = {call}
    with pytest.raises(MoverUnavailable, match=f"mover nixl: .*NIXL_ERR_{call.upper()}$"):
        host.make_mover()
    host.nixl.fails, host.nixl.backends = set(), []
    with pytest.raises(MoverUnavailable, match="mover nixl: its backend UCX"):
        host.make_mover()


def test_what_was_registered_before_the_failure_is_given_back(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: NixlMover, memory: memoryview) -> None:
        raise TransferFailed("nixl: no room")

    monkeypatch.setattr(NixlMover, "_register", fail)
    with pytest.raises(MoverUnavailable, match="no room"):
        host.make_mover()
    assert host.nixl.registered == {}


@pytest.mark.parametrize(
    "call", ["initialize_xfer", "transfer", "check_xfer_state", "register_memory"]
)
def test_package_that_fails_in_a_transfer_is_a_transfer_that_failed(host: Host, call: str) -> None:
    mover = host.make_mover()
    host.nixl.fails = {call}
    with pytest.raises(TransferFailed, match=f"^nixl: .*NIXL_ERR_{call.upper()}$"):
        wait_to_end(mover.to_pool(host.part(2), 0, [3, 1]))
    host.nixl.fails = set()
    wait_to_end(mover.to_pool(host.part(2), 0, [3, 1]))
    mover.close()
    assert not host.nixl.is_moving
    assert host.nixl.registered == {}


def test_transfer_that_ends_in_an_error_is_released(host: Host) -> None:
    mover = host.make_mover()
    host.nixl.state = "ERR"
    with pytest.raises(TransferFailed, match="nixl: a transfer ended as ERR"):
        wait_to_end(mover.to_pool(host.part(2), 0, [3, 1]))
    assert not host.nixl.is_moving


def test_transfer_that_cannot_be_ended_is_not_called_ended(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """Its memory may still be written to."""
    mover = host.make_mover()
    host.nixl.state, host.nixl.fails = "ERR", {"release_xfer_handle"}
    transfer = mover.to_pool(host.part(2), 0, [3, 1])
    with pytest.raises(TransferStuck):
        transfer.wait()
    assert len(caplog.records) == 1, "told once, however often it is looked at"
    host.nixl.fails = set()
    with pytest.raises(TransferFailed, match="ended as ERR"):
        transfer.wait()


def test_transfer_that_never_ends_keeps_its_memory_registered_and_is_told(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    mover = host.make_mover()
    host.nixl.state = "PROC"
    transfer = mover.to_pool(host.part(2), 0, [3, 1])
    with pytest.raises(TransferStuck):
        transfer.wait()
    mover.close()
    assert len(host.nixl.registered) == 3
    assert "mover nixl: 1 transfers have not ended" in caplog.text
    assert any(one is mover for one in mover_module.left_behind)


def test_memory_that_cannot_be_deregistered_is_told(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    mover = host.make_mover()
    host.nixl.fails = {"deregister_memory"}
    mover.close()
    told = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert len(told) == 2
    assert all("stays registered until the process ends" in line for line in told)
