"""Window records while hosts and entrypoints are killed, stand still, or overwrite what is read.

The hosts that suffer are processes of their own; the one that looks on runs in the test's loop.
"""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest

from kvstore.client import health
from kvstore.window import announcer
from kvstore.window.directory_host import HOST_SILENT_S
from kvstore.window.messages import AnnouncedItem, Announcement
from kvstore.window.partition import choose_entrypoint
from tests.kvstore.faults.gate import Gate, held_back
from tests.kvstore.window.host_process import HostProcess, host_process, start_host
from tests.kvstore.window.hosts import (
    BIG_LAYOUT,
    NAMESPACE,
    Host,
    address_of,
    bytes_of,
    free_listener,
    key_of,
    open_fleet,
    wait_until_found,
)
from tests.patience import OPERATION_S, PATIENCE_S, WELL_BEFORE_S, until

RECORDS = range(120)


@pytest.fixture(autouse=True)
def looks_up_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entrypoint has more than a tenth of a second to answer."""
    monkeypatch.setattr(announcer, "LOOKUP_S_MAX", OPERATION_S)


# The other host -----------------------------------------------------------------------------------


@asynccontextmanager
async def reader_and_maker() -> AsyncIterator[tuple[Host, HostProcess]]:
    """A reader, which is the entrypoint too, and a process that has the records."""
    async with open_fleet() as fleet:
        (reader,) = fleet.open_entrypoints("e1")
        with host_process([("e1", reader.address)]) as maker:
            told = await asyncio.to_thread(maker.tell, "put", *RECORDS)
            assert told == "done"
            await wait_until_found(reader, RECORDS)
            assert await reader.fetch(0) == bytes_of(0)
            yield reader, maker


async def test_fetch_is_a_miss_at_once_when_the_other_host_is_killed() -> None:
    async with reader_and_maker() as (reader, maker):
        maker.kill(signal.SIGKILL)
        maker.process.wait(PATIENCE_S)
        for number in range(1, 4):
            async with asyncio.timeout(WELL_BEFORE_S):
                assert await reader.fetch(number) is None
        # Nobody spoke for it: all its entries are forgotten.
        await reader.fleet.leap(HOST_SILENT_S)
        assert reader.directory is not None
        assert reader.directory.silent_hosts == 1
        assert await reader.lookup(*RECORDS) == [None] * len(RECORDS)


async def test_fetch_keeps_its_deadline_when_the_other_host_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for backoff in ("BACKOFF_FIRST_S", "BACKOFF_MAX_S"):
        monkeypatch.setattr(health, backoff, PATIENCE_S)
    async with reader_and_maker() as (reader, maker):
        maker.kill(signal.SIGSTOP)
        counters = reader.service.counters
        async with asyncio.timeout(WELL_BEFORE_S):
            assert await reader.fetch(1, deadline_s=0.3) is None
        assert (counters.remote_late, counters.skipped) == (1, 0)
        # It is left alone for a moment: the next fetch costs nothing.
        async with asyncio.timeout(WELL_BEFORE_S):
            assert await reader.fetch(2) is None
        assert (counters.remote_late, counters.skipped) == (1, 1)
        maker.kill(signal.SIGCONT)
        reader.clock.ahead_s += PATIENCE_S
        await wait_until_found(reader, RECORDS)
        assert await reader.fetch(3) == bytes_of(3)


async def test_host_that_stood_still_for_long_tells_its_records_again() -> None:
    async with reader_and_maker() as (reader, maker):
        directory = reader.directory
        assert directory is not None
        maker.kill(signal.SIGSTOP)
        await reader.fleet.leap(HOST_SILENT_S)
        assert directory.silent_hosts == 1
        assert await reader.lookup(1, 2) == [None, None]
        maker.kill(signal.SIGCONT)
        await wait_until_found(reader, RECORDS)
        assert await reader.fetch(1) == bytes_of(1)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_fetch_ends_when_the_other_host_fails_in_the_middle_of_a_record(
    fault: signal.Signals,
) -> None:
    async with open_fleet() as fleet:
        (reader,) = fleet.open_entrypoints("e1")
        with host_process([("e1", reader.address)]) as maker:
            assert await asyncio.to_thread(maker.tell, "put-big", 1) == "done"
            await wait_until_found(reader, [1])
            async with held_back(maker.address) as gate:
                into = memoryview(bytearray(BIG_LAYOUT.block_bytes))
                # Nobody ends it for the one that stands still.
                deadline_s = 5.0 if fault is signal.SIGSTOP else PATIENCE_S
                fetching = asyncio.create_task(
                    fetch_through(gate, reader, into, deadline_s=deadline_s)
                )
                await asyncio.wait_for(gate.is_begun.wait(), PATIENCE_S)
                maker.kill(fault)
                gate.is_open.set()
                async with asyncio.timeout(WELL_BEFORE_S):
                    assert not await fetching
                # Nothing is written there any more, whatever still arrives.
                seen = bytes(into)
                if fault is signal.SIGSTOP:
                    maker.kill(signal.SIGCONT)
                await asyncio.sleep(0.2)
                assert into == seen


async def test_record_overwritten_while_it_is_read_is_a_miss_and_its_entry_goes() -> None:
    async with open_fleet() as fleet:
        (reader,) = fleet.open_entrypoints("e1")
        maker = fleet.open("maker", memory_bytes=16 << 20)
        assert maker.service.put(key_of(1), NAMESPACE, BIG_LAYOUT, b"\x11" * (16 << 20))
        await wait_until_found(reader, [1])
        async with held_back(maker.address) as gate:
            into = memoryview(bytearray(BIG_LAYOUT.block_bytes))
            fetching = asyncio.create_task(fetch_through(gate, reader, into, deadline_s=PATIENCE_S))
            await asyncio.wait_for(gate.is_begun.wait(), PATIENCE_S)
            # The new record gets the memory of the old one, of which half is on its way.
            assert maker.service.put(key_of(2), NAMESPACE, BIG_LAYOUT, b"\x22" * (16 << 20))
            gate.is_open.set()
            assert not await fetching
            assert {into[0], into[-1]} == {0x11, 0x22}, "it was not overwritten in the middle"
        assert reader.service.counters.remote_rejected == 1
        assert reader.service.counters.remote_found == 0
        await wait_until_found(reader, [2])
        assert await reader.lookup(1, 2) == [None, maker.address]


async def fetch_through(gate: Gate, reader: Host, into: memoryview, *, deadline_s: float) -> bool:
    """Fetches record 1, which the directory is told to be behind the gate."""
    assert reader.directory is not None
    item = AnnouncedItem(key_of(1), BIG_LAYOUT.block_bytes, 60_000)
    reader.directory.announce(Announcement(gate.address, 1, 1, items=[item]))
    result = await reader.service.fetch(NAMESPACE, BIG_LAYOUT, key_of(1), into, deadline_s)
    assert result.host == gate.address
    return result.is_found


# Entrypoints --------------------------------------------------------------------------------------

NAMES = ["e1", "e2", "e3"]
LOST = [number for number in RECORDS if choose_entrypoint(key_of(number), NAMES) == "e2"]
KEPT = [number for number in RECORDS if number not in LOST]


class Entrypoints:
    """Three entrypoints as processes."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        listeners = [free_listener() for _ in NAMES]
        self.points = list(zip(NAMES, map(address_of, listeners), strict=True))
        self.processes = [
            self._start(name, listener) for name, listener in zip(NAMES, listeners, strict=True)
        ]
        for process in self.processes:
            process.wait_until_ready()

    def _start(self, name: str, listener: socket.socket) -> HostProcess:
        process = start_host(self.points, name=name, listener=listener)
        self._stack.callback(process.end)
        return process

    def restart(self, *indexes: int) -> None:
        """Starts them again on their addresses, and waits until they serve."""
        for index in indexes:
            name, address = self.points[index]
            ip, _, port = address.rpartition(":")
            listener = socket.create_server((ip, int(port)), backlog=256)
            self.processes[index] = self._start(name, listener)
        for index in indexes:
            self.processes[index].wait_until_ready()


