"""Window records across hosts: real sockets, three entrypoints, one event loop."""

import asyncio
import dataclasses
import random
import socket

import pytest

from kvstore.errors import InvalidArgument
from kvstore.window.directory_host import HOST_SILENT_S
from kvstore.window.entrypoint_link import MOVED_KEPT_S
from kvstore.window.partition import choose_entrypoint
from kvstore.window.service import EXPIRE_INTERVAL_S
from tests.kvstore.window.hosts import (
    BIG_LAYOUT,
    LAYOUT,
    NAMESPACE,
    V41_LAYOUT,
    Fleet,
    Host,
    address_of,
    bytes_of,
    free_listener,
    key_of,
    open_fleet,
    wait_until_found,
)
from tests.patience import until


def entries(fleet: Fleet) -> int:
    """Entries of all parts together."""
    return sum(host.directory.entries for host in fleet.hosts if host.directory is not None)


def share_of(name: str, numbers: range, names: list[str]) -> list[int]:
    return [number for number in numbers if choose_entrypoint(key_of(number), names) == name]


async def found_by(host: Host, numbers: list[int] | range) -> list[int]:
    """The records that the host finds somewhere."""
    where = await host.lookup(*numbers)
    return [number for number, found in zip(numbers, where, strict=True) if found is not None]


async def test_record_is_found_on_another_host_and_arrives_whole() -> None:
    async with open_fleet() as fleet:
        fleet.open_entrypoints("e1", "e2", "e3")
        maker, reader = fleet.open("maker"), fleet.open("reader")
        maker.put(*range(60))
        await until(lambda: entries(fleet) == 60)
        assert await reader.lookup(*range(60), 99) == [maker.address] * 60 + [None]
        for number in range(60):
            assert await reader.fetch(number) == bytes_of(number)
        assert await reader.fetch(99) is None
        assert reader.service.counters.remote_found == 60


async def test_record_of_the_real_size_arrives_whole() -> None:
    async with open_fleet() as fleet:
        fleet.open_entrypoints("e1")
        maker, reader = fleet.open("maker"), fleet.open("reader")
        record = random.Random(7).randbytes(V41_LAYOUT.block_bytes)
        assert maker.service.put(key_of(1), NAMESPACE, V41_LAYOUT, record)
        await until(lambda: entries(fleet) == 1)
        into = memoryview(bytearray(V41_LAYOUT.block_bytes))
        result = await reader.service.fetch(NAMESPACE, V41_LAYOUT, key_of(1), into, 2.0)
        assert (result.is_found, result.host) == (True, maker.address)
        assert into == record


async def test_own_memory_is_asked_first_and_needs_nobody() -> None:
    async with open_fleet() as fleet:
        host = fleet.open("alone")
        host.put(1, 2)
        assert await host.lookup(1, 3, 2) == ["", None, ""]
        assert await host.fetch(2) == bytes_of(2)
        assert await host.fetch(3) is None
        # A record that is here is not asked of the directory, whoever may answer there.
        fleet.add_to_map(("gone", "127.0.0.1:9"))
        assert await host.fetch(1) == bytes_of(1)


@pytest.mark.parametrize("role", ["maker is an entrypoint", "reader is an entrypoint"])
async def test_entrypoint_serves_its_own_part_to_itself(role: str) -> None:
    async with open_fleet() as fleet:
        (entrypoint,) = fleet.open_entrypoints("e1")
        other = fleet.open("other")
        maker, reader = (entrypoint, other) if role.startswith("maker") else (other, entrypoint)
        maker.put(1)
        await until(lambda: entries(fleet) == 1)
        assert await reader.lookup(1) == [maker.address]
        assert await reader.fetch(1) == bytes_of(1)


async def test_record_is_not_given_to_another_namespace_or_layout() -> None:
    async with open_fleet() as fleet:
        fleet.open_entrypoints("e1")
        maker, reader = fleet.open("maker"), fleet.open("reader")
        maker.put(1)
        await until(lambda: entries(fleet) == 1)
        into = memoryview(bytearray(LAYOUT.block_bytes))
        for host in (maker, reader):
            result = await host.service.fetch(b"another 16 bytes", LAYOUT, key_of(1), into, 1.0)
            assert not result.is_found
            assert into == bytes(LAYOUT.block_bytes)


async def test_evicted_records_are_withdrawn() -> None:
    async with open_fleet() as fleet:
        fleet.open_entrypoints("e1", "e2")
        maker = fleet.open("maker", memory_bytes=10 * LAYOUT.block_bytes)
        reader = fleet.open("reader")
        maker.put(*range(10))
        await until(lambda: entries(fleet) == 10)
        maker.put(10, 11, 12)
        await asyncio.sleep(0.2)
        assert entries(fleet) == 10
        assert await found_by(reader, range(13)) == list(range(3, 13))
        assert reader.service.counters.withdrawn == 0


