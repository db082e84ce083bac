"""What an `AgentClient` has beyond a `StoreClient`, with a real agent and real nodes."""

import asyncio
import os
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client import (
    AgentClient,
    ArenaRun,
    BlockingAgentClient,
    BlockLayout,
    FetchEnd,
    PromptMatch,
    Section,
    StoreClient,
)
from kvstore.client.run_copy import ROUND_BYTES_MAX, choose_round_blocks
from kvstore.errors import AgentRefused, ClientClosed, InvalidArgument
from kvstore.key import ImageSpan
from kvstore.policy import plan_dense_hit, plan_hit
from tests.kvstore.agent.agent_process import AgentProcess
from tests.kvstore.blocks import RandomBlocks
from tests.patience import PATIENCE_S

LAYOUT = BlockLayout((Section("a", 22_784), Section("b", 22_784), Section("c", 45_568)))
WINDOW = BlockLayout((Section("x", 70_752), Section("y", 70_752)))
"""Sections that are no multiple of a cache line, as V4.1-Flash's."""
BLOCK = 128


@pytest.fixture(scope="module")
def agent(cluster_path: str) -> Iterator[AgentProcess]:
    with AgentProcess(cluster_path, ("--arena", "32MiB", "--window-memory", "16MiB")) as process:
        yield process


@pytest.fixture
async def client(agent: AgentProcess) -> AsyncIterator[AgentClient]:
    async with AgentClient.connect(agent.socket_path, name="test") as opened:
        yield opened


@pytest.fixture
def blocking(agent: AgentProcess) -> Iterator[BlockingAgentClient]:
    with AgentClient.open(agent.socket_path) as opened:
        yield opened


@pytest.fixture
def blocks(request: pytest.FixtureRequest) -> RandomBlocks:
    """70 blocks that no other test has."""
    seed = zlib.crc32(request.node.nodeid.encode())
    return RandomBlocks(
        70,
        block_bytes=LAYOUT.block_bytes,
        layout=LAYOUT,
        seed=seed,
        tenant=f"{os.getpid()}-{request.node.name}",
    )


def fill(run: ArenaRun, blocks: RandomBlocks) -> None:
    for section in range(3):
        run.section(section)[:] = sections_of(blocks, section)


def sections_of(blocks: RandomBlocks, section: int) -> bytes:
    """A section of all blocks, as it lies in a run of all of them."""
    start = sum(one.bytes for one in LAYOUT.sections[:section])
    rows = blocks.area.reshape(len(blocks.keys), -1)
    return rows[:, start : start + LAYOUT.sections[section].bytes].tobytes()


async def lease(client: AgentClient, blocks: RandomBlocks) -> ArenaRun:
    run = await client.lease_run(blocks.namespace, len(blocks.keys))
    assert run is not None
    assert run.blocks == len(blocks.keys)
    return run


# Runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_by_layer", [True, False])
async def test_run_that_was_saved_is_fetched_section_by_section(
    client: AgentClient, blocks: RandomBlocks, is_by_layer: bool
) -> None:
    run = await lease(client, blocks)
    fill(run, blocks)
    saved = await client.save_run(blocks.namespace, blocks.keys, run)
    assert (saved.stored, saved.failed) == (70, 0)
    with await lease(client, blocks) as run:
        fetch = client.fetch_run(blocks.namespace, blocks.keys, run, is_by_layer=is_by_layer)
        for section in range(3):
            assert await run.until_ready(section, 70, 5) == 70
            assert run.section(section) == sections_of(blocks, section)
        result = await fetch
        assert (result.blocks, result.ended) == (70, FetchEnd.COMPLETE)
        assert run.is_ended
        assert run.part(1, 69) == run.section(1)[69 * 22_784 :]


async def test_what_one_client_saved_by_run_another_fetches_by_buffers_from_the_nodes(
    client: AgentClient, cluster_path: str, blocks: RandomBlocks
) -> None:
    run = await lease(client, blocks)
    fill(run, blocks)
    await client.save_run(blocks.namespace, blocks.keys, run)
    async with StoreClient.connect(cluster_path) as store:
        target = blocks.empty_target()
        assert (await store.fetch(blocks.namespace, blocks.keys, target.blocks)).blocks == 70
    assert np.array_equal(target.area, blocks.area)