@asynccontextmanager
async def maker_and_reader() -> AsyncIterator[tuple[Host, Host, Entrypoints]]:
    """Two hosts in this loop, whose records three entrypoint processes know."""
    with ExitStack() as stack:
        entrypoints = Entrypoints(stack)
        async with open_fleet() as fleet:
            fleet.add_to_map(*entrypoints.points)
            maker, reader = fleet.open("maker"), fleet.open("reader")
            maker.put(*RECORDS)
            await wait_until_found(reader, RECORDS)
            yield maker, reader, entrypoints


def alive(host: Host) -> list[str]:
    """The entrypoints that answer, as the host sees it."""
    return [one["name"] for one in host.service.describe()["entrypoints"] if one["is_alive"]]


def count_share(name: str) -> int:
    return sum(choose_entrypoint(key_of(number), NAMES) == name for number in RECORDS)


async def entries_of(entrypoints: Entrypoints) -> list[int]:
    """How many each of them has, whoever is asked for them."""
    return [await asyncio.to_thread(one.tell, "entries") for one in entrypoints.processes]


async def check_only_the_share_is_lost(reader: Host) -> None:
    """All but the share of e2 is found; a lookup may be late on a busy machine."""
    await wait_until_found(reader, KEPT)
    assert await reader.lookup(*LOST) == [None] * len(LOST)