async def test_records_expire_here_and_in_the_directory() -> None:
    async with open_fleet() as fleet:
        fleet.open_entrypoints("e1")
        maker, reader = fleet.open("maker"), fleet.open("reader")
        maker.put(1, 2)
        await until(lambda: entries(fleet) == 2)
        for host in fleet.hosts:
            host.clock.ahead_s = 179.0
        assert await found_by(reader, range(1, 3)) == [1, 2]
        for host in fleet.hosts:
            host.clock.ahead_s = 180.1
        assert await found_by(reader, range(1, 3)) == []
        assert await maker.fetch(1) is None
        await until(lambda: len(maker.pool) == entries(fleet) == 0)


async def test_shorter_ttl_is_obeyed_by_records_that_are_there() -> None:
    async with open_fleet() as fleet:
        fleet.open_entrypoints("e1")
        maker, reader = fleet.open("maker"), fleet.open("reader")
        maker.put(1)
        await until(lambda: entries(fleet) == 1)
        maker.ttl_s = 0.01
        assert await maker.fetch(1) is None
        await until(lambda: entries(fleet) == 0)
        assert await reader.lookup(1) == [None]


async def test_stale_entry_costs_one_failed_fetch_and_is_removed() -> None:
    async with open_fleet() as fleet:
        fleet.open_entrypoints("e1", "e2")
        maker, reader = fleet.open("maker"), fleet.open("reader")
        maker.put(1)
        await until(lambda: entries(fleet) == 1)
        maker.pool.remove(key_of(1))  # and nobody is told
        assert await reader.lookup(1) == [maker.address]
        assert await reader.fetch(1) is None
        await until(lambda: entries(fleet) == 0)
        assert await reader.lookup(1) == [None]
        counters = reader.service.counters
        assert (counters.remote_absent, counters.withdrawn) == (1, 1)


async def test_entry_at_another_entrypoint_than_its_own_harms_nobody() -> None:
    """A share may have moved just now, and not all hosts know; or nobody withdrew its entries."""
    async with open_fleet() as fleet, open_fleet() as behind:
        (old,) = fleet.open_entrypoints("e1")
        part = old.directory
        assert part is not None
        behind.add_to_map(("e1", old.address))
        maker, reader = fleet.open("maker"), fleet.open("reader")
        late = behind.open("late")
        maker.put(*range(40))
        await until(lambda: entries(fleet) == 40)
        fleet.open_entrypoints("e2")
        first, second = share_of("e2", range(40), ["e1", "e2"])[:2]
        await wait_until_found(reader, range(40))
        # Who has the old map finds the record by the old entry.
        assert await late.lookup(first) == [maker.address]
        assert await late.fetch(first) == bytes_of(first)
        # Of one that is gone the old entry costs a fetch in vain, and is removed by that.
        maker.pool.remove(key_of(second))
        assert await late.fetch(second) is None
        assert late.service.counters.withdrawn == 1
        await until(lambda: part.look_up([key_of(second)]) == [None])
        # With the new map nobody asks there, whatever the old entrypoint still says.
        assert part.look_up([key_of(first)]) == [maker.address]


async def test_older_copy_is_found_when_the_newest_entry_is_stale() -> None:
    async with open_fleet() as fleet:
        fleet.open_entrypoints("e1")
        first, second, reader = (fleet.open(name) for name in ("first", "second", "reader"))
        first.put(1)
        await until(lambda: entries(fleet) == 1)
        second.put(1)
        await until(lambda: entries(fleet) == 2)
        second.pool.remove(key_of(1))
        assert await reader.lookup(1) == [second.address]
        assert await reader.fetch(1) is None
        await until(lambda: entries(fleet) == 1)
        assert await reader.lookup(1) == [first.address]
        assert await reader.fetch(1) == bytes_of(1)


async def test_entry_is_removed_when_its_host_cannot_be_reached() -> None:
    async with open_fleet() as fleet:
        fleet.open_entrypoints("e1")
        maker, reader = fleet.open("maker"), fleet.open("reader")
        maker.put(1, 2)
        await until(lambda: entries(fleet) == 2)
        await fleet.stop(maker, is_killed=True)
        assert await reader.fetch(1) is None
        assert await reader.fetch(2) is None  # the host is left alone now: no second attempt
        assert reader.service.counters.remote_unreachable == 1
        assert reader.service.counters.skipped == 1
        await until(lambda: entries(fleet) == 1)
        # The rest of what it had is forgotten with it.
        directory = fleet.hosts[0].directory
        assert directory is not None
        await fleet.leap(HOST_SILENT_S)
        assert directory.silent_hosts == 1
        assert await reader.lookup(2) == [None]


