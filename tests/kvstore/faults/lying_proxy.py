"""A node that lies: a real kvstored behind a proxy that changes what it says.

Each lie is a function from a request and the true answer to the bytes that are sent instead. HELLO
is passed on as it is, so that the client believes whom it talks to.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore import wire
from kvstore.client.store_client import StoreClient
from kvstore.cluster.entities import ClusterMap


@dataclass(frozen=True)
class Frame:
    """One frame of an answer, taken apart."""

    header: wire.Header
    body: bytes
    payload: bytes

    def pack(self, **changes: Any) -> bytes:  # noqa: ANN401 (fields of Header)
        """The frame's bytes, with header fields changed and every checksum right."""
        header = dataclasses.replace(self.header, **changes)
        head = wire.pack_frame(
            wire.Op(header.op),
            header.kind,
            request_id=header.request_id,
            body=self.body,
            count=header.count,
            payload_bytes=header.payload_bytes,
            epoch=header.epoch,
            status=header.status,
            target=header.target,
            is_last=header.is_last,
        )
        return head + self.payload


Lie = Callable[[list[Frame]], AsyncIterator[bytes]]


async def flips_a_byte_of_each_payload(frames: list[Frame]) -> AsyncIterator[bytes]:
    for frame in frames:
        payload = bytearray(frame.payload)
        if payload:
            payload[len(payload) // 2] ^= 1
        yield dataclasses.replace(frame, payload=bytes(payload)).pack()


async def lies_consistently(frames: list[Frame]) -> AsyncIterator[bytes]:
    """Other bytes, with a payload checksum that fits them: only the block's checksum can tell."""
    for frame in frames:
        if frame.header.op != wire.Op.READ or not frame.payload:
            yield frame.pack()
            continue
        payload = bytes(byte ^ 0xFF for byte in frame.payload)
        records = np.frombuffer(frame.body, wire.PART_RECORD, offset=8).copy()
        at = 0
        for record in records:
            if record["status"] == 1:
                size = int(record["payload_bytes"])
                record["payload_xxh3"] = xxh3_64_intdigest(payload[at : at + size])
                at += size
        body = frame.body[:8] + records.tobytes()
        yield dataclasses.replace(frame, body=body, payload=payload).pack()


def lies_consistently_of_block(block: int) -> Lie:
    """As `lies_consistently`, of one block of a batch that fits one frame; all else truly."""

    async def lie(frames: list[Frame]) -> AsyncIterator[bytes]:
        for frame in frames:
            if frame.header.op != wire.Op.READ or not frame.payload:
                yield frame.pack()
                continue
            records = np.frombuffer(frame.body, wire.PART_RECORD, offset=8).copy()
            size = int(records[block]["payload_bytes"])
            payload = bytearray(frame.payload)
            wrong = bytes(byte ^ 0xFF for byte in payload[block * size : (block + 1) * size])
            payload[block * size : (block + 1) * size] = wrong
            records[block]["payload_xxh3"] = xxh3_64_intdigest(wrong)
            body = frame.body[:8] + records.tobytes()
            yield dataclasses.replace(frame, body=body, payload=bytes(payload)).pack()

    return lie


def _is_heads(frame: Frame) -> bool:
    """Does the frame tell of shards without bringing them?"""
    return frame.header.op == wire.Op.READ and not frame.payload and frame.header.count > 0


async def lies_about_heads(frames: list[Frame]) -> AsyncIterator[bytes]:
    """Other checksums than those of the shards that it sends truly when asked for them."""
    for frame in frames:
        if not _is_heads(frame):
            yield frame.pack()
            continue
        records = np.frombuffer(frame.body, wire.PART_RECORD, offset=8).copy()
        records["payload_xxh3"] ^= 1
        yield dataclasses.replace(frame, body=frame.body[:8] + records.tobytes()).pack()


def lies_consistently_also_in_heads(checksums: dict[int, int]) -> Lie:
    """As `lies_consistently`, and heads tell of the wrong bytes: `checksums` gives for each true
    payload_xxh3 that of the lie."""

    async def lie(frames: list[Frame]) -> AsyncIterator[bytes]:
        for frame in frames:
            if not _is_heads(frame):
                async for part in lies_consistently([frame]):
                    yield part
                continue
            records = np.frombuffer(frame.body, wire.PART_RECORD, offset=8).copy()
            for record in records:
                true = int(record["payload_xxh3"])
                record["payload_xxh3"] = checksums.get(true, true)
            yield dataclasses.replace(frame, body=frame.body[:8] + records.tobytes()).pack()

    return lie


async def tells_another_version_in_heads(frames: list[Frame]) -> AsyncIterator[bytes]:
    for frame in frames:
        if not _is_heads(frame):
            yield frame.pack()
            continue
        records = np.frombuffer(frame.body, wire.PART_RECORD, offset=8).copy()
        records["block_xxh3"][1::2] ^= 1
        yield dataclasses.replace(frame, body=frame.body[:8] + records.tobytes()).pack()


async def denies_heads(frames: list[Frame]) -> AsyncIterator[bytes]:
    """Says that every third shard is missing when only its head is asked for."""
    for frame in frames:
        if not _is_heads(frame):
            yield frame.pack()
            continue
        records = np.frombuffer(frame.body, wire.PART_RECORD, offset=8).copy()
        records["status"][2::3] = 0
        yield dataclasses.replace(frame, body=frame.body[:8] + records.tobytes()).pack()


async def tells_fewer_heads(frames: list[Frame]) -> AsyncIterator[bytes]:
    for frame in frames:
        if not _is_heads(frame):
            yield frame.pack()
            continue
        body = frame.body[: -wire.PART_RECORD.itemsize]
        yield dataclasses.replace(frame, body=body).pack(count=frame.header.count - 1)


async def never_tells_heads(frames: list[Frame]) -> AsyncIterator[bytes]:
    if _is_heads(frames[0]):
        await asyncio.sleep(3600)
    for frame in frames:
        yield frame.pack()


def refuses_every_second(op: wire.Op) -> Lie:
    """Answers one request of this kind with BUSY, the next one truly, and so on."""
    turns = itertools.count()

    async def lie(frames: list[Frame]) -> AsyncIterator[bytes]:
        if frames[0].header.op == op and next(turns) % 2 == 0:
            async for part in refuses_as_busy(frames):
                yield part
            return
        for frame in frames:
            yield frame.pack()

    return lie


async def claims_another_shard(frames: list[Frame]) -> AsyncIterator[bytes]:
    for frame in frames:
        if frame.header.op != wire.Op.READ:
            yield frame.pack()
            continue
        records = np.frombuffer(frame.body, wire.PART_RECORD, offset=8).copy()
        records["shard"] ^= 1
        yield dataclasses.replace(frame, body=frame.body[:8] + records.tobytes()).pack()


async def flips_a_byte_of_each_body(frames: list[Frame]) -> AsyncIterator[bytes]:
    for frame in frames:
        packed = bytearray(frame.pack())
        packed[wire.HEADER_BYTES] ^= 1
        yield bytes(packed)


async def flips_a_byte_of_each_header(frames: list[Frame]) -> AsyncIterator[bytes]:
    for frame in frames:
        packed = bytearray(frame.pack())
        packed[33] ^= 0x80
        yield bytes(packed)


async def sends_garbage_before_the_header(frames: list[Frame]) -> AsyncIterator[bytes]:
    yield bytes(range(7))
    for frame in frames:
        yield frame.pack()


async def announces_a_shorter_payload(frames: list[Frame]) -> AsyncIterator[bytes]:
    for frame in frames:
        if not frame.payload:
            yield frame.pack()
            continue
        shorter = dataclasses.replace(frame, payload=frame.payload[:-64])
        yield shorter.pack(payload_bytes=len(shorter.payload))


async def announces_a_longer_payload(frames: list[Frame]) -> AsyncIterator[bytes]:
    for frame in frames:
        longer = dataclasses.replace(frame, payload=frame.payload + bytes(64))
        yield longer.pack(payload_bytes=len(longer.payload))


async def announces_an_enormous_payload(frames: list[Frame]) -> AsyncIterator[bytes]:
    for frame in frames:
        yield frame.pack(payload_bytes=2**64 - 1)


async def never_stops_sending(frames: list[Frame]) -> AsyncIterator[bytes]:
    last = frames[-1]
    for frame in frames[:-1]:
        yield frame.pack()
    while True:
        yield last.pack(is_last=False)
        await asyncio.sleep(0.001)


async def answers_another_request(frames: list[Frame]) -> AsyncIterator[bytes]:
    for frame in frames:
        yield frame.pack(request_id=frame.header.request_id + 1)


async def stops_in_the_middle_of_a_payload(frames: list[Frame]) -> AsyncIterator[bytes]:
    packed = frames[0].pack()
    yield packed[: len(packed) - len(frames[0].payload) // 2]
    await asyncio.sleep(3600)


async def closes_in_the_middle_of_a_payload(frames: list[Frame]) -> AsyncIterator[bytes]:
    packed = frames[0].pack()
    yield packed[: len(packed) - len(frames[0].payload) // 2]
    raise ConnectionAbortedError


async def never_answers(_frames: list[Frame]) -> AsyncIterator[bytes]:
    await asyncio.sleep(3600)
    yield b""


async def takes_a_second_for_each_answer(frames: list[Frame]) -> AsyncIterator[bytes]:
    await asyncio.sleep(1.0)
    for frame in frames:
        yield frame.pack()


async def takes_a_tenth_of_a_second(frames: list[Frame]) -> AsyncIterator[bytes]:
    await asyncio.sleep(0.1)
    for frame in frames:
        yield frame.pack()


async def sends_a_byte_at_a_time(frames: list[Frame]) -> AsyncIterator[bytes]:
    for byte in itertools.chain.from_iterable(frame.pack() for frame in frames):
        yield bytes([byte])
        await asyncio.sleep(0.001)


async def refuses_as_busy(frames: list[Frame]) -> AsyncIterator[bytes]:
    frame = dataclasses.replace(frames[0], body=b"", payload=b"")
    yield frame.pack(status=wire.Status.BUSY, count=0, payload_bytes=0, is_last=True)


async def refuses_with_an_unknown_status(frames: list[Frame]) -> AsyncIterator[bytes]:
    frame = dataclasses.replace(frames[0], body=b"", payload=b"")
    yield frame.pack(status=777, count=0, payload_bytes=0, is_last=True)


async def says_that_everything_is_missing(frames: list[Frame]) -> AsyncIterator[bytes]:
    for frame in frames:
        if frame.header.op != wire.Op.READ:
            yield frame.pack()
            continue
        records = np.frombuffer(frame.body, wire.PART_RECORD, offset=8).copy()
        records["status"] = 0
        body = frame.body[:8] + records.tobytes()
        yield dataclasses.replace(frame, body=body, payload=b"").pack(payload_bytes=0)


def says_of_itself(statistics: bytes) -> Lie:
    """Answers STAT with these bytes, and all else truly."""

    async def lie(frames: list[Frame]) -> AsyncIterator[bytes]:
        for frame in frames:
            is_stat = frame.header.op == wire.Op.STAT
            yield (dataclasses.replace(frame, body=statistics) if is_stat else frame).pack()

    return lie


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """The next frame; IncompleteReadError if the peer ends before its end."""
    header = wire.parse_header(await reader.readexactly(wire.HEADER_BYTES))
    body = await reader.readexactly(header.body_bytes)
    return Frame(header, body, await reader.readexactly(header.payload_bytes))


def _read_other_keys(request: Frame) -> Frame:
    """The same READ for other keys: each key's bytes go to the place of its neighbour."""
    keys = wire.split_keys(request.body, request.header.count, 8)
    return dataclasses.replace(request, body=request.body[:8] + b"".join(keys[1:] + keys[:1]))


class LyingProxy:
    """Stands in front of one node. `lie` None: tells the truth. `connections` counts those made."""

    def __init__(self, host: str, port: int) -> None:
        self._node = (host, port)
        self.lie: Lie | None = None
        self.reads_other_keys = False
        self.passes_reads = asyncio.Event()
        """READs of shards, not of heads, are passed on to the node when this is set."""
        self.passes_reads.set()
        self.connections = 0

    async def on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serves one client connection until either side ends it."""
        self.connections += 1
        writers = [writer]
        try:
            node_reader, node_writer = await asyncio.open_connection(*self._node)
            writers.append(node_writer)
            with suppress(OSError, asyncio.IncompleteReadError):
                while True:
                    await self._pass_one(reader, writer, node_reader, node_writer)
        finally:
            for one in writers:
                one.transport.abort()

    async def _pass_one(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        node_reader: asyncio.StreamReader,
        node_writer: asyncio.StreamWriter,
    ) -> None:
        request = await read_frame(reader)
        if self.reads_other_keys and request.header.op == wire.Op.READ:
            request = _read_other_keys(request)
        is_read = request.header.op == wire.Op.READ
        if is_read and not wire.parse_read(request.body, request.header.count)[1]:
            await self.passes_reads.wait()
        node_writer.write(request.pack())
        frames = [await read_frame(node_reader)]
        while not frames[-1].header.is_last:
            frames.append(await read_frame(node_reader))
        await self._answer(frames, writer)

    async def _answer(self, frames: list[Frame], writer: asyncio.StreamWriter) -> None:
        if self.lie is None or frames[0].header.op == wire.Op.HELLO:
            for frame in frames:
                writer.write(frame.pack())
        else:
            async for part in self.lie(frames):
                writer.write(part)
                await writer.drain()
        await writer.drain()


@asynccontextmanager
async def lying_client(
    cluster_map: ClusterMap, liars: list[str]
) -> AsyncIterator[tuple[StoreClient, list[LyingProxy]]]:
    """A client that reaches the nodes `liars` through proxies, and those proxies."""
    proxies, servers, tasks = [], [], set[asyncio.Task[None]]()
    accepted: list[asyncio.StreamWriter] = []
    addresses = {}
    for name in liars:
        node = cluster_map.node_by_name[name]
        proxy = LyingProxy(node.host, node.port)

        def serve(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, proxy: LyingProxy = proxy
        ) -> None:
            accepted.append(writer)
            tasks.add(asyncio.ensure_future(proxy.on_connection(reader, writer)))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        addresses[name] = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        proxies.append(proxy)
        servers.append(server)
    nodes = tuple(
        dataclasses.replace(node, address=addresses.get(node.name, node.address))
        for node in cluster_map.nodes
    )
    client = StoreClient(dataclasses.replace(cluster_map, nodes=nodes))
    try:
        yield client, proxies
    finally:
        client.close()
        # Connections that are being accepted become tasks; a server that was closed drops them and
        # leaves their sockets open.
        await _let_the_loop_turn()
        for server in servers:
            server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in accepted:
            writer.transport.abort()  # a task that was cancelled before it began has not
        await _let_the_loop_turn()  # an aborted transport closes its socket a turn later


async def _let_the_loop_turn() -> None:
    """Ten turns and 10 ms: on a busy machine one sleep of 10 ms may be a single turn."""
    for _ in range(10):
        await asyncio.sleep(0.001)
