"""An agent with all its parts, and engines that send it whatever they like."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from kvstore import agent_messages as m
from tests.patience import OPERATION_S, WELL_BEFORE_S

from .agent_process import AgentProcess, is_running
from .arena_runs import SectionedBlocks
from .engine_steps import WINDOW, bytes_of, fetch_request, put_window, store, wait_until
from .noise import REQUEST_TYPES, read_noise, start_noise
from .process_usage import usage_of
from .raw_engine import RawEngine

SESSIONS = 150
CONNECTIONS_MAX = 2 * 12 + 1
"""Two to each node, made when they are needed, and the listener for other agents."""
KEY = b"honest engine's key".ljust(32)
RECORD = bytes(range(198)) * 16


class HonestEngine:
    """It stores a chain and a window record, and has them again."""

    def __init__(self, engine: RawEngine) -> None:
        self._engine = engine
        self._blocks = SectionedBlocks(8, seed=41)
        self._namespace = engine.open(self._blocks.namespace, WINDOW)
        assert store(engine, self._namespace, self._blocks).stored == 8
        self.longest_s = 0.0

    def work(self) -> None:
        """Everything once; all of it right."""
        begun_s = time.monotonic()
        self._fetch()
        self._fetch_window()
        matched = self._engine.ask(
            m.Match(self._namespace, b"".join(self._blocks.keys), deadline_s=OPERATION_S), m.Matched
        )
        assert matched.blocks == 8
        self.longest_s = max(self.longest_s, time.monotonic() - begun_s)

    def _fetch(self) -> None:
        leased = self._engine.lease(self._namespace, 8, deadline_s=OPERATION_S)
        assert leased.blocks == 8
        ended = self._engine.ask(fetch_request(leased.run, self._blocks), m.FetchEnded)
        assert ended.blocks == 8
        run = self._engine.memory(leased, self._blocks.namespace.layout)
        for section in range(len(self._blocks.namespace.layout.sections)):
            assert np.array_equal(bytes_of(run, section, 8), self._blocks.section(section, 0, 8))
        self._engine.release(leased.run)

    def _fetch_window(self) -> None:
        assert put_window(self._engine, self._namespace, KEY, RECORD).is_kept
        leased = self._engine.lease(self._namespace, 1, deadline_s=OPERATION_S, is_window=True)
        request = m.FetchWindow(
            namespace=self._namespace, key=KEY, run=leased.run, deadline_s=OPERATION_S
        )
        assert self._engine.ask(request, m.WindowFetched).is_found
        run = self._engine.memory(leased, WINDOW)
        assert b"".join(bytes(run.section(at)) for at in range(3)) == RECORD
        self._engine.release(leased.run)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_agent_with_all_roles_survives_noise_of_every_kind_beside_an_honest_engine(
    cluster_path: str, rng: random.Random
) -> None:
    with AgentProcess(cluster_path) as agent, agent.engine() as engine:
        honest = HonestEngine(engine)
        honest.work()
        make_noise(agent, honest, rng.randrange(2**32))  # all is warm by then
        wait_until(lambda: is_quiet(engine))
        pids = [agent.process.pid, *agent.workers()]
        before = {pid: usage_of(pid) for pid in pids}
        make_noise(agent, honest, rng.randrange(2**32))
        wait_until(lambda: is_quiet(engine))
        honest.work()
        assert all(map(is_running, pids))
        assert [agent.process.pid, *agent.workers()] == pids, "a worker had to be started anew"
        for pid in pids:
            after = usage_of(pid)
            assert after.descriptors <= before[pid].descriptors + 2
            assert after.connections <= CONNECTIONS_MAX
            assert after.private_bytes - before[pid].private_bytes < 16 << 20
        assert "Traceback" not in agent.log()


def make_noise(agent: AgentProcess, honest: HonestEngine, seed: int) -> None:
    """The honest engine works meanwhile, without an error, and waits for nobody's deadline."""
    with start_noise(agent.socket_path, seed, SESSIONS) as process:
        try:
            honest.longest_s = 0.0
            while process.poll() is None:
                honest.work()
            noise = read_noise(process)
        finally:
            process.kill()
    assert honest.longest_s < WELL_BEFORE_S
    assert set(noise.sent) == {kind.__name__ for kind in REQUEST_TYPES}, noise.sent
    # It was not refused everything: the noise came as far as the workers and the pool.
    reached = {"RunLeased", "FetchEnded", "StoreEnded", "WindowFetched", "Done", "Refused"}
    reached |= {"RunOffered"}
    assert reached <= set(noise.answered), noise.answered


def is_quiet(engine: RawEngine) -> bool:
    """Only this engine is there, and nothing is under way, nor any run left."""
    status = engine.status()
    arena, fetch, kept = status["arena"], status["fetch"], status["store"]
    left = [arena["runs"], arena["leased_bytes"], arena["waiting"], fetch["running"]]
    left += [fetch["queued"], kept["queued"], kept["running"]]
    return not any(left) and bool(status["sessions"]["open"] == 1)