async def test_only_the_share_of_a_killed_entrypoint_is_lost_and_is_found_elsewhere() -> None:
    async with maker_and_reader() as (_, reader, entrypoints):
        entrypoints.processes[1].kill(signal.SIGKILL)
        entrypoints.processes[1].process.wait(PATIENCE_S)
        async with asyncio.timeout(WELL_BEFORE_S):
            assert await reader.lookup(*LOST) == [None] * len(LOST)
        await check_only_the_share_is_lost(reader)
        await wait_until_found(reader, RECORDS)
        entries = [entrypoints.processes[i].tell("entries") for i in (0, 2)]
        assert sum(entries) == len(RECORDS)


async def test_entries_come_back_when_a_killed_entrypoint_is_started_again() -> None:
    async with maker_and_reader() as (_, reader, entrypoints):
        entrypoints.processes[1].kill(signal.SIGKILL)
        entrypoints.processes[1].process.wait(PATIENCE_S)
        await asyncio.to_thread(entrypoints.restart, 1)
        await wait_until_found(reader, RECORDS)
        assert await reader.fetch(LOST[0]) == bytes_of(LOST[0])
        async with asyncio.timeout(PATIENCE_S):
            while await asyncio.to_thread(entrypoints.processes[1].tell, "entries") != len(LOST):
                await asyncio.sleep(0.05)


async def test_lookup_is_held_up_once_by_an_entrypoint_that_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with maker_and_reader() as (maker, reader, entrypoints):
        entrypoints.processes[1].kill(signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(announcer, "LOOKUP_S_MAX", 0.1)
            async with asyncio.timeout(WELL_BEFORE_S):
                assert await reader.lookup(LOST[0]) == [None]
        async with asyncio.timeout(WELL_BEFORE_S):
            assert await reader.lookup(*LOST) == [None] * len(LOST)
        await check_only_the_share_is_lost(reader)
        await wait_until_found(reader, RECORDS)
        # Its share comes home when it goes on; nobody had to do anything.
        entrypoints.processes[1].kill(signal.SIGCONT)
        await until(lambda: alive(reader) == NAMES)
        await wait_until_found(reader, RECORDS)
        assert await asyncio.to_thread(entrypoints.processes[1].tell, "entries") == len(LOST)
        # And it leaves those that had it meanwhile.
        async with asyncio.timeout(PATIENCE_S):
            while await entries_of(entrypoints) != [count_share(name) for name in NAMES]:
                await asyncio.sleep(0.1)
        assert await reader.lookup(*RECORDS) == [maker.address] * len(RECORDS)


async def test_hosts_go_on_when_all_entrypoints_are_killed_and_come_back() -> None:
    async with maker_and_reader() as (maker, reader, entrypoints):
        for one in entrypoints.processes:
            one.kill(signal.SIGKILL)
            one.process.wait(PATIENCE_S)
        async with asyncio.timeout(WELL_BEFORE_S):
            assert await reader.lookup(*RECORDS) == [None] * len(RECORDS)
            assert await reader.fetch(1) is None
            assert await maker.fetch(1) == bytes_of(1)
        await until(lambda: alive(maker) == [])
        assert maker.service.put(key_of(500), NAMESPACE, BIG_LAYOUT, bytes(16 << 20))
        await asyncio.to_thread(entrypoints.restart, 0, 1, 2)
        await wait_until_found(reader, [*RECORDS, 500])
