"""A step waits for no other process: answers go on at full pace while agent or nodes stand still.

All deadlines are an hour, so an engine that waited for one would be seen to hang.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.llm_engine import LLMEngine
from engine.request import Request
from engine.sinks.agent_sink import AgentSink
from engine.sinks.threaded_sink import SinkLimits
from engine.sources.agent_source import AgentSource
from engine.sources.threaded_source import LoadLimits
from engine.store_faults import StoreFaults
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import BlockingAgentClient
from tests.engine.llm_engine.engine_bench import answer_alone, llama, prompt_of, request_of
from tests.engine.store_processes import agent, frail_agent, frail_cluster, own_client
from tests.engine.waiting import DEADLINE_S
from tests.kvstore.agent.agent_process import AgentProcess

__all__ = ["agent", "frail_agent", "frail_cluster", "own_client"]

LONG_S = 3600.0
STORED = prompt_of(600, 1)
LOADS = LoadLimits(match_deadline_s=LONG_S, fetch_deadline_s=LONG_S, section_wait_s=0.05)
SAVES = SinkLimits(lease_deadline_s=LONG_S, save_deadline_s=LONG_S)
STEPS = 300


def open_engine(client: BlockingAgentClient) -> LLMEngine:
    runner = llama(64, 8)
    places = {
        "namespace": runner.namespace,
        "pool": runner.pool,
        "window_layout": runner.window_layout,
        "faults": StoreFaults(),
        "clock": time.monotonic,
    }
    source = AgentSource(client, limits=LOADS, **places)  # type: ignore[arg-type]
    sink = AgentSink(client, limits=SAVES, **places)  # type: ignore[arg-type]
    return LLMEngine(runner, source=source, sink=sink)


def finish(engine: LLMEngine, request_id: str) -> tuple[list[int], int]:
    """The rest of an answer, and what of its prompt was hit."""
    found: list[int] = []
    while True:
        for event in engine.step(wait_s=1.0):
            if event.request_id == request_id:
                found += event.token_ids
                if event.report is not None:
                    return found, event.report.hit_tokens


@contextmanager
def standing_still(who: str, cluster: LocalCluster, process: AgentProcess) -> Iterator[None]:
    def send(number: int) -> None:
        if who == "agent":
            process.process.send_signal(number)
        for name in cluster.node_names if who == "nodes" else ():
            cluster.kill(name, number)

    send(signal.SIGSTOP)
    try:
        yield
    finally:
        send(signal.SIGCONT)


@pytest.mark.parametrize("who", ["agent", "nodes"])
def test_every_step_gives_every_answer_a_token_while_others_stand_still(
    frail_cluster: LocalCluster, agent: AgentProcess, own_client: BlockingAgentClient, who: str
) -> None:
    with open_engine(own_client) as writer:
        writer.add_request(request_of("first", STORED, 1))
        finish(writer, "first")
        assert writer._sink is not None
        assert writer._sink.flush(DEADLINE_S)
    with open_engine(own_client) as engine:
        beside, late = request_of("beside", prompt_of(50), 2 * STEPS), request_of("late", STORED, 3)
        engine.add_request(beside)
        found = first_token(engine, beside)
        with standing_still(who, frail_cluster, agent):
            engine.add_request(late)
            for _ in range(STEPS):
                found += [event.token_ids[0] for event in engine.step()]
            # Each step gave one, and none was the other request's, which waits for the store.
            assert engine.status.entering == 1
        assert len(found) == 1 + STEPS
        assert found == answer_alone(llama, beside)[: len(found)]
        assert finish(engine, "late") == (answer_alone(llama, late), 512)


def first_token(engine: LLMEngine, request: Request) -> list[int]:
    while True:
        for event in engine.step(wait_s=1.0):
            assert event.request_id == request.request_id
            return list(event.token_ids)
