"""An engine hands a run to another one of the same host: the same memory, in one hand at a time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from kvstore import agent_messages as m
from kvstore.agent.session_bounds import SessionBounds
from kvstore.client import AgentClient, ArenaRun, BlockLayout, Namespace, RunOffer, Section
from kvstore.errors import AgentRefused, AgentUnreachable, InvalidArgument

from .agent_process import ROOT, AgentProcess
from .engine_steps import WINDOW
from .raw_engine import RawEngine

LAYOUT = BlockLayout((Section("a", 22_784), Section("b", 22_784), Section("c", 45_568)))
NAMESPACE = Namespace(model="offers", weights="w", tokenizer="t", layout=LAYOUT)
BLOCKS = 5
LONG_S = 30.0
DYING_ENGINE = """
import sys, time
from kvstore.client import AgentClient
from tests.kvstore.agent.test_run_offers import BLOCKS, NAMESPACE, fill
agent = AgentClient.open(sys.argv[1], name="dies")
run = agent.lease_run(NAMESPACE, BLOCKS)
fill(run, 7)
offer = agent.offer_run(run)
print(offer.ticket.hex(), offer.host, flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def agent(cluster_path: str) -> Iterator[AgentProcess]:
    with AgentProcess(cluster_path, ("--arena", "16MiB", "--window-memory", "4MiB")) as process:
        yield process


@pytest.fixture
async def giver(agent: AgentProcess) -> AsyncIterator[AgentClient]:
    async with AgentClient.connect(agent.socket_path, name="giver") as client:
        yield client


@pytest.fixture
async def taker(agent: AgentProcess) -> AsyncIterator[AgentClient]:
    async with AgentClient.connect(agent.socket_path, name="taker") as client:
        yield client


def content_of(section: int, seed: int, length: int) -> bytes:
    return bytes((section * 31 + seed + at) % 251 for at in range(64)) * (length // 64)


def fill(run: ArenaRun, seed: int) -> None:
    for section in range(3):
        place = run.section(section)
        place[:] = content_of(section, seed, len(place))


def holds(run: ArenaRun, seed: int) -> bool:
    parts = [run.section(section) for section in range(3)]
    return all(part == content_of(index, seed, len(part)) for index, part in enumerate(parts))


async def offer_filled(client: AgentClient, seed: int, *, ttl_s: float = LONG_S) -> RunOffer:
    run = await client.lease_run(NAMESPACE, BLOCKS, deadline_s=LONG_S)
    assert run is not None
    assert run.blocks == BLOCKS
    fill(run, seed)
    return await client.offer_run(run, ttl_s=ttl_s)


async def until_free(client: AgentClient) -> None:
    async with asyncio.timeout(LONG_S):
        while (await client.status())["arena"]["runs"]:
            await asyncio.sleep(0.02)


async def test_taker_has_the_very_memory_of_the_giver(
    giver: AgentClient, taker: AgentClient
) -> None:
    run = await giver.lease_run(NAMESPACE, BLOCKS)
    assert run is not None
    number = run.number
    fill(run, 1)
    offer = await giver.offer_run(run)
    with pytest.raises(InvalidArgument, match="offered to other engines"):
        run.section(0)
    run.release()  # of no meaning any more
    with pytest.raises(InvalidArgument, match="offered to other engines"):
        await giver.offer_run(run)
    taken = await taker.take_run(NAMESPACE, offer)
    assert taken is not None
    with taken:
        assert (taken.number, taken.blocks) == (number, BLOCKS)
        assert holds(taken, 1)
        # It is like any other run of the taker's.
        keys = NAMESPACE.block_keys(range(BLOCKS * 128))
        assert (await taker.save_run(NAMESPACE, keys, taken)).failed == 0
    await until_free(taker)


async def test_run_that_was_taken_is_fetched_into_and_waited_for(
    giver: AgentClient, taker: AgentClient
) -> None:
    keys = NAMESPACE.block_keys([1] * BLOCKS * 128)
    run = await giver.lease_run(NAMESPACE, BLOCKS)
    assert run is not None
    fill(run, 2)
    assert (await giver.save_run(NAMESPACE, keys, run)).failed == 0
    taken = await taker.take_run(NAMESPACE, await offer_filled(giver, 3))
    assert taken is not None
    with taken:
        assert taken.ready_blocks(0) == 0
        fetch = taker.fetch_run(NAMESPACE, keys, taken, deadline_s=LONG_S)
        assert await taken.until_ready(2, BLOCKS, LONG_S) == BLOCKS
        assert (await fetch).blocks == BLOCKS
        assert holds(taken, 2)


async def test_run_is_taken_by_exactly_one_of_many(agent: AgentProcess, giver: AgentClient) -> None:
    takers = [AgentClient(agent.socket_path, name=f"t{number}") for number in range(4)]
    for one in takers:
        await one.wait_for_first_attempt()
    for seed in range(10):
        offer = await offer_filled(giver, seed)
        found = await asyncio.gather(
            *(one.take_run(NAMESPACE, offer) for one in takers for _ in range(3))
        )
        (won,) = [run for run in found if run is not None]
        assert holds(won, seed)
        won.release()
    for one in takers:
        one.close()
        await one.end_background()
    await until_free(giver)


async def test_run_outlives_the_engine_that_offered_it_and_was_killed(
    agent: AgentProcess, taker: AgentClient
) -> None:
    command = [sys.executable, "-c", DYING_ENGINE, os.fspath(agent.socket_path)]
    engine = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout is not None
        ticket, host = engine.stdout.readline().split()
    finally:
        engine.send_signal(signal.SIGKILL)
        engine.wait(LONG_S)
        assert engine.stdout is not None
        engine.stdout.close()
    async with asyncio.timeout(LONG_S):
        while (await taker.status())["sessions"]["open"] > 1:
            await asyncio.sleep(0.02)
    offer = RunOffer(
        ticket=bytes.fromhex(ticket),
        host=host,
        namespace_id=NAMESPACE.namespace_id,
        layout=LAYOUT.fingerprint,
        blocks=BLOCKS,
    )
    taken = await taker.take_run(NAMESPACE, offer)
    assert taken is not None
    assert holds(taken, 7)
    taken.release()
    await until_free(taker)


async def test_run_that_nobody_takes_in_time_is_free(
    giver: AgentClient, taker: AgentClient
) -> None:
    before = (await giver.status())["offers"]["expired"]
    offer = await offer_filled(giver, 1, ttl_s=0.05)
    await until_free(giver)
    assert await taker.take_run(NAMESPACE, offer) is None
    assert (await giver.status())["offers"]["expired"] == before + 1


async def test_offer_that_is_withdrawn_is_gone(giver: AgentClient, taker: AgentClient) -> None:
    offer = await offer_filled(giver, 1)
    assert await giver.withdraw_offer(offer)
    assert not await giver.withdraw_offer(offer)
    assert await taker.take_run(NAMESPACE, offer) is None
    await until_free(giver)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (replace(NAMESPACE, tenant="other"), "namespace of the offer"),
        (
            replace(NAMESPACE, layout=BlockLayout((Section("a", 91_136),))),
            "namespace of the offer",
        ),
    ],
    ids=["tenant", "layout"],
)
async def test_taker_of_another_namespace_is_refused_and_the_run_stays_on_offer(
    giver: AgentClient, taker: AgentClient, other: Namespace, what: str
) -> None:
    offer = await offer_filled(giver, 4)
    with pytest.raises(AgentRefused, match=what):
        await taker.take_run(other, offer)
    # One who lies about the offer finds nothing.
    lie = replace(offer, namespace_id=other.namespace_id, layout=other.layout.fingerprint)
    assert await taker.take_run(other, lie) is None
    with pytest.raises(AgentRefused, match="layout of the offer"):
        await taker.take_run(NAMESPACE, replace(offer, layout=bytes(32)))
    assert await taker.take_run(NAMESPACE, replace(offer, blocks=BLOCKS + 1)) is None
    taken = await taker.take_run(NAMESPACE, offer)
    assert taken is not None
    assert holds(taken, 4)
    taken.release()


