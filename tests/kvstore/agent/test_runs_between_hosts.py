"""A run is handed to an engine of another host, over the data plane of agents, with faults."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kvstore import wire
from kvstore.agent.offers import OfferedRun
from kvstore.agent.run_messages import PIECE_BYTES_MAX, RunPiece, pack_piece, pack_take
from kvstore.agent.run_receiver import PIECE_BYTES
from kvstore.agent_messages import OFFER_TTL_S_MAX, RunLeased, TakeRun
from kvstore.client import AgentClient, ArenaRun, BlockLayout, Namespace, RunOffer, Section
from kvstore.cluster.address import host_of, port_of
from kvstore.cluster.map import load_cluster_map
from kvstore.errors import AgentUnreachable
from kvstore.window.record import layout_prefix_of
from tests.kvstore.node.raw_client import Answer, RawClient

from .agent_process import AgentProcess

SECTIONS = (22_784, 22_784, 22_784, 45_568)
LAYOUT = BlockLayout(tuple(Section(f"s{number}", size) for number, size in enumerate(SECTIONS)))
NAMESPACE = Namespace(model="hosts", weights="w", tokenizer="t", layout=LAYOUT)
BLOCKS = 100
"""11.4 MB: three pieces."""
LONG_S = 30.0
WORDS = ("--arena", "32MiB", "--window-memory", "1MiB")


@dataclass(frozen=True)
class Hosts:
    """The agent of the host where runs are offered, and that of another one."""

    source: AgentProcess
    other: AgentProcess


@pytest.fixture(scope="module")
def pair(cluster_path: str) -> Iterator[Hosts]:
    with AgentProcess(cluster_path, WORDS) as source, AgentProcess(cluster_path, WORDS) as other:
        yield Hosts(source, other)


@pytest.fixture
def hosts(pair: Hosts) -> Hosts:
    """Both running, whatever a test before did to them."""
    for agent in (pair.source, pair.other):
        if agent.process.poll() is not None:
            agent.kill()
            agent.start()
    return pair


@pytest.fixture
async def giver(hosts: Hosts) -> AsyncIterator[AgentClient]:
    async with AgentClient.connect(hosts.source.socket_path, name="giver") as client:
        yield client


@pytest.fixture
async def taker(hosts: Hosts) -> AsyncIterator[AgentClient]:
    async with AgentClient.connect(hosts.other.socket_path, name="taker") as client:
        yield client


def content_of(section: int, seed: int, length: int) -> bytes:
    return random.Random(seed * 100 + section).randbytes(length)


async def offer_filled(
    client: AgentClient, seed: int, *, blocks: int = BLOCKS, ttl_s: float = LONG_S
) -> RunOffer:
    run = await client.lease_run(NAMESPACE, blocks, deadline_s=LONG_S)
    assert run is not None
    assert run.blocks == blocks
    for section in range(4):
        place = run.section(section)
        place[:] = content_of(section, seed, len(place))
    return await client.offer_run(run, ttl_s=ttl_s)


def holds(run: ArenaRun, seed: int) -> bool:
    parts = [run.section(section) for section in range(4)]
    return all(part == content_of(index, seed, len(part)) for index, part in enumerate(parts))


async def take(client: AgentClient, offer: RunOffer, deadline_s: float = LONG_S) -> ArenaRun | None:
    return await client.take_run(NAMESPACE, offer, deadline_s=deadline_s)


async def until(client: AgentClient, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The agent's status once that is true of it."""
    async with asyncio.timeout(LONG_S):
        while not is_so(status := await client.status(deadline_s=LONG_S)):
            await asyncio.sleep(0.02)
        return status


async def until_free(*clients: AgentClient) -> None:
    for client in clients:
        await until(client, lambda status: status["arena"]["runs"] == 0)


def received(status: dict[str, Any]) -> dict[str, int]:
    """How takes from other hosts ended."""
    return {name: count for name, count in status["offers"].items() if "remote" in name and count}


# The whole way ------------------------------------------------------------------------------------


