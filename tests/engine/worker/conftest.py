"""A platform of real processes that tests share; what one harms is mended before the next."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from engine.llm_engine import LLMEngine
from engine.load import load_runner
from engine.request import Request
from engine.sampling import GREEDY, Sampling
from engine.worker.options import Role
from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.local_folder import LocalAgentOptions
from tests.engine.worker.nano_folder import write_nano
from tests.engine.worker.worker_process import Site, WorkerProcess
from tests.kvstore.agent.agent_process import short_folder

Alone: TypeAlias = Callable[..., list[int]]
"""Prompt ids, max_tokens and sampling -> the answer of one engine without a store."""


@pytest.fixture(scope="session")
def nano_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_nano(tmp_path_factory.mktemp("nano") / "model")


@pytest.fixture(scope="session")
def alone(nano_path: Path) -> Iterator[Alone]:
    loaded = load_runner(nano_path, pool_blocks=64, state_slots=2)
    known: dict[tuple[tuple[int, ...], int, Sampling], list[int]] = {}
    with LLMEngine(loaded.runner) as engine:

        def answer(
            prompt_ids: Sequence[int], max_tokens: int, sampling: Sampling = GREEDY
        ) -> list[int]:
            key = tuple(prompt_ids), max_tokens, sampling
            if key not in known:
                request = Request(
                    request_id="alone",
                    prompt_ids=prompt_ids,
                    max_tokens=max_tokens,
                    sampling=sampling,
                )
                events = list(engine.stream(request))
                known[key] = [token for event in events for token in event.token_ids]
            return known[key]

        yield answer


@pytest.fixture(scope="session")
def shared_site(nano_path: Path) -> Iterator[Site]:
    folder = short_folder()
    options = LocalAgentOptions(arena_bytes=32 << 20, window_memory_bytes=8 << 20)
    with LocalCluster.start(
        folder / "c",
        nodes=1,
        k=1,
        m=0,
        target_size_bytes=64 << 20,
        agents=1,
        agent_options=options,
    ) as cluster:
        agent = cluster.agents.socket("a01")
        workers = {
            name: WorkerProcess(name, role, folder, nano_path, agent)
            for name, role in (
                ("p01", Role.PREFILL),
                ("p02", Role.PREFILL),
                ("d01", Role.DECODE),
                ("d02", Role.DECODE),
            )
        }
        agent_pid, node_pid = cluster.agents.pid("a01"), cluster.node_pid("n01")
        assert agent_pid is not None
        assert node_pid is not None
        site = Site(workers, agent_pid, node_pid)
        try:
            for one in workers.values():
                one.start()
            for one in workers.values():
                one.wait_until_ready()
            yield site
        finally:
            site.close()
    shutil.rmtree(folder)


@pytest.fixture
def site(shared_site: Site) -> Iterator[Site]:
    """Give a platform on which everything runs."""
    shared_site.mend()
    yield shared_site
    shared_site.mend()
