"""Nodes that answer nothing cost those that ask them a deadline, and those behind them nothing."""

import signal
import time
from collections.abc import Iterator

import pytest

from engine.llm_engine import LLMEngine
from engine.sources.agent_source import AgentSource
from engine.sources.load import ThreadedLoad
from engine.sources.threaded_source import MATCH_THREADS, LoadLimits
from engine.store_faults import StoreFaults
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client import BlockingAgentClient
from kvstore.policy import HitPlan
from tests.engine.llm_engine.engine_bench import answer_alone, llama, prompt_of, request_of
from tests.engine.store_processes import agent, frail_agent, frail_cluster, own_client
from tests.engine.waiting import DEADLINE_S

__all__ = ["agent", "frail_agent", "frail_cluster", "own_client"]

LIMITS = LoadLimits(match_deadline_s=0.5, rest_s=3600.0)
ASKING = [request_of(f"asks {number}", prompt_of(300, number), 2) for number in range(12)]
SHORT = request_of("short", prompt_of(50), 2)


class TimedSource(AgentSource):
    """`waits_s`: how long each match took that was asked for."""

    waits_s: list[float]

    def _match(self, load: ThreadedLoad) -> tuple[int, HitPlan]:
        begun_s = time.monotonic()
        try:
            return super()._match(load)
        finally:
            self.waits_s.append(time.monotonic() - begun_s)


@pytest.fixture
def nodes_that_stand_still(frail_cluster: LocalCluster) -> Iterator[LocalCluster]:
    for name in frail_cluster.node_names:
        frail_cluster.kill(name, signal.SIGSTOP)
    yield frail_cluster
    for name in frail_cluster.node_names:
        frail_cluster.kill(name, signal.SIGCONT)


def test_requests_behind_nodes_that_stand_still_wait_for_one_deadline_and_not_for_each(
    own_client: BlockingAgentClient, nodes_that_stand_still: LocalCluster
) -> None:
    runner = llama(64, 8)
    source = TimedSource(
        own_client,
        namespace=runner.namespace,
        pool=runner.pool,
        window_layout=runner.window_layout,
        faults=StoreFaults(),
        limits=LIMITS,
        clock=time.monotonic,
    )
    source.waits_s = []
    answers: dict[str, list[int]] = {}
    with LLMEngine(runner, source=source) as engine:
        for request in (*ASKING, SHORT):
            engine.add_request(request)
        end_s = time.monotonic() + DEADLINE_S
        while engine.has_requests:
            assert time.monotonic() < end_s, engine.status
            for event in engine.step(wait_s=0.1):
                answers.setdefault(event.request_id, []).extend(event.token_ids)
    # The one that needs no store has passed all twelve.
    assert next(iter(answers)) == "short"
    for request in (*ASKING, SHORT):
        assert answers[request.request_id] == answer_alone(llama, request)
    # Nobody has waited for a deadline but those that asked first.
    late = [wait_s for wait_s in source.waits_s if wait_s >= 0.9 * LIMITS.match_deadline_s]
    assert 1 <= len(late) <= MATCH_THREADS
