"""A step waits for no other process: answers go on at full pace while agent, its fetch worker or
the nodes stand still, whatever of a request they stop in: match, fetch, arriving pass, save.

All deadlines are an hour but that of an arriving pass, so an engine that waited for one would be
seen to hang.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Run
from contextlib import contextmanager

import pytest

from engine.llm_engine import LLMEngine
from engine.request import Request
from engine.sinks.agent_sink import AgentSink
from engine.sinks.threaded_sink import SinkLimits
from engine.sources.agent_source import AgentSource
from engine.sources.load import ThreadedLoad
from engine.sources.threaded_source import LoadLimits
from engine.store_faults import StoreFaults
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import BlockingAgentClient
from tests.engine.llm_engine.engine_bench import answer_alone, llama, prompt_of, request_of
from tests.engine.store_processes import agent, frail_agent, frail_cluster, own_client
from tests.engine.waiting import DEADLINE_S, wait_until
from tests.kvstore.agent.agent_process import AgentProcess

__all__ = ["agent", "frail_agent", "frail_cluster", "own_client"]

LONG_S = 3600.0
STORED = prompt_of(600, 1)
LOADS = LoadLimits(match_deadline_s=LONG_S, fetch_deadline_s=LONG_S, section_wait_s=0.05)
SAVES = SinkLimits(lease_deadline_s=LONG_S, save_deadline_s=LONG_S)
STEPS = 200
STEP_S_MAX = 10.0
"""Far above what the machine may stand still, far below any deadline that a step could wait for."""

REQUESTS = 6
"""That end while nothing can be saved."""

GIVEN_UP_S = 2.0
"""From then on the store may have given up a process that stands still."""

ATTEMPTS = 60
"""To stop a fetch between two sections of a small prompt."""

everybody = pytest.mark.parametrize("who", ["agent", "workers", "nodes"])


class WatchedSource(AgentSource):
    """Shows its last load."""

    last: ThreadedLoad

    def look_up(self, prompt_ids: Run[int], keys: Run[bytes]) -> ThreadedLoad:
        self.last = super().look_up(prompt_ids, keys)
        return self.last


def open_engine(client: BlockingAgentClient) -> LLMEngine:
    runner = llama(64, 8)
    places = {
        "namespace": runner.namespace,
        "pool": runner.pool,
        "window_layout": runner.window_layout,
        "faults": StoreFaults(),
        "clock": time.monotonic,
    }
    source = WatchedSource(client, limits=LOADS, **places)  # type: ignore[arg-type]
    sink = AgentSink(client, limits=SAVES, **places)  # type: ignore[arg-type]
    return LLMEngine(runner, source=source, sink=sink)


class Beside:
    """An engine with an answer that decodes, one token a step, whatever else there is."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.request = request_of("beside", prompt_of(50), 900)
        engine.add_request(self.request)
        self.found = first_token(engine, self.request)
        self.others: dict[str, list[int]] = {}

    def step(self, times: int = 1) -> bool:
        """Each gives a token of the answer, and takes no longer than computing can. Whether others
        stood still for so short a time that all still wait for them."""
        start_s = time.monotonic()
        for _ in range(times):
            begun_s = time.monotonic()
            events = self.engine.step()
            assert time.monotonic() - begun_s < STEP_S_MAX
            count = len(self.found)
            for event in events:
                if event.request_id == self.request.request_id:
                    self.found += event.token_ids
                else:
                    self.others.setdefault(event.request_id, []).extend(event.token_ids)
            assert len(self.found) == count + 1
        return time.monotonic() - start_s < GIVEN_UP_S

    def check(self) -> None:
        assert self.found == answer_alone(llama, self.request)[: len(self.found)]

    def begin_late(self) -> ThreadedLoad:
        """Ask for a prompt that is stored, until it is matched. The next step begins its load."""
        self.engine.add_request(request_of("late", STORED, 3))
        self.step()
        source = self.engine._source
        assert isinstance(source, WatchedSource)
        load = source.last
        wait_until(lambda: load.found is not None)
        return load

    def finish_late(self, *, has_waited: bool) -> None:
        late = request_of("late", STORED, 3)
        token_ids, hit_tokens = finish(self.engine, "late")
        assert self.others.get("late", []) + token_ids == answer_alone(llama, late)
        assert hit_tokens == 512 or not has_waited


def finish(engine: LLMEngine, request_id: str) -> tuple[list[int], int]:
    """The rest of an answer, and what of its prompt was hit."""
    found: list[int] = []
    while True:
        for event in engine.step(wait_s=1.0):
            if event.request_id == request_id:
                found += event.token_ids
                if event.report is not None:
                    return found, event.report.hit_tokens


def sender(who: str, cluster: LocalCluster, process: AgentProcess) -> Callable[[int], None]:
    """Sends a signal to them."""

    def send(number: int) -> None:
        if who == "agent":
            process.process.send_signal(number)
        for pid in process.workers() if who == "workers" else ():
            os.kill(pid, number)
        for name in cluster.node_names if who == "nodes" else ():
            cluster.kill(name, number)

    return send