async def test_run_comes_from_another_host_with_all_its_bytes(
    giver: AgentClient, taker: AgentClient
) -> None:
    before = (await giver.status())["offers"], (await taker.status())["offers"]
    offer = await offer_filled(giver, 1)
    run = await take(taker, offer)
    assert run is not None
    with run:
        assert run.blocks == BLOCKS
        assert holds(run, 1)
        assert run.ready_blocks(0) == 0
        # The source has nothing of it any more.
        await until_free(giver)
        assert await take(taker, offer) is None
        assert await take(giver, offer) is None
    await until_free(taker)
    after = (await giver.status())["offers"], (await taker.status())["offers"]
    assert after[0]["sent"] == before[0]["sent"] + 1
    assert after[0]["sent_bytes"] > before[0]["sent_bytes"] + BLOCKS * LAYOUT.block_bytes - 1
    assert after[1]["remote_found"] == before[1]["remote_found"] + 1
    assert after[1]["remote_absent"] == before[1]["remote_absent"] + 1


async def test_run_is_taken_by_exactly_one_of_both_hosts(
    giver: AgentClient, taker: AgentClient
) -> None:
    for seed in range(6):
        offer = await offer_filled(giver, seed)
        found = await asyncio.gather(
            *(take(client, offer) for client in (taker, giver, taker, taker))
            if seed % 2
            else (take(client, offer) for client in (taker, taker))
        )
        (won,) = [run for run in found if run is not None]
        assert holds(won, seed)
        won.release()
        await until_free(giver, taker)


async def test_run_larger_than_the_other_arena_stays_on_offer(
    cluster_path: str, giver: AgentClient
) -> None:
    small = ("--arena", "2MiB", "--window-memory", "1MiB")
    with AgentProcess(cluster_path, small) as agent:
        async with AgentClient.connect(agent.socket_path) as client:
            offer = await offer_filled(giver, 2)
            assert await take(client, offer, 1.0) is None
            await until_free(client)
    run = await take(giver, offer)
    assert run is not None
    assert holds(run, 2)
    run.release()


async def test_run_stays_on_offer_when_a_part_of_it_has_room_at_the_other_host(
    giver: AgentClient, taker: AgentClient
) -> None:
    filler = await taker.lease_run(NAMESPACE, 250, deadline_s=LONG_S)
    assert filler is not None
    with filler:
        offer = await offer_filled(giver, 12)
        assert await take(taker, offer, 0.4) is None
    await until_free(taker)
    run = await take(taker, offer)
    assert run is not None
    assert holds(run, 12)
    run.release()
    await until_free(giver, taker)


async def test_run_that_the_arena_can_never_hold_is_not_waited_for(hosts: Hosts) -> None:
    """Whoever waited for all of the arena would hold up the others."""
    small = replace(NAMESPACE, layout=BlockLayout((Section("a", 4_096),)))
    with hosts.other.engine() as engine:
        namespace = engine.open(small)
        engine.lease(namespace, 1)
        large = RunOffer(
            ticket=bytes(16),
            host="127.0.0.1:1",
            namespace_id=small.namespace_id,
            layout=small.layout.fingerprint,
            blocks=65_536,
        )
        request = engine.send(take_request(namespace, large))
        assert engine.status()["arena"]["waiting"] == 0
        answer = engine.answer(request)
        assert isinstance(answer, RunLeased)
        assert answer.blocks == 0


async def test_engine_that_dies_while_its_run_comes_leaves_nothing_behind(
    giver: AgentClient, taker: AgentClient, hosts: Hosts
) -> None:
    offer = await offer_filled(giver, 3)
    hosts.source.process.send_signal(signal.SIGSTOP)
    try:
        with hosts.other.engine() as engine:
            namespace = engine.open(NAMESPACE)
            engine.send(take_request(namespace, offer))
            # It has its memory, and waits for bytes.
            await until(taker, lambda status: status["arena"]["runs_by_state"]["fetching"] == 1)
        await until_free(taker)
    finally:
        hosts.source.process.send_signal(signal.SIGCONT)
    run = await take(giver, offer)
    assert run is not None
    assert holds(run, 3)
    run.release()