async def test_run_is_used_for_one_fetch_after_another(
    client: AgentClient, blocks: RandomBlocks
) -> None:
    await client.save(blocks.namespace, blocks.keys, blocks.sources)
    with await lease(client, blocks) as run:
        for first in (0, 60, 30, 69, 0):
            fetch = client.fetch_run(blocks.namespace, blocks.keys, run, first_block=first)
            assert await run.until_ready(2, 70 - first, 5) == 70 - first
            assert (await fetch).blocks == 70 - first
            expected = blocks.area[first * LAYOUT.block_bytes :][:22_784].tobytes()
            assert run.part(0, 0) == expected


async def test_misses_end_a_fetch_and_nothing_is_ready_that_is_not_there(
    client: AgentClient, blocks: RandomBlocks
) -> None:
    await client.save(blocks.namespace, blocks.keys[:40], blocks.sources[:40])
    with await lease(client, blocks) as run:
        fetch = client.fetch_run(blocks.namespace, blocks.keys, run)
        assert await run.until_ready(0, 70, 5) == 40
        result = await fetch
        assert (result.blocks, result.ended) == (40, FetchEnd.TOO_FEW_SHARDS)
        assert [run.ready_blocks(section) for section in range(3)] == [40, 40, 40]


async def test_lease_of_a_full_arena_waits_its_time_and_takes_what_there_is(
    client: AgentClient, blocks: RandomBlocks
) -> None:
    whole = await client.lease_run(blocks.namespace, 1000)
    assert whole is not None
    assert 200 < whole.blocks < 1000
    assert await client.lease_run(blocks.namespace, 200, deadline_s=0.05) is None
    waiting = asyncio.create_task(client.lease_run(blocks.namespace, 70))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    whole.release()
    run = await waiting
    assert run is not None
    assert run.blocks == 70
    run.release()


async def test_released_run_with_a_fetch_in_it_comes_back(
    client: AgentClient, blocks: RandomBlocks
) -> None:
    await client.save(blocks.namespace, blocks.keys, blocks.sources)
    for _ in range(20):
        run = await lease(client, blocks)
        client.fetch_run(blocks.namespace, blocks.keys, run)
        run.release()
    whole = await client.lease_run(blocks.namespace, 10_000)
    assert whole is not None
    whole.release()
    status = await client.status()
    assert status["arena"]["size_bytes"] == 32 << 20


async def test_runs_lie_in_the_arena_that_an_engine_pins(
    client: AgentClient, blocks: RandomBlocks
) -> None:
    assert client.arena is not None
    start = np.frombuffer(client.arena, np.uint8).ctypes.data
    with await lease(client, blocks) as run:
        assert start <= run.address
        assert run.address + run.layout.run_bytes <= start + len(client.arena)
        section = np.frombuffer(run.section(1), np.uint8)
        assert section.ctypes.data == run.address + run.layout.section_offsets[1]


async def test_save_that_is_handed_over_outlives_its_client(
    agent: AgentProcess, client: AgentClient, blocks: RandomBlocks
) -> None:
    mortal = AgentClient(agent.socket_path)
    await mortal.wait_for_first_attempt()
    run = await mortal.lease_run(blocks.namespace, 70)
    assert run is not None
    fill(run, blocks)
    mortal.save_run(blocks.namespace, blocks.keys, run)
    mortal.close()
    await mortal.end_background()
    async with asyncio.timeout(PATIENCE_S):
        while await client.match(blocks.namespace, blocks.keys) < 70:
            await asyncio.sleep(0.02)


