"""What the mover of NIXL does when the package fails, and what it gives back. That it moves the
right bytes is tested with the other movers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import cast

import numpy as np
import pytest
import torch

from engine.block_pool import BlockPool
from engine.errors import DeviceLost, MoverUnavailable, TransferFailed, TransferStuck
from engine.kv import mover as mover_module
from engine.kv import nixl_transfer, polling
from engine.kv.choose_mover import make_fastest
from engine.kv.mover import wait_to_end
from engine.kv.nixl_mover import BOUNCE_BYTES, NixlMover
from engine.kv.pinned import RETRY_S, address_of
from kvstore.layout import BlockLayout, Section
from tests.engine.kv.fake_nixl import FakeNixl
from tests.engine.waiting import DEADLINE_S

LAYOUT = BlockLayout((Section("a", 640), Section("b", 1280)))
BLOCKS = 6


class Host:
    """A mover over a fake package, and an arena that may be another one later."""

    mover: NixlMover

    def __init__(self) -> None:
        self.nixl = FakeNixl()
        self.pool = BlockPool(block_bytes=LAYOUT.block_bytes, capacity_blocks=BLOCKS)
        self.arena = self.map_arena()
        self.now_s = 0.0

    def map_arena(self) -> memoryview:
        return np.zeros(BLOCKS * LAYOUT.block_bytes, np.uint8).data

    def make_mover(self, lent: memoryview | None = None) -> NixlMover:
        return NixlMover(
            self.pool,
            LAYOUT,
            arena=lambda: self.arena,
            clock=lambda: self.now_s,
            lent=lent,
            api=self.nixl.module,
        )

    def refuse_more(self) -> None:
        """The package has no room for what is not registered yet."""
        self.nixl.room_bytes = sum(self.nixl.registered.values())

    def is_direct(self, part: memoryview) -> bool:
        """Move two blocks there and back: whether the package was given their own addresses, and
        not those of a buffer."""
        part[:] = bytes(range(256)) * (part.nbytes // 256)
        expected, count = bytes(part), len(self.nixl.handles)
        wait_to_end(self.mover.to_pool(part, 0, [3, 1]))
        part[:] = bytes(part.nbytes)
        wait_to_end(self.mover.from_pool(part, 0, [3, 1]))
        assert bytes(part) == expected
        rows = [row for handle in self.nixl.handles[count:] for row in handle.local.tolist()]
        first = address_of(part)
        inside = {first <= start and start + size <= first + part.nbytes for start, size, _ in rows}
        assert len(inside) == 1
        return inside == {True}

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


def test_arena_is_registered_before_anything_is_moved(host: Host) -> None:
    host.mover = host.make_mover()
    assert address_of(host.arena) in host.nixl.registered
    assert host.is_direct(host.part(2))
    assert not host.is_direct(np.zeros(1280, np.uint8).data)


def test_arena_that_cannot_be_registered_is_a_mover_that_is_not_to_be_had(host: Host) -> None:
    host.make_mover().close()
    host.nixl.room_bytes = host.pool.memory.nbytes + 2 * BOUNCE_BYTES
    with pytest.raises(MoverUnavailable, match=r"bytes of the host: NIXL_ERR_NO_ROOM$"):
        host.make_mover()
    assert host.nixl.registered == {}


def test_arena_of_an_agent_that_came_back_and_cannot_be_registered_goes_through_the_buffer(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs speed and no transfer; and is not tried again for every part."""
    host.mover = host.make_mover()
    host.arena = np.zeros(2 * host.arena.nbytes, np.uint8).data
    host.refuse_more()
    for _ in range(3):
        assert not host.is_direct(host.part(2))
    (told,) = [one.getMessage() for one in caplog.records]
    assert "NIXL_ERR_NO_ROOM; blocks go through a small buffer" in told
    host.nixl.room_bytes = 1 << 40
    assert not host.is_direct(host.part(2))
    host.now_s = RETRY_S
    assert host.is_direct(host.part(2))


def test_next_arena_is_tried_at_once(host: Host) -> None:
    host.mover = host.make_mover()
    host.arena = np.zeros(2 * host.arena.nbytes, np.uint8).data
    host.refuse_more()
    assert not host.is_direct(host.part(2))
    host.arena = host.map_arena()
    assert host.is_direct(host.part(2))


def test_memory_that_it_is_measured_with_is_moved_as_the_arena_is(host: Host) -> None:
    """Through the buffer it would hardly ever be the fastest, and so never be chosen."""
    lent = host.map_arena()
    widths = [section.bytes for section in LAYOUT.sections]
    chosen = make_fastest(
        {"nixl": lambda: host.make_mover(lent)}, host.pool, widths, lent, clock=time.monotonic
    )
    assert isinstance(chosen.mover, NixlMover)
    first, end = address_of(lent), address_of(lent) + lent.nbytes
    rows = [row for handle in host.nixl.handles for row in handle.local.tolist()]
    assert rows
    assert all(first <= start and start + size <= end for start, size, _ in rows)
    host.mover = chosen.mover
    host.mover.forget(lent)
    assert first not in host.nixl.registered
    assert host.is_direct(host.part(2))


def test_load_goes_through_the_buffer_beside_a_save_that_has_not_ended(host: Host) -> None:
    mover = host.make_mover()
    lock, _ = mover._bounces["READ"]
    with lock, ThreadPoolExecutor(1) as threads:
        load = threads.submit(mover.to_pool, np.zeros(1280, np.uint8).data, 0, [3, 1])
        assert load.result(DEADLINE_S).has_ended
    reads, writes = mover._bounces["READ"][1], mover._bounces["WRITE"][1]
    assert address_of(writes) + writes.nbytes == address_of(reads)


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


@pytest.mark.parametrize("call", ["initialize_xfer", "transfer", "check_xfer_state"])
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
    assert len(told) == 3  # buffer, arena, pool
    assert all("stays registered until the process ends" in line for line in told)
