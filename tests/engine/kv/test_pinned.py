"""What is page-locked stays mapped, and an arena that takes another's place is locked anew."""

import os
import weakref
from collections.abc import Iterator
from threading import Event

import pytest
import torch

from engine.errors import ArenaNotPinned, DeviceLost, TransferFailed, TransferStuck
from engine.kv import mover, pinned
from engine.kv.lock_limits import LockLimits
from engine.kv.pinned import RETRY_S, ArenaPin, PinnedMemory, address_of
from kvstore.arena.region import ArenaRegion

SIZE_BYTES = 1 << 20
HOST = torch.device("cpu")
PLENTY = LockLimits(available_bytes=1 << 40, group_left_bytes=None, memlock_bytes=None)
LITTLE = LockLimits(available_bytes=4096, group_left_bytes=None, memlock_bytes=None)


class Registrations:
    """What a runtime is asked to lock: addresses. Nothing is locked, as there is no GPU."""

    def __init__(self) -> None:
        self.locked: set[int] = set()
        self.fails = False
        self.is_lost = False
        self.is_idle = Event()
        self.is_idle.set()
        self.changed = Event()

    def register(self, address: int, size_bytes: int, device: torch.device) -> None:
        if self.fails:
            raise TransferFailed("no room")
        assert address not in self.locked
        self.locked.add(address)
        self.changed.set()

    def unregister(self, address: int) -> None:
        self.locked.remove(address)

    def synchronize(self, device: torch.device) -> None:
        """Something runs as long as `is_idle` is not set; a device may be lost, too."""
        assert self.is_idle.wait(60)
        if self.is_lost:
            raise DeviceLost("an illegal memory access")


class Host:
    """A client's arena, which may go and come back, and the page-locking beside it."""

    def __init__(self) -> None:
        self.runtime = Registrations()
        self.memory = PinnedMemory(self.runtime, HOST)  # type: ignore[arg-type]
        self.region = self.map_new()
        self.limits = PLENTY
        self.now_s = 0.0
        self.pin = ArenaPin(
            lambda: self.region.view[:],
            self.memory,
            clock=lambda: self.now_s,
            limits=lambda: self.limits,
        )

    def map_new(self) -> ArenaRegion:
        descriptor = ArenaRegion.create(SIZE_BYTES)
        try:
            return ArenaRegion(descriptor)
        finally:
            os.close(descriptor)

    def is_locked(self) -> bool:
        with self.memory.use(address_of(self.region.view), SIZE_BYTES) as found:
            return found is not None

    def wait(self) -> None:
        assert self.pin._again is not None
        self.pin._again.join(60)
        assert not self.pin._again.is_alive()


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.pin.close()
    host.memory.close()
    assert not host.runtime.locked
    host.region.close()


def test_arena_of_an_agent_that_came_back_is_not_taken_for_the_one_before(host: Host) -> None:
    host.pin.pin()
    before = address_of(host.region.view)
    host.region.close()  # as a client does that has lost its agent
    host.region = host.map_new()
    assert address_of(host.region.view) != before
    assert not host.is_locked()
    host.wait()
    assert host.is_locked()
    assert host.runtime.locked == {address_of(host.region.view)}
    assert host.pin.status.problem is None


def test_arena_without_room_is_tried_again_after_a_while(host: Host) -> None:
    host.limits = LITTLE
    with pytest.raises(ArenaNotPinned, match="cannot be pinned"):
        host.pin.pin()
    host.limits = PLENTY
    assert not host.is_locked()
    assert not host.runtime.locked
    host.now_s = RETRY_S
    assert not host.is_locked()
    host.wait()
    assert host.is_locked()


def test_arena_that_cannot_be_locked_is_told_and_the_old_one_is_let_go(host: Host) -> None:
    host.pin.pin()
    host.region.close()
    host.region = host.map_new()
    host.runtime.fails = True
    assert not host.is_locked()
    host.wait()
    assert not host.runtime.locked
    assert "no room" in str(host.pin.status.problem)
    assert host.pin.status.pinned_bytes == 0


def test_nothing_maps_the_old_arena_when_there_has_to_be_room_for_the_new_one(host: Host) -> None:
    """Else a host would need room for two."""
    host.pin.pin()
    old = host.pin._pinned
    assert old is not None
    ref = weakref.ref(old)
    del old
    there: list[bool] = []

    def look() -> LockLimits:
        there.append(ref() is not None)
        return PLENTY

    host.pin._limits = look
    host.region.close()
    host.region = host.map_new()
    assert not host.is_locked()
    host.wait()
    assert there == [False]
    assert host.is_locked()


def test_arena_that_a_long_pass_keeps_is_let_go_of_when_that_is_over() -> None:
    """Else the next one finds no room, and what it is worth is lost for good."""
    host = Host()
    host.memory._device_deadline_s = 0.01
    host.pin.pin()
    before = address_of(host.region.view)
    host.runtime.is_idle.clear()
    host.region.close()
    host.region = host.map_new()
    assert not host.is_locked()
    host.wait()
    assert host.runtime.locked == {before}
    assert "cpu has not ended for" in str(host.pin.status.problem)
    host.runtime.is_idle.set()
    assert not host.is_locked()
    assert host.runtime.locked == {before}, "not at each part"
    host.memory._device_deadline_s = 60
    host.now_s = RETRY_S
    assert not host.is_locked()
    host.wait()
    assert host.is_locked()
    assert host.runtime.locked == {address_of(host.region.view)}
    host.pin.close()
    host.memory.close()
    assert not host.runtime.locked
    host.region.close()


def test_arena_that_a_long_pass_kept_is_let_go_of_at_the_end() -> None:
    runtime = Registrations()
    memory = PinnedMemory(runtime, HOST, device_deadline_s=0.01)  # type: ignore[arg-type]
    old = memory.pin(bytearray_view())
    runtime.is_idle.clear()
    for _ in range(2):
        with pytest.raises(TransferStuck):
            memory.unpin(old)
    runtime.is_idle.set()
    memory.close()
    assert not runtime.locked


@pytest.fixture
def left_behind(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is left behind by a test, which is nobody else's."""
    before = len(mover.left_behind)
    monkeypatch.setattr(pinned, "left_behind", left := mover.left_behind[before:])
    return left


def test_memory_of_a_device_that_hangs_stays_locked_and_is_told(
    left_behind: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Registrations()
    memory = PinnedMemory(runtime, HOST, device_deadline_s=0.01)  # type: ignore[arg-type]
    first, second = memory.pin(bytearray_view()), memory.pin(bytearray_view())
    runtime.is_idle.clear()
    with pytest.raises(TransferStuck, match="cpu has not ended for"):
        memory.unpin(first)
    memory.close()
    memory.close()
    assert runtime.locked == {first.start, second.start}
    assert left_behind == [first, second]
    assert f"{2 * SIZE_BYTES} bytes stay page-locked" in caplog.text
    runtime.is_idle.set()


def test_memory_of_a_device_that_is_lost_is_told_in_one_line(
    left_behind: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Registrations()
    memory = PinnedMemory(runtime, HOST)  # type: ignore[arg-type]
    range_ = memory.pin(bytearray_view())
    runtime.is_lost = True
    memory.close()
    assert left_behind == [range_]
    assert [one.getMessage() for one in caplog.records] == [
        f"{SIZE_BYTES} bytes stay page-locked until the process ends: an illegal memory access"
    ]


def bytearray_view() -> memoryview:
    return memoryview(bytearray(SIZE_BYTES))