@contextmanager
def standing_still(who: str, cluster: LocalCluster, process: AgentProcess) -> Iterator[None]:
    send = sender(who, cluster, process)
    send(signal.SIGSTOP)
    try:
        yield
    finally:
        send(signal.SIGCONT)


@pytest.fixture
def stored(own_client: BlockingAgentClient) -> None:
    """The prompt is in the store."""
    with open_engine(own_client) as writer:
        writer.add_request(request_of("first", STORED, 1))
        finish(writer, "first")
        assert writer._sink is not None
        assert writer._sink.flush(DEADLINE_S)


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("who", ["agent", "nodes"])
def test_every_step_gives_every_answer_a_token_beside_a_match_that_stands_still(
    frail_cluster: LocalCluster, agent: AgentProcess, own_client: BlockingAgentClient, who: str
) -> None:
    with open_engine(own_client) as engine:
        beside = Beside(engine)
        with standing_still(who, frail_cluster, agent):
            engine.add_request(request_of("late", STORED, 3))
            has_waited = beside.step(STEPS)
            if has_waited:
                assert (engine.status.entering, beside.others) == (1, {})
        beside.check()
        beside.finish_late(has_waited=has_waited)


@pytest.mark.usefixtures("stored")
@everybody
def test_every_step_gives_every_answer_a_token_beside_a_fetch_that_stands_still(
    frail_cluster: LocalCluster, agent: AgentProcess, own_client: BlockingAgentClient, who: str
) -> None:
    with open_engine(own_client) as engine:
        beside = Beside(engine)
        load = beside.begin_late()
        with standing_still(who, frail_cluster, agent):
            has_waited = beside.step(STEPS)
            assert load.order.plan.hit_tokens == 512, "it has not begun"
            if has_waited:
                assert (load.is_startable, load.outcome, beside.others) == (False, None, {})
        beside.check()
        beside.finish_late(has_waited=has_waited)


@pytest.mark.usefixtures("stored")
@everybody
def test_every_step_gives_every_answer_a_token_beside_a_prefix_that_stops_arriving(
    frail_cluster: LocalCluster, agent: AgentProcess, own_client: BlockingAgentClient, who: str
) -> None:
    """A pass over it is tried, waits for the bound of such a pass, and is given up."""
    for _ in range(ATTEMPTS):
        with open_engine(own_client) as engine:
            beside = Beside(engine)
            load = beside.begin_late()
            with standing_still("workers", frail_cluster, agent):
                beside.step()
                run_until_first_section(load, sender("workers", frail_cluster, agent))
                with standing_still(who, frail_cluster, agent):
                    if not load.is_startable or is_whole(load):
                        continue
                    has_waited = beside.step(STEPS)
                    if has_waited:
                        assert not is_whole(load)
                        assert engine.status.counts.arrival_wait_s >= LOADS.section_wait_s / 2
                        assert beside.others == {}
            beside.check()
            beside.finish_late(has_waited=has_waited)
            return
    raise AssertionError(f"no fetch was stopped between two sections in {ATTEMPTS} attempts")


def is_whole(load: ThreadedLoad) -> bool:
    return load._sections_done == load._sections


def run_until_first_section(load: ThreadedLoad, send: Callable[[int], None]) -> None:
    """Let it run by moments, too short for all of a fetch."""
    end_s = time.monotonic() + DEADLINE_S
    while not load.is_startable and load.outcome is None:
        assert time.monotonic() < end_s, "nothing comes"
        send(signal.SIGCONT)
        send(signal.SIGSTOP)
        time.sleep(0.003)  # what it has brought is seen by then


@pytest.mark.parametrize("who", ["agent", "nodes"])
def test_every_step_gives_every_answer_a_token_beside_a_save_that_stands_still(
    frail_cluster: LocalCluster, agent: AgentProcess, own_client: BlockingAgentClient, who: str
) -> None:
    """Of prompts and answers that end meanwhile."""
    others = [request_of(f"{n}", prompt_of(300, 50 + n), 60) for n in range(REQUESTS)]
    with open_engine(own_client) as engine:
        beside = Beside(engine)
        for other in others:
            engine.add_request(other)
        while engine.status.prefilling + engine.status.decoding < 1 + REQUESTS:
            beside.step()
        with standing_still(who, frail_cluster, agent):
            while engine.status.counts.finished < REQUESTS:
                beside.step()
            beside.step(STEPS)
            saves = engine.status.saves
        beside.check()
        for other in others:
            assert beside.others[other.request_id] == answer_alone(llama, other)
        assert saves.pending + saves.failed > 0
        assert engine.flush(DEADLINE_S)


def first_token(engine: LLMEngine, request: Request) -> list[int]:
    while True:
        for event in engine.step(wait_s=1.0):
            assert event.request_id == request.request_id
            return list(event.token_ids)
