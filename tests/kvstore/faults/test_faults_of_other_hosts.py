"""An engine that works on while the agent of another host, an entrypoint too, dies or stands still.

Matches, fetches, saves and window fetches go on and on over the moment of the fault. Blocks are as
they always were; only window state that lay over there may be missing, and nothing takes long.
"""

import asyncio
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import AgentClient, BlockLayout, Section, StoreClient, agent_session
from kvstore.errors import AgentUnreachable
from kvstore.window.partition import choose_entrypoint
from tests.kvstore.blocks import RandomBlocks
from tests.patience import PATIENCE_S, WELL_BEFORE_S, until

LAYOUT = BlockLayout((Section("a", 4_000), Section("b", 8_000)))
WINDOW = BlockLayout((Section("w", 50_000),))
COUNT = 16
PROMPT_TOKENS = COUNT * 128 + 134
"""So that the border of the hit is the end of the last block."""
DEADLINE_S = 0.4
HOME, OTHER = "a01", "a02"
PAUSE_S = 0.02
"""Between two operations of a kind; what is saved must fit the nodes."""
NOTICED_AFTER_S = 2.5
"""By then everybody has found out who is gone."""
RECORD = bytes(range(250)) * 200


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Three nodes and three agents, each of which is an entrypoint."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="ca-"))
    try:
        with LocalCluster.start(
            folder / "c", nodes=3, k=2, m=1, target_size_bytes=64 << 20, agents=3
        ) as it:
            yield it
    finally:
        shutil.rmtree(folder)


class Engine:
    """One on the home host. Every method checks what came."""

    def __init__(self, client: AgentClient, blocks: RandomBlocks) -> None:
        self.client = client
        self._blocks = blocks
        self._rng = np.random.default_rng(5)

    async def match(self) -> None:
        found = await self.client.match(self._blocks.namespace, prompt())
        assert found.matched_blocks == COUNT
        hit = found.hit_tokens, found.replay_tokens, found.window_anchor
        assert hit in (
            (COUNT * 128, 0, COUNT * 128),
            ((COUNT - 1) * 128, 128, None),
        )

    async def fetch(self) -> None:
        target = self._blocks.empty_target()
        found = await self.client.fetch(self._blocks.namespace, self._blocks.keys, target.blocks)
        assert found.blocks == COUNT
        assert np.array_equal(target.area, self._blocks.area)

    async def save(self) -> None:
        tokens = self._rng.integers(0, 1 << 16, COUNT * 128, dtype=np.int32)
        keys = self._blocks.namespace.block_keys(tokens)
        saved = await self.client.save(self._blocks.namespace, keys, self._blocks.sources)
        assert saved.stored == COUNT

    async def fetch_window(self) -> None:
        into = bytearray(WINDOW.block_bytes)
        found = await self.client.fetch_window(
            self._blocks.namespace, self._blocks.keys[-1], into, deadline_s=DEADLINE_S
        )
        assert not found.is_found or into == RECORD

    async def until_window_is_found(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await self._match_window()) is None:
                await asyncio.sleep(0.05)

    async def _match_window(self) -> int | None:
        found = await self.client.match(self._blocks.namespace, prompt())
        return found.window_anchor