def take_request(namespace: int, offer: RunOffer) -> TakeRun:
    return TakeRun(
        namespace=namespace,
        ticket=offer.ticket,
        host=offer.host,
        namespace_id=offer.namespace_id,
        layout=offer.layout,
        blocks=offer.blocks,
        deadline_s=LONG_S,
    )


# Faults of either side ----------------------------------------------------------------------------


@asynccontextmanager
async def take_that_hangs(
    hosts: Hosts, giver: AgentClient, taker: AgentClient, seed: int, deadline_s: float = LONG_S
) -> AsyncIterator[tuple[RunOffer, asyncio.Task[ArenaRun | None]]]:
    """An offer, and a take of it whose source stands still: inside, and until it is killed."""
    offer = await offer_filled(giver, seed, ttl_s=OFFER_TTL_S_MAX)
    hosts.source.process.send_signal(signal.SIGSTOP)
    taking = asyncio.create_task(take(taker, offer, deadline_s))
    try:
        # A short one may be over before anybody looks.
        await until(
            taker,
            lambda status: status["arena"]["runs_by_state"]["fetching"] == 1 or taking.done(),
        )
        yield offer, taking
    finally:
        hosts.source.process.send_signal(signal.SIGCONT)


async def test_take_ends_at_its_deadline_when_the_source_stands_still_and_others_go_on(
    hosts: Hosts, giver: AgentClient, taker: AgentClient
) -> None:
    before = received(await taker.status())
    async with take_that_hangs(hosts, giver, taker, 4, 1.0) as (offer, taking):
        # Nobody else of this host waits for it.
        run = await taker.lease_run(NAMESPACE, 1, deadline_s=LONG_S)
        assert run is not None
        run.release()
        assert await taking is None
        assert difference(received(await taker.status()), before) == {"remote_late": 1}
    await until_free(taker)
    # Nobody has taken it: it is to be had still, once the source is asked again.
    async with asyncio.timeout(LONG_S):
        while (run := await take(taker, offer)) is None:
            await asyncio.sleep(0.05)
    assert holds(run, 4)
    run.release()


async def test_take_ends_when_the_source_is_killed_in_the_middle(
    hosts: Hosts, giver: AgentClient, taker: AgentClient
) -> None:
    before = received(await taker.status())
    async with take_that_hangs(hosts, giver, taker, 5) as (_, taking):
        hosts.source.process.send_signal(signal.SIGKILL)
        assert await taking is None
        hosts.source.process.wait(LONG_S)
    await until_free(taker)
    assert difference(received(await taker.status()), before) == {"remote_unreachable": 1}


async def test_run_stays_on_offer_when_the_taking_agent_is_killed_in_the_middle(
    hosts: Hosts, giver: AgentClient, taker: AgentClient
) -> None:
    async with take_that_hangs(hosts, giver, taker, 6) as (offer, taking):
        hosts.other.process.send_signal(signal.SIGKILL)
        with pytest.raises(AgentUnreachable):
            await taking
        hosts.other.process.wait(LONG_S)
    run = await take(giver, offer)
    assert run is not None
    assert holds(run, 6)
    run.release()
    await until_free(giver)


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {
        name: count - before.get(name, 0)
        for name, count in after.items()
        if count != before.get(name, 0)
    }


# What the source answers, frame by frame ----------------------------------------------------------


def peer_of(source: AgentProcess) -> RawClient:
    address = source.ready["address"]
    cluster = load_cluster_map(source.cluster_path).cluster_id
    client = RawClient((host_of(address), port_of(address)), cluster, "agent", epoch=0)
    assert client.hello().status is wire.Status.OK
    return client


def named(offer: RunOffer) -> OfferedRun:
    return OfferedRun(offer.ticket, offer.namespace_id, layout_prefix_of(LAYOUT), offer.blocks)


def ask_piece(peer: RawClient, piece: RunPiece) -> Answer:
    return peer.ask(wire.Op.RUN, body=pack_piece(piece))