@pytest.mark.parametrize(
    "wrong",
    [
        {"ticket": bytes(15)},
        {"ticket": "x" * 16},
        {"namespace_id": b""},
        {"layout": bytes(33)},
        {"blocks": 0},
        {"blocks": True},
        {"host": "h" * 65},
        {"host": None},
    ],
    ids=str,
)
async def test_offer_that_none_can_be_is_the_callers_mistake(
    taker: AgentClient, wrong: dict[str, object]
) -> None:
    """It may have come over a network."""
    offer = RunOffer(
        ticket=bytes(16),
        host="",
        namespace_id=NAMESPACE.namespace_id,
        layout=LAYOUT.fingerprint,
        blocks=1,
    )
    with pytest.raises(InvalidArgument):
        await taker.take_run(NAMESPACE, replace(offer, **wrong))  # type: ignore[arg-type]
    assert await taker.take_run(NAMESPACE, offer) is None


@pytest.mark.parametrize("host", ["example.org:80", "0.0.0.0:1", "127.0.0.1", "127.0.0.1:0"])
async def test_host_that_is_no_address_of_an_agent_is_refused(
    taker: AgentClient, host: str
) -> None:
    """Nobody makes an agent ask a name server."""
    offer = RunOffer(
        ticket=bytes(16),
        host=host,
        namespace_id=NAMESPACE.namespace_id,
        layout=LAYOUT.fingerprint,
        blocks=1,
    )
    with pytest.raises(AgentRefused, match="address of an agent"):
        await taker.take_run(NAMESPACE, offer)


async def test_run_stays_the_givers_when_too_much_is_on_offer(
    giver: AgentClient, taker: AgentClient
) -> None:
    """Half of the arena may be on offer beside the largest run."""
    runs = [await giver.lease_run(NAMESPACE, 55, deadline_s=LONG_S) for _ in range(3)]
    offers = [await giver.offer_run(run) for run in runs[:2] if run is not None]
    last = runs[2]
    assert last is not None
    assert [run and run.blocks for run in runs] == [55] * 3
    fill(last, 6)
    with pytest.raises(AgentRefused, match="bytes of runs are offered already"):
        await giver.offer_run(last)
    assert holds(last, 6)
    for offer in offers:
        assert await giver.withdraw_offer(offer)
    taken = await taker.take_run(NAMESPACE, await giver.offer_run(last))
    assert taken is not None
    assert holds(taken, 6)
    taken.release()