async def test_entries_stay_when_more_is_fetched_at_once_than_a_connection_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_fleet() as fleet:
        (reader,) = fleet.open_entrypoints("e1")
        maker = fleet.open("maker")
        maker.put(*range(20))
        await until(lambda: entries(fleet) == 20)
        assert await reader.fetch(0) == bytes_of(0)
        monkeypatch.setattr("kvstore.client.channel.REQUESTS_OUTSTANDING_MAX", 3)
        fetched = await asyncio.gather(*(reader.fetch(number) for number in range(20)))
        monkeypatch.undo()
        assert [found for found in fetched if found] == [bytes_of(n) for n in range(3)]
        counters = reader.service.counters
        assert (counters.skipped, counters.withdrawn, counters.remote_unreachable) == (17, 0, 0)
        for number in range(20):
            assert await reader.fetch(number) == bytes_of(number)


async def test_host_that_was_given_no_time_is_asked_again_at_once() -> None:
    async with open_fleet() as fleet:
        (reader,) = fleet.open_entrypoints("e1")
        maker = fleet.open("maker")
        assert maker.service.put(key_of(1), NAMESPACE, BIG_LAYOUT, bytes(16 << 20))
        await until(lambda: entries(fleet) == 1)
        into = memoryview(bytearray(BIG_LAYOUT.block_bytes))
        fetch = reader.service.fetch
        assert not (await fetch(NAMESPACE, BIG_LAYOUT, key_of(1), into, 0.005)).is_found
        assert (await fetch(NAMESPACE, BIG_LAYOUT, key_of(1), into, 2.0)).is_found


async def test_record_that_memory_has_spoilt_is_a_miss_here_too_and_goes() -> None:
    async with open_fleet() as fleet:
        fleet.open_entrypoints("e1")
        maker = fleet.open("maker")
        maker.put(1, 2)
        await until(lambda: entries(fleet) == 2)
        record = maker.pool.peek(key_of(1))
        assert record is not None
        buffer = record.view.obj
        assert isinstance(buffer, bytearray)
        buffer[100] ^= 8
        assert await maker.fetch(1) is None
        assert await maker.fetch(2) == bytes_of(2)
        assert maker.pool.counters.rejected == 1
        await until(lambda: entries(fleet) == 1)


async def test_hosts_are_not_forgotten_when_their_entrypoint_stood_still() -> None:
    async with open_fleet() as fleet:
        (entrypoint,) = fleet.open_entrypoints("e1")
        maker, reader = fleet.open("maker"), fleet.open("reader")
        maker.put(*range(5))
        await until(lambda: entries(fleet) == 5)
        entrypoint.clock.ahead_s += 30.0
        await asyncio.sleep(3 * EXPIRE_INTERVAL_S)
        assert entrypoint.directory is not None
        assert entrypoint.directory.silent_hosts == 0
        assert await found_by(reader, range(5)) == list(range(5))


async def test_host_that_is_told_of_a_record_it_has_no_more_withdraws_it() -> None:
    async with open_fleet() as fleet:
        fleet.open_entrypoints("e1")
        maker = fleet.open("maker")
        maker.put(1)
        await until(lambda: entries(fleet) == 1)
        maker.pool.remove(key_of(1))  # and nobody is told
        assert await maker.lookup(1) == [None]
        await until(lambda: entries(fleet) == 0)


async def test_host_that_ends_in_order_leaves_no_entries() -> None:
    async with open_fleet() as fleet:
        fleet.open_entrypoints("e1", "e2")
        maker, reader = fleet.open("maker"), fleet.open("reader")
        maker.put(*range(20))
        await until(lambda: entries(fleet) == 20)
        await fleet.stop(maker)
        assert await found_by(reader, range(20)) == []


async def test_entries_come_back_when_an_entrypoint_begins_anew() -> None:
    async with open_fleet() as fleet:
        points = fleet.open_entrypoints("e1", "e2", "e3")
        maker, reader = fleet.open("maker"), fleet.open("reader")
        maker.put(*range(300))
        await until(lambda: entries(fleet) == 300)
        lost = share_of("e2", range(300), ["e1", "e2", "e3"])
        await fleet.restart(points[1])
        assert await found_by(reader, lost) == []
        await wait_until_found(reader, range(300))
        assert entries(fleet) == 300