async def test_source_gives_any_piece_to_whoever_knows_the_offer_and_the_run_to_one(
    giver: AgentClient, hosts: Hosts
) -> None:
    offer = await offer_filled(giver, 8, blocks=2)
    wanted = named(offer)

    def talk() -> None:
        with peer_of(hosts.source) as first, peer_of(hosts.source) as second:
            for peer in (first, second, first):
                answer = ask_piece(peer, RunPiece(wanted, 100, 2_000))
                (payload,) = answer.payloads
                assert payload == content_of(0, 8, 2 * SECTIONS[0])[100:2_100]
                assert answer.body == xxh3_64_intdigest(payload).to_bytes(8, "little")
            takes = [peer.ask(wire.Op.TAKE, body=pack_take(wanted)) for peer in (second, first)]
            assert [answer.headers[0].count for answer in takes] == [1, 0]
            gone = ask_piece(first, RunPiece(wanted, 0, 10))
            assert (gone.headers[0].count, gone.body, gone.payloads) == (0, b"", [b""])

    await asyncio.to_thread(talk)
    await until_free(giver)


async def test_source_gives_nothing_to_one_who_is_wrong_about_the_offer(
    giver: AgentClient, hosts: Hosts
) -> None:
    offer = await offer_filled(giver, 9, blocks=1)
    wanted = named(offer)
    lies = [
        wanted._replace(ticket=bytes(16)),
        wanted._replace(namespace_id=bytes(16)),
        wanted._replace(layout_prefix=bytes(16)),
        wanted._replace(blocks=2),
        wanted._replace(blocks=0),
    ]

    def talk() -> None:
        with peer_of(hosts.source) as peer:
            for lie in lies:
                assert ask_piece(peer, RunPiece(lie, 0, 10)).headers[0].count == 0
                answer = peer.ask(wire.Op.TAKE, body=pack_take(lie))
                assert (answer.status, answer.headers[0].count) == (wire.Status.OK, 0)
            for start, length in (
                (0, 0),
                (0, PIECE_BYTES_MAX + 1),
                (LAYOUT.block_bytes, 1),
                (2**63, PIECE_BYTES),
                (1, LAYOUT.block_bytes),
            ):
                refused = ask_piece(peer, RunPiece(wanted, start, length))
                assert refused.status is wire.Status.BAD_REQUEST
                assert b"bytes of a run" in refused.body
            assert ask_piece(peer, RunPiece(wanted, 0, LAYOUT.block_bytes)).headers[0].count == 1

    await asyncio.to_thread(talk)
    assert await giver.withdraw_offer(offer)


async def test_source_answers_others_while_one_peer_reads_a_run_and_never_takes_the_bytes(
    giver: AgentClient, hosts: Hosts
) -> None:
    offer = await offer_filled(giver, 10)
    wanted = named(offer)

    def ask_much(peer: RawClient) -> None:
        frames = [
            peer.frame(wire.Op.RUN, body=pack_piece(RunPiece(wanted, 0, PIECE_BYTES_MAX)))
            for _ in range(50)
        ]
        peer.send(b"".join(frames))

    with peer_of(hosts.source) as greedy, peer_of(hosts.source) as other:
        await asyncio.to_thread(ask_much, greedy)
        piece = RunPiece(wanted, 0, 1_000)
        for _ in range(20):
            answer = await asyncio.to_thread(ask_piece, other, piece)
            assert answer.payloads == [content_of(0, 10, BLOCKS * SECTIONS[0])[:1_000]]
        run = await take(giver, offer)
        assert run is not None
        assert holds(run, 10)
        run.release()
    await until_free(giver)


async def test_random_requests_harm_no_offer(giver: AgentClient, hosts: Hosts) -> None:
    offer = await offer_filled(giver, 11, blocks=3)

    def talk() -> None:
        with peer_of(hosts.source) as peer:
            for _ in range(100):
                for op, size in ((wire.Op.RUN, 64), (wire.Op.TAKE, 56)):
                    answer = peer.ask(op, body=os.urandom(size))
                    assert answer.status in (wire.Status.OK, wire.Status.BAD_REQUEST)
                    assert answer.headers[0].count == 0

    await asyncio.to_thread(talk)
    run = await take(giver, offer)
    assert run is not None
    assert holds(run, 11)
    run.release()