async def test_many_fetches_at_once_take_turns_for_runs(
    client: AgentClient, blocks: RandomBlocks
) -> None:
    few = RandomBlocks(2, block_bytes=1024, seed=5, tenant=blocks.namespace.tenant)
    await client.save(few.namespace, few.keys, few.sources)
    targets = [few.empty_target() for _ in range(300)]
    results = await asyncio.gather(
        *(client.fetch(few.namespace, few.keys, target.blocks, deadline_s=20) for target in targets)
    )
    assert [result.blocks for result in results] == [2] * 300
    assert all(np.array_equal(target.area, few.area) for target in targets)


@given(st.integers(1, 100_000), st.integers(1 << 20, 1 << 36))
def test_rounds_are_equal_and_leave_room_for_others(count: int, arena_bytes: int) -> None:
    first = choose_round_blocks(LAYOUT, count, arena_bytes)
    assert 1 <= first <= min(count, 65_536)
    assert first == 1 or first * LAYOUT.block_bytes <= min(arena_bytes // 4, ROUND_BYTES_MAX)
    done = 0
    rounds: list[int] = []
    while done < count and len(rounds) < 50:
        rounds.append(choose_round_blocks(LAYOUT, count - done, arena_bytes))
        done += rounds[-1]
    assert max(rounds) - min(rounds) <= 1


# Match of prompts ---------------------------------------------------------------------------------


def tokens_of(blocks: RandomBlocks) -> np.ndarray:
    """The tokens that the keys were made of, and some more."""
    rng = np.random.default_rng(zlib.crc32(blocks.namespace.tenant.encode()))
    return rng.integers(0, 1 << 16, 70 * BLOCK + 50, dtype=np.int32)


async def save_prompt(client: AgentClient, blocks: RandomBlocks, count: int) -> np.ndarray:
    """Tokens of a prompt, of which `count` blocks are stored."""
    tokens = tokens_of(blocks)
    keys = blocks.namespace.block_keys(tokens)
    await client.save(blocks.namespace, keys[:count], blocks.sources[:count])
    return tokens


@pytest.mark.parametrize(("count", "length"), [(0, 1000), (3, 1000), (7, 1000), (7, 900), (1, 128)])
async def test_prompt_is_matched_by_the_hit_rule(
    client: AgentClient, blocks: RandomBlocks, count: int, length: int
) -> None:
    tokens = (await save_prompt(client, blocks, count))[:length]
    matched = min(count, length // BLOCK)
    found = await client.match(blocks.namespace, tokens)
    assert isinstance(found, PromptMatch)
    assert found.matched_blocks == matched
    assert found.plan == plan_hit(length, matched, ())
    assert found.keys == blocks.namespace.block_keys(tokens)
    assert min(found.hash_s, found.match_s, found.lookup_s) >= 0
    dense = await client.match(blocks.namespace, tokens.tolist(), is_dense=True)
    assert dense.plan == plan_dense_hit(length, matched)


async def test_window_state_at_the_border_spares_the_replay(
    client: AgentClient, blocks: RandomBlocks
) -> None:
    tokens = await save_prompt(client, blocks, 10)
    await client.open_namespace(blocks.namespace, window_layout=WINDOW)
    without = await client.match(blocks.namespace, tokens)
    assert (without.hit_tokens, without.replay_tokens) == (9 * BLOCK, BLOCK)
    record = bytes(range(256)) * 1000
    record = record[: WINDOW.block_bytes]
    assert await client.put_window(blocks.namespace, without.keys[9], record)
    found = await client.match(blocks.namespace, tokens)
    assert found.plan == plan_hit(len(tokens), 10, {10 * BLOCK})
    assert (found.hit_tokens, found.window_anchor) == (10 * BLOCK, 10 * BLOCK)
    assert found.window_host == ""


async def test_images_enter_the_keys_of_a_prompt(client: AgentClient, blocks: RandomBlocks) -> None:
    tokens = tokens_of(blocks)
    image = ImageSpan(start=200, length=300, content_hash=b"i" * 32)
    keys = blocks.namespace.block_keys(tokens, [image])
    await client.save(blocks.namespace, keys[:8], blocks.sources[:8])
    assert (await client.match(blocks.namespace, tokens, images=[image])).matched_blocks == 8
    # The first block is that of both prompts.
    assert (await client.match(blocks.namespace, tokens)).matched_blocks == 1


async def test_match_tells_keys_from_tokens(client: AgentClient, blocks: RandomBlocks) -> None:
    assert await client.match(blocks.namespace, []) == 0
    empty = await client.match(blocks.namespace, np.empty(0, np.int32))
    assert (empty.matched_blocks, empty.hit_tokens) == (0, 0)
    assert (await client.match(blocks.namespace, range(5))).keys == []
    with pytest.raises(InvalidArgument, match="token id at position 1"):
        await client.match(blocks.namespace, [5, -1])
    with pytest.raises(InvalidArgument, match=r"keys\[0\]: given bool"):
        await client.match(blocks.namespace, [True, False])
    with pytest.raises(InvalidArgument, match="given 16385 keys, expected at most 16384"):
        await client.match(blocks.namespace, [bytes(32)] * 16_385)


async def test_mistakes_with_buffers_are_named(client: AgentClient, blocks: RandomBlocks) -> None:
    ns, keys, size = blocks.namespace, blocks.keys[:2], LAYOUT.block_bytes
    mistakes: list[tuple[list[Any], str]] = [
        (
            [bytearray(size), bytes(size)],
            r"buffers\[1\]: given bytes \(.*[^.]\), expected a writable C-contiguous buffer",
        ),
        (
            [bytearray(size), bytearray(7)],
            rf"buffers\[1\]: given 7 bytes, expected {size} bytes, "
            "a block of the namespace's layout",
        ),
    ]
    for buffers, message in mistakes:
        with pytest.raises(InvalidArgument, match=f"^{message}$"):
            await client.fetch(ns, keys, buffers)


# Windows ------------------------------------------------------------------------------------------


async def test_window_record_comes_back_by_buffer_and_by_run(
    client: AgentClient, blocks: RandomBlocks
) -> None:
    ns, (key, other, nobodys) = blocks.namespace, blocks.keys[:3]
    await client.open_namespace(ns, window_layout=WINDOW)
    record = np.random.default_rng(2).integers(0, 256, WINDOW.block_bytes, dtype=np.uint8).tobytes()
    assert await client.put_window(ns, key, record)
    run = await client.lease_window(ns)
    assert run is not None
    with run:
        found = await client.fetch_window(ns, key, run)
        assert (found.is_found, found.host) == (True, "")
        assert bytes(run.section(0)) + bytes(run.section(1)) == record
        assert await client.put_window(ns, other, run)
    into = bytearray(WINDOW.block_bytes)
    assert (await client.fetch_window(ns, other, into)).is_found
    assert into == record
    assert not (await client.fetch_window(ns, nobodys, into)).is_found
    assert await client.lookup(ns, [key, nobodys, other]) == ["", None, ""]
    assert await client.lookup(ns, []) == []


async def test_mistakes_with_windows_are_named(client: AgentClient, blocks: RandomBlocks) -> None:
    ns, key = blocks.namespace, blocks.keys[0]
    with pytest.raises(InvalidArgument, match="one without a window layout"):
        await client.put_window(ns, key, bytes(WINDOW.block_bytes))
    await client.open_namespace(ns, window_layout=WINDOW)
    length = f"expected {WINDOW.block_bytes} bytes, a record of the namespace's window layout"
    with pytest.raises(InvalidArgument, match=f"^record: given 5 bytes, {length}$"):
        await client.put_window(ns, key, bytes(5))
    with pytest.raises(InvalidArgument, match=f"^into: given 5 bytes, {length}$"):
        await client.fetch_window(ns, key, bytearray(5))
    with pytest.raises(InvalidArgument, match=r"^into: given bytes \(.*\), expected a writable"):
        await client.fetch_window(ns, key, bytes(WINDOW.block_bytes))
    full = "given None, expected a buffer or an ArenaRun; .* give None when the arena is full"
    with pytest.raises(InvalidArgument, match=f"^record: {full}$"):
        await client.put_window(ns, key, None)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=f"^into: {full}$"):
        await client.fetch_window(ns, key, None)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"keys\[0\]: given 3 bytes"):
        await client.fetch_window(ns, b"key", bytearray(WINDOW.block_bytes))
    run = await lease(client, blocks)
    with pytest.raises(InvalidArgument, match="another layout"):
        await client.put_window(ns, key, run)
    run.release()