def prompt() -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The tokens of `RandomBlocks(COUNT, seed=3)`, and the beginning of a question."""
    tokens = np.random.default_rng(3).integers(0, 1 << 16, COUNT * 128, dtype=np.int32)
    return np.concatenate([tokens, np.zeros(PROMPT_TOKENS - len(tokens), np.int32)])


@pytest.fixture
async def engine(
    cluster: LocalCluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Engine]:
    """Its blocks are stored, and their window state is in the memory of the other host."""
    # The home agent works, also when the machine stands still longer than a window fetch may take.
    monkeypatch.setattr(agent_session, "ANSWER_MARGIN_S", WELL_BEFORE_S)
    blocks = RandomBlocks(
        COUNT,
        block_bytes=LAYOUT.block_bytes,
        layout=LAYOUT,
        seed=3,
        tenant=f"{os.getpid()}-{request.node.name}",
    )
    async with StoreClient.connect(cluster.cluster_path) as store:
        assert (await store.save(blocks.namespace, blocks.keys, blocks.sources)).failed == 0
    async with AgentClient.connect(cluster.agents.socket(OTHER)) as other:
        await other.open_namespace(blocks.namespace, window_layout=WINDOW)
        assert await other.put_window(blocks.namespace, blocks.keys[-1], RECORD)
        async with AgentClient.connect(cluster.agents.socket(HOME)) as client:
            await client.open_namespace(blocks.namespace, window_layout=WINDOW)
            made = Engine(client, blocks)
            await made.until_window_is_found()
            yield made


OPERATIONS = ("match", "fetch", "save", "fetch_window")


@asynccontextmanager
async def fault_of_other(cluster: LocalCluster, number: signal.Signals) -> AsyncIterator[None]:
    """The other host's agent is killed or stands still; it is there again afterwards."""
    await asyncio.to_thread(cluster.agents.kill, OTHER, number)
    try:
        yield
    finally:
        if number == signal.SIGSTOP:
            cluster.agents.kill(OTHER, signal.SIGCONT)
        else:
            await asyncio.to_thread(cluster.agents.start, OTHER)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_engine_works_on_while_the_agent_of_another_host_is(
    cluster: LocalCluster, engine: Engine, number: signal.Signals
) -> None:
    done: Counter[str] = Counter()
    is_over = False

    async def work(name: str) -> None:
        while not is_over:
            async with asyncio.timeout(WELL_BEFORE_S):
                await getattr(engine, name)()
            done[name] += 1
            await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for name in OPERATIONS:
            group.create_task(work(name))
        await until(lambda: all(done[name] for name in OPERATIONS))
        async with fault_of_other(cluster, number):
            before = done.copy()
            await asyncio.sleep(NOTICED_AFTER_S)
            await until(lambda: all(done[name] > before[name] + 1 for name in OPERATIONS))
        is_over = True
    if number == signal.SIGSTOP:
        await engine.until_window_is_found()


async def test_agent_that_is_killed_fails_a_window_fetch_from_another_host_at_once(
    cluster: LocalCluster,
) -> None:
    """The other host stands still, so that the fetch is under way when the agent dies."""
    namespace = RandomBlocks(1, block_bytes=LAYOUT.block_bytes, layout=LAYOUT, seed=3).namespace
    # The directory has an entry of it, that the home host can read when the other one cannot.
    names = [one.name for one in cluster.map.entrypoints]
    keys = (number.to_bytes(32, "little") for number in range(1, 1000))
    key = next(key for key in keys if choose_entrypoint(key, names) == HOME)
    async with (
        AgentClient.connect(cluster.agents.socket(OTHER)) as other,
        AgentClient.connect(cluster.agents.socket(HOME)) as home,
    ):
        for client in (other, home):
            await client.open_namespace(namespace, window_layout=WINDOW)
        assert await other.put_window(namespace, key, RECORD)
        into = bytearray(WINDOW.block_bytes)
        async with asyncio.timeout(PATIENCE_S):
            while not (await home.fetch_window(namespace, key, into)).is_found:
                await asyncio.sleep(0.05)
        async with fault_of_other(cluster, signal.SIGSTOP):
            waiting = asyncio.create_task(home.fetch_window(namespace, key, into))
            await asyncio.sleep(0.2)
            is_under_way = not waiting.done()
            await asyncio.to_thread(cluster.agents.kill, HOME)
            with pytest.raises(AgentUnreachable):
                async with asyncio.timeout(WELL_BEFORE_S):
                    await waiting
        await asyncio.to_thread(cluster.agents.start, HOME)
        assert is_under_way