async def test_only_the_share_of_a_dead_entrypoint_is_lost_and_moves() -> None:
    async with open_fleet() as fleet:
        points = fleet.open_entrypoints("e1", "e2", "e3")
        maker, reader = fleet.open("maker"), fleet.open("reader")
        maker.put(*range(300))
        await until(lambda: entries(fleet) == 300)
        kept = {point.name: point.directory.entries for point in points if point.directory}
        lost = share_of("e2", range(300), ["e1", "e2", "e3"])
        await fleet.stop(points[1], is_killed=True)
        others = [number for number in range(300) if number not in set(lost)]
        assert await found_by(reader, lost) == []
        await wait_until_found(reader, others)
        await wait_until_found(reader, range(300))
        # Nothing else moved: each of the others has what it had, and its part of the lost share.
        names = ["e1", "e3"]
        for point in (points[0], points[2]):
            assert point.directory is not None
            moved = sum(choose_entrypoint(key_of(n), names) == point.name for n in lost)
            assert point.directory.entries == kept[point.name] + moved
        # It comes back, with nothing: its share is told to it, and is found there.
        again = socket.create_server(points[1].listener_address, backlog=256)
        back = fleet.open("e2", listener=again, is_entrypoint=True)
        assert back.directory is not None
        part = back.directory
        await until(lambda: part.entries == len(lost))
        await wait_until_found(reader, range(300))
        before = part.lookups
        assert await found_by(reader, lost) == lost
        assert part.lookups == before + len(lost)


async def test_new_entrypoint_in_the_map_takes_over_its_share_and_no_more() -> None:
    async with open_fleet() as fleet:
        fleet.open_entrypoints("e1", "e2")
        maker, reader = fleet.open("maker"), fleet.open("reader")
        maker.put(*range(300))
        await until(lambda: entries(fleet) == 300)
        told_before = maker.service.describe()["announced"]
        (new,) = fleet.open_entrypoints("e3")
        part = new.directory
        assert part is not None
        share = share_of("e3", range(300), ["e1", "e2", "e3"])
        await until(lambda: part.entries == len(share))
        assert maker.service.describe()["announced"] - told_before <= 2 * len(share)
        assert await found_by(reader, range(300)) == list(range(300))
        assert part.lookups == len(share)
        # The two others do not keep what is not theirs any more.
        await fleet.leap(MOVED_KEPT_S)
        await until(lambda: entries(fleet) == 300)
        assert await found_by(reader, range(300)) == list(range(300))
        assert maker.service.describe()["announced"] - told_before <= 3 * len(share)
        # Away with it again: its share goes back to the other two.
        fleet.map = dataclasses.replace(fleet.map, epoch=9, entrypoints=fleet.map.entrypoints[:2])
        await wait_until_found(reader, range(300))


async def test_nothing_is_found_elsewhere_and_nothing_breaks_when_no_entrypoint_answers() -> None:
    async with open_fleet() as fleet:
        fleet.add_to_map(("gone", "127.0.0.1:9"))
        maker, reader = fleet.open("maker"), fleet.open("reader")
        maker.put(*range(5))
        async with asyncio.timeout(20.0):
            keys = [key_of(number) for number in range(5)]
            assert await reader.service.lookup(keys, 60.0) == [None] * 5
            assert await reader.fetch(1, deadline_s=60.0) is None
        assert await found_by(maker, range(5)) == list(range(5))
        # One that is not there yet may come.
        listener = free_listener()
        fleet.add_to_map(("e1", address_of(listener)))
        fleet.open("e1", listener=listener, is_entrypoint=True)
        await wait_until_found(reader, range(5))


async def test_many_keys_are_looked_up_in_pieces() -> None:
    async with open_fleet() as fleet:
        fleet.open_entrypoints("e1", "e2")
        maker, reader = fleet.open("maker"), fleet.open("reader")
        maker.put(5, 2999)
        await until(lambda: entries(fleet) == 2)
        assert await found_by(reader, range(3000)) == [5, 2999]


async def test_lookup_over_three_entrypoints_asks_one_of_them_once() -> None:
    """About 0.13 ms, when nobody else needs the machine."""
    async with open_fleet() as fleet:
        parts = fleet.open_entrypoints("e1", "e2", "e3")
        maker, reader = fleet.open("maker"), fleet.open("reader")
        maker.put(*range(200))
        await until(lambda: entries(fleet) == 200)
        directories = [part.directory for part in parts if part.directory is not None]
        assert len(directories) == 3
        assert [part.lookups for part in directories] == [0, 0, 0]
        for number in range(200):
            assert await reader.lookup(number) == [maker.address]
        asked = [part.lookups for part in directories]
        assert sum(asked) == 200
        assert all(asked), "each has a part of the keys"


async def test_service_is_refused_an_address_that_others_cannot_use() -> None:
    async with open_fleet() as fleet:
        with (
            socket.create_server(("0.0.0.0", 0)) as listener,
            pytest.raises(InvalidArgument, match="address of an agent"),
        ):
            fleet.open("wild", listener=listener)