# Blocking -----------------------------------------------------------------------------------------


def test_thread_waits_for_sections_and_joins_the_fetch(
    blocking: BlockingAgentClient, blocks: RandomBlocks
) -> None:
    ns, keys = blocks.namespace, blocks.keys
    run = blocking.lease_run(ns, 70)
    assert run is not None
    fill(run, blocks)
    assert blocking.save_run(ns, keys, run).join().stored == 70
    run = blocking.lease_run(ns, 70)
    assert run is not None
    with run:
        fetch = blocking.fetch_run(ns, keys, run)
        for section in range(3):
            assert run.wait_ready(section, 70, 5) == 70
            assert run.section(section) == sections_of(blocks, section)
        assert fetch.join().blocks == 70


def test_blocking_client_has_the_other_calls_too(
    agent: AgentProcess, blocking: BlockingAgentClient, blocks: RandomBlocks
) -> None:
    ns, key = blocks.namespace, blocks.keys[0]
    assert blocking.is_connected
    assert blocking.arena is not None
    assert blocking.status()["pid"] == agent.process.pid
    found = blocking.match(ns, tokens_of(blocks))
    assert (found.matched_blocks, len(found.keys)) == (0, 70)
    assert blocking.match(ns, tokens_of(blocks), is_dense=True).hit_tokens == 0
    blocking.open_namespace(ns, window_layout=WINDOW)
    run = blocking.lease_window(ns)
    assert run is not None
    assert blocking.put_window(ns, key, run)
    run.release()
    assert blocking.lookup(ns, [key]) == [""]
    assert blocking.fetch_window(ns, key, bytearray(WINDOW.block_bytes)).is_found


