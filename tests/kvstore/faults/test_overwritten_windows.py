"""Window records that are overwritten while another host reads them, across real agents.

An engine puts records into one agent, whose memory holds one of them at a time: the next one lies
where the one before lay. What a reader gets of that one either does not fit the checksum that came
before it, or is whole. It never fits and differs.
"""

import asyncio
import random
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvstore import wire
from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.local_folder import LocalAgentOptions
from kvstore.client import AgentClient
from kvstore.client.agent_results import WindowFetch
from kvstore.key import Namespace
from kvstore.layout import BlockLayout, Section
from kvstore.window.messages import (
    AnnouncedItem,
    Announcement,
    WindowRequest,
    pack_announcement,
    pack_window_request,
)
from kvstore.window.partition import choose_entrypoint
from kvstore.window.record import WindowHead, layout_prefix_of, parse_head
from tests.kvstore.faults.gate import held_back
from tests.kvstore.node.raw_client import RawClient
from tests.kvstore.window.hosts import BIG_LAYOUT, key_of
from tests.patience import PATIENCE_S

MAKER, READER = "a01", "a02"
RECORD_BYTES = BIG_LAYOUT.block_bytes
NAMESPACE = Namespace(
    model="m", weights="w", tokenizer="t", layout=BlockLayout((Section("kv", 8192),))
)
OPTIONS = LocalAgentOptions(arena_bytes=64 << 20, window_memory_bytes=RECORD_BYTES + (2 << 20))
RECEIVE_BUFFER_BYTES = 64 << 10
ROUNDS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="ca-"))
    try:
        with LocalCluster.start(
            folder / "c",
            nodes=1,
            k=1,
            m=0,
            target_size_bytes=64 << 20,
            agents=2,
            agent_options=OPTIONS,
        ) as it:
            yield it
    finally:
        shutil.rmtree(folder)


@asynccontextmanager
async def engine_of(cluster: LocalCluster, agent: str) -> AsyncIterator[AgentClient]:
    async with AgentClient.connect(cluster.agents.socket(agent)) as client:
        await client.open_namespace(NAMESPACE, window_layout=BIG_LAYOUT)
        yield client


def record_of(number: int) -> bytes:
    return bytes([number]) * RECORD_BYTES


async def put(engine: AgentClient, number: int) -> None:
    assert await engine.put_window(NAMESPACE, key_of(number), record_of(number))


async def fetch(engine: AgentClient, number: int, into: bytearray) -> WindowFetch:
    return await engine.fetch_window(NAMESPACE, key_of(number), into, deadline_s=PATIENCE_S)


async def until_found(engine: AgentClient, number: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await engine.lookup(NAMESPACE, [key_of(number)]) == [None]:
            await asyncio.sleep(0.02)


class PeerOf(RawClient):
    """Another host's connection to an agent, spoken by hand."""

    def __init__(self, cluster: LocalCluster, agent: str) -> None:
        ip, _, port = cluster.map.entrypoint_by_name[agent].address.rpartition(":")
        super().__init__((ip, int(port)), cluster.map.cluster_id, "agent", epoch=0)
        assert self.hello().status is wire.Status.OK

    def begin_to_read(self, number: int, count: int) -> tuple[WindowHead, bytes]:
        """Asks for a record, and takes its head and `count` bytes of it."""
        wanted = WindowRequest(
            key_of(number), NAMESPACE.namespace_id, layout_prefix_of(BIG_LAYOUT), RECORD_BYTES
        )
        self.send(self.frame(wire.Op.WINDOW, body=pack_window_request(wanted)))
        header = wire.parse_header(self.receive(wire.HEADER_BYTES))
        assert (header.count, header.payload_bytes) == (1, RECORD_BYTES)
        return parse_head(self.receive(header.body_bytes)), self.receive(count)


def tell_where(cluster: LocalCluster, number: int, host: str) -> None:
    """Has the directory believe that the host has the record too, and had it last."""
    names = [one.name for one in cluster.map.entrypoints]
    item = AnnouncedItem(key_of(number), RECORD_BYTES, 60_000)
    body = pack_announcement(Announcement(host, 1, 1, items=[item]))
    with PeerOf(cluster, choose_entrypoint(key_of(number), names)) as peer:
        assert peer.ask(wire.Op.ANNOUNCE, body=body, count=1).status is wire.Status.OK


async def test_what_a_slow_reader_gets_of_an_overwritten_record_never_fits_and_differs(
    cluster: LocalCluster, rng: random.Random
) -> None:
    mixed = whole = 0
    async with engine_of(cluster, MAKER) as engine:
        await put(engine, 1)
        with PeerOf(cluster, MAKER) as reader:
            reader.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            for number in range(1, ROUNDS):
                # The first is stopped at its begin, the last is read to its end.
                count = rng.randrange(RECORD_BYTES)
                count = {1: 0, ROUNDS - 1: RECORD_BYTES}.get(number, count)
                head, first = await asyncio.to_thread(reader.begin_to_read, number, count)
                await put(engine, number + 1)
                rest = await asyncio.to_thread(reader.receive, RECORD_BYTES - count)
                payload = first + rest
                if xxh3_64_intdigest(payload) == head.xxh3:
                    assert payload == record_of(number)
                    whole += 1
                else:
                    assert set(payload) <= {number, number + 1}
                    mixed += 1
    assert mixed > 0
    assert whole > 0


async def test_fetch_of_an_engine_misses_a_record_that_is_overwritten_on_its_way(
    cluster: LocalCluster,
) -> None:
    async with engine_of(cluster, MAKER) as maker, engine_of(cluster, READER) as reader:
        await put(maker, 50)
        into = bytearray(RECORD_BYTES)
        await until_found(reader, 50)
        assert (await fetch(reader, 50, into)).is_found
        assert into == record_of(50)
        async with held_back(cluster.map.entrypoint_by_name[MAKER].address) as gate:
            await asyncio.to_thread(tell_where, cluster, 50, gate.address)
            fetching = asyncio.create_task(fetch(reader, 50, into))
            await asyncio.wait_for(gate.is_begun.wait(), PATIENCE_S)
            await put(maker, 51)
            gate.is_open.set()
            result = await fetching
            assert (result.is_found, result.host) == (False, gate.address)
        windows = (await reader.status())["windows"]
        assert (windows["remote_rejected"], windows["remote_found"]) == (1, 1)
        # The engine's own buffer has nothing of it.
        assert into == record_of(50)
        await until_found(reader, 51)
        assert (await fetch(reader, 51, into)).is_found
        assert into == record_of(51)