async def test_window_run_cannot_be_offered(giver: AgentClient) -> None:
    await giver.open_namespace(NAMESPACE, window_layout=WINDOW)
    run = await giver.lease_window(NAMESPACE)
    assert run is not None
    with run, pytest.raises(AgentRefused, match="one for a window record"):
        await giver.offer_run(run)
    await until_free(giver)


async def test_run_of_another_client_cannot_be_offered(
    giver: AgentClient, taker: AgentClient
) -> None:
    run = await giver.lease_run(NAMESPACE, 1)
    assert run is not None
    with run:
        with pytest.raises(InvalidArgument, match="another client"):
            await taker.offer_run(run)
        with pytest.raises(InvalidArgument, match="ttl_s"):
            await giver.offer_run(run, ttl_s=0)
    with pytest.raises(InvalidArgument, match="an ArenaRun"):
        await giver.offer_run(None)  # type: ignore[arg-type]


def test_wake_ups_of_a_run_end_when_it_is_offered(agent: AgentProcess) -> None:
    with agent.engine() as engine:
        leased = engine.lease(engine.open(NAMESPACE), 1)
        wakeup = engine.wakeups[leased.run]
        with pytest.raises(BlockingIOError):
            os.read(wakeup, 1)
        offered = engine.ask(m.OfferRun(run=leased.run, ttl_s=LONG_S), m.RunOffered)
        assert os.read(wakeup, 1) == b""
        assert engine.ask(m.WithdrawOffer(ticket=offered.ticket), m.Done).is_kept


async def test_taken_runs_count_among_those_of_a_session(agent: AgentProcess) -> None:
    leases_max = SessionBounds().leases_max
    with agent.engine() as giver, agent.engine() as taker:
        small = replace(NAMESPACE, layout=BlockLayout((Section("a", 1_024),)))
        namespace, there = giver.open(small), taker.open(small)

        def take() -> m.TakeRun:
            leased = giver.lease(namespace, 1)
            offered = giver.ask(m.OfferRun(run=leased.run, ttl_s=LONG_S), m.RunOffered)
            return m.TakeRun(
                namespace=there,
                ticket=offered.ticket,
                host=offered.host,
                namespace_id=offered.namespace_id,
                layout=small.layout.fingerprint,
                blocks=1,
                deadline_s=LONG_S,
            )

        for _ in range(leases_max):
            keep(taker, taker.ask(take(), m.RunLeased))
        request = take()
        assert "runs of one session" in taker.refusal(request).what
        taker.release(next(iter(taker.wakeups)))
        keep(taker, taker.ask(request, m.RunLeased))


def keep(engine: RawEngine, leased: m.RunLeased) -> None:
    assert leased.blocks == 1
    engine.wakeups[leased.run] = engine.descriptors.popleft()


def test_blocking_client_hands_a_run_over(agent: AgentProcess) -> None:
    with AgentClient.open(agent.socket_path) as giver, AgentClient.open(agent.socket_path) as taker:
        run = giver.lease_run(NAMESPACE, BLOCKS)
        assert run is not None
        fill(run, 9)
        offer = giver.offer_run(run)
        taken = taker.take_run(NAMESPACE, offer)
        assert taken is not None
        with taken:
            assert holds(taken, 9)
        assert taker.take_run(NAMESPACE, offer) is None
        assert not giver.withdraw_offer(offer)


async def test_status_says_what_became_of_offers(giver: AgentClient, taker: AgentClient) -> None:
    before = (await giver.status())["offers"]
    offer = await offer_filled(giver, 1)
    status = await giver.status()
    assert status["offers"]["open"] == before["open"] + 1
    assert status["offers"]["open_bytes"] > before["open_bytes"]
    assert status["arena"]["runs_by_state"]["offered"] == 1
    taken = await taker.take_run(NAMESPACE, offer)
    assert taken is not None
    taken.release()
    after = (await giver.status())["offers"]
    assert (after["made"], after["taken"]) == (before["made"] + 1, before["taken"] + 1)
    assert after["open"] == before["open"]


async def test_everything_on_offer_is_lost_with_the_agent(cluster_path: str) -> None:
    with AgentProcess(cluster_path, ("--arena", "4MiB", "--window-memory", "1MiB")) as process:
        async with AgentClient.connect(process.socket_path) as client:
            offer = await offer_filled(client, 1)
            process.kill()
            with pytest.raises(AgentUnreachable):
                await client.take_run(NAMESPACE, offer)
            assert not await client.withdraw_offer(offer)
            process.start()
            async with asyncio.timeout(LONG_S):
                while not client.is_connected:
                    await asyncio.sleep(0.02)
            # Its address is another one, too: nobody listens at the old one.
            assert await client.take_run(NAMESPACE, offer) is None