def test_blocking_client_leaves_no_thread_and_no_descriptor(agent: AgentProcess) -> None:
    blocks = RandomBlocks(1, block_bytes=2048, seed=4)
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        client = AgentClient.open(agent.socket_path)
        client.match(blocks.namespace, blocks.keys)
        client.close()
        client.close()
        with pytest.raises(ClientClosed):
            client.match(blocks.namespace, blocks.keys)
        with pytest.raises(ClientClosed):
            client.match(blocks.namespace, np.empty(0, np.int32))
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


# Others -------------------------------------------------------------------------------------------


def test_path_that_no_socket_can_have_is_a_mistake() -> None:
    for path in ("", "/tmp/" + "x" * 200):
        with pytest.raises(InvalidArgument, match=r"socket path: given .* expected 1 to 107 bytes"):
            AgentClient.open(path)


async def test_agent_that_only_checks_matches_and_refuses_the_rest(
    cluster_path: str, blocks: RandomBlocks
) -> None:
    with AgentProcess(cluster_path, ("--roles", "check")) as checker:
        async with AgentClient.connect(checker.socket_path) as client:
            assert await client.match(blocks.namespace, blocks.keys) == 0
            assert (await client.match(blocks.namespace, tokens_of(blocks))).matched_blocks == 0
            for call in (
                client.fetch(blocks.namespace, blocks.keys, blocks.empty_target().blocks),
                client.save(blocks.namespace, blocks.keys, blocks.sources),
                client.lease_run(blocks.namespace, 1),
            ):
                with pytest.raises(AgentRefused, match="it has no arena; its roles: check"):
                    await call


async def test_what_is_asked_of_a_client_shows_in_the_agents_status(
    agent: AgentProcess, client: AgentClient, blocks: RandomBlocks
) -> None:
    with await lease(client, blocks):
        status = await client.status()
        assert status["arena"]["runs"] >= 1
        assert status["sessions"]["open"] >= 1
