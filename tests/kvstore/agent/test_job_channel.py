"""Messages and descriptors between the agent and a worker, over a real socket."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvstore.agent.job_channel import JobChannel
from kvstore.agent.jobs import (
    CancelJob,
    FetchPiece,
    NamespaceSpec,
    OrderMessage,
    Ping,
    order_decoder,
)
from tests.kvstore.agent.arena_runs import SectionedBlocks
from tests.patience import PATIENCE_S

NAMESPACE = NamespaceSpec.of(SectionedBlocks(1, seed=1).namespace)


@dataclass
class Ends:
    """A channel that gets orders, and what it was told; and the raw other end."""

    channel: JobChannel[OrderMessage] = field(init=False)
    raw: socket.socket = field(init=False)
    got: list[tuple[int, OrderMessage]] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        ours, self.raw = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        self.raw.setblocking(False)
        self.channel = JobChannel(
            ours,
            order_decoder,
            loop=asyncio.get_running_loop(),
            on_message=self._take,
            on_end=self.ended.append,
        )

    def _take(self, number: int, order: OrderMessage) -> None:
        self.got.append((number, order))
        if isinstance(order, FetchPiece):
            self.descriptors.append(self.channel.take_descriptor())


@pytest.fixture
async def ends() -> Iterator[Ends]:  # type: ignore[misc]
    before = len(os.listdir("/proc/self/fd"))
    it = Ends()
    yield it
    it.channel.close()
    it.channel.close()
    it.raw.close()
    for descriptor in it.descriptors:
        os.close(descriptor)
    assert len(os.listdir("/proc/self/fd")) == before


def order(keys: int, piece: int = 0) -> FetchPiece:
    return FetchPiece(
        namespace=NAMESPACE,
        keys=bytes(range(32)) * keys,
        first_block=0,
        run_offset=4096,
        run_blocks=keys,
        place=0,
        piece=piece,
        is_by_layer=False,
        deadline_s=1.0,
    )


def sender_of(ends: Ends) -> JobChannel[OrderMessage]:
    """The agent's end, over the raw socket's descriptor."""
    return JobChannel(
        ends.raw,
        order_decoder,
        loop=asyncio.get_running_loop(),
        on_message=lambda _number, _message: None,
        on_end=lambda _: None,
    )


def fill_descriptors_below(limit: int) -> list[int]:
    """Takes all that are free."""
    taken: list[int] = []
    while not taken or taken[-1] < limit:
        taken.append(os.dup(0))
    os.close(taken.pop())
    return taken


async def until(is_true: object) -> None:
    assert callable(is_true)
    async with asyncio.timeout(PATIENCE_S):
        while not is_true():
            await asyncio.sleep(0.001)


async def test_each_message_arrives_with_its_own_descriptor(ends: Ends) -> None:
    sender = sender_of(ends)
    pipes = [os.pipe() for _ in range(3)]
    for number, (_, write_end) in enumerate(pipes):
        # Longer than the socket's buffer, so that it goes in several parts.
        sender.send(number + 1, order(16_384, piece=number), write_end)
        sender.send(number + 1, CancelJob())
        sender.send(0, Ping())
    await until(lambda: len(ends.got) == 9)
    sender.close()
    numbers = [number for number, _ in ends.got]
    assert numbers == [1, 1, 0, 2, 2, 0, 3, 3, 0]
    pieces = [one for _, one in ends.got if isinstance(one, FetchPiece)]
    assert pieces == [order(16_384, piece=number) for number in range(3)]
    for number, descriptor in enumerate(ends.descriptors):
        os.write(descriptor, bytes([number]))
    for number, (read_end, write_end) in enumerate(pipes):
        assert os.read(read_end, 10) == bytes([number])
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (struct.pack("<II", 1 << 30, 1), "a message of 1073741824 bytes"),
        (struct.pack("<II", 4, 1) + b"\xc1\xc1\xc1\xc1", "not one of our messages"),
        (struct.pack("<II", 1, 1) + b"\x80", "not one of our messages"),
    ],
)
async def test_malformed_message_ends_the_channel(ends: Ends, sent: bytes, reason: str) -> None:
    ends.raw.send(sent)
    await until(lambda: ends.ended)
    assert reason in ends.ended[0]
    assert ends.got == []
    ends.channel.send(1, Ping())
    assert ends.raw.recv(10) == b""


async def test_end_of_the_other_side_is_told_once_and_after_its_last_message(ends: Ends) -> None:
    sender = sender_of(ends)
    sender.send(7, Ping())
    sender.close()
    ends.channel.read_rest()
    await asyncio.sleep(0.01)
    assert ends.got == [(7, Ping())]
    assert ends.ended == ["closed by the other side"]


async def test_sending_to_a_side_that_is_gone_ends_the_channel(ends: Ends) -> None:
    ends.raw.close()
    ends.channel.send(1, Ping())
    assert len(ends.ended) == 1
    assert "pipe" in ends.ended[0].lower()


async def test_channel_ends_when_a_descriptor_that_came_cannot_be_had(ends: Ends) -> None:
    sender = sender_of(ends)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = fill_descriptors_below(used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
    try:
        sender.send(1, order(1), 0)
        await until(lambda: ends.ended)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)
    sender.close()
    assert ends.ended == ["no descriptor is left for one that came"]
    assert ends.got == []


async def test_descriptor_that_nobody_took_is_closed_with_the_channel(ends: Ends) -> None:
    sender = sender_of(ends)
    read_end, write_end = os.pipe()
    sender.send(1, Ping(), write_end)
    await until(lambda: ends.got)
    sender.close()
    os.close(write_end)
    ends.channel.close()
    # The last copy of the write end is gone.
    assert os.read(read_end, 1) == b""
    os.close(read_end)
