"""Runs of a real agent, blocks and states add up, whatever is asked of an engine and taken back.

Threads fetch, copy and save meanwhile, so what happens is not the same in any two runs of a test.
"""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.engine_config import EngineConfig
from engine.errors import EngineBusy
from engine.llm_engine import LLMEngine
from engine.model_runner import ModelRunner
from engine.sequence import Sequence
from engine.sinks.agent_sink import AgentSink
from engine.sinks.threaded_sink import SinkLimits
from engine.sources.agent_source import AgentSource
from engine.store_faults import StoreFaults
from kvstore.client import BlockingAgentClient
from tests.engine.llm_engine.engine_bench import (
    MakeRunner,
    answer_alone,
    dense_summing,
    prompt_of,
    references_of,
    request_of,
    summing,
)
from tests.engine.store_processes import client, cluster, shared_agent
from tests.engine.waiting import DEADLINE_S, wait_until
from tests.kvstore.agent.agent_process import AgentProcess

__all__ = ["client", "cluster", "shared_agent"]

STATES = 6
LOADS_MAX = 3
SAVES = SinkLimits(lease_blocks_max=2, runs_max=3)
PROMPTS = [prompt_of(*one) for one in ((60, 1), (125, 2), (253, 3), (400, 4), (560, 4), (700, 5))]
LONGEST = 140
OPERATIONS = 120


@contextmanager
def open_engine(runner: ModelRunner, agent: BlockingAgentClient) -> Iterator[LLMEngine]:
    places = {
        "namespace": runner.namespace,
        "pool": runner.pool,
        "window_layout": runner.window_layout,
        "faults": StoreFaults(),
        "clock": time.monotonic,
    }
    config = EngineConfig(sequences_max=STATES, queue_requests_max=8, loads_max=LOADS_MAX)
    source = AgentSource(agent, **places)  # type: ignore[arg-type]
    sink = AgentSink(agent, limits=SAVES, **places)  # type: ignore[arg-type]
    with LLMEngine(runner, source=source, sink=sink, config=config) as engine:
        yield engine


class Driver:
    """Asks an engine for things, in an order of `rng`."""

    def __init__(self, engine: LLMEngine, rng: random.Random) -> None:
        self.engine = engine
        self.rng = rng
        self.prompts: dict[str, list[int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.left: list[Sequence] = []

    def add(self) -> None:
        prompt, max_tokens = self.rng.choice(PROMPTS), self.rng.choice((1, 9, LONGEST))
        name = f"r{len(self.prompts)}"
        try:
            self.engine.add_request(request_of(name, prompt, max_tokens))
        except EngineBusy:
            return
        self.prompts[name], self.answers[name] = prompt, []

    def step(self) -> None:
        for _ in range(self.rng.choice((1, 5, 30))):
            for event in self.engine.step(wait_s=0.001):
                self.answers[event.request_id] += event.token_ids

    def abort(self) -> None:
        if running := list(self.engine._schedule.jobs):
            self.engine.abort(self.rng.choice(running))

    def detach(self) -> None:
        if decoding := self.engine.decoding_ids():
            self.left.append(self.engine.detach(self.rng.choice(decoding)))

    def release(self) -> None:
        if self.left:
            self.engine.release(self.left.pop())

    def do_something(self) -> None:
        self.rng.choice(
            [self.add] * 5 + [self.step] * 8 + [self.abort, self.detach, self.release]
        )()

    def finish(self) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while self.left:
            self.release()
        while self.engine.has_requests:
            assert time.monotonic() < end_s, self.engine.status
            self.step()
        assert self.engine.flush(DEADLINE_S)


@pytest.mark.parametrize("make_runner", [dense_summing, summing])
def test_runs_blocks_and_states_add_up_after_any_operations(
    make_runner: MakeRunner,
    client: BlockingAgentClient,
    shared_agent: AgentProcess,
    rng: random.Random,
) -> None:
    runner = make_runner(16, STATES)
    pool = runner.pool
    with open_engine(runner, client) as engine:
        driver = Driver(engine, rng)
        for number in range(OPERATIONS):
            driver.do_something()
            status = engine.status
            held = status.decoding + status.prefilling + status.held
            assert runner.free_states <= STATES - held
            if number % 10 == 0:
                runs = shared_agent.status()["arena"]["runs"]
                # Each load has one, and the sink may fill one beside those that are saved.
                assert runs <= LOADS_MAX + SAVES.runs_max + 1
        driver.finish()
        assert engine.status.counts.hit_tokens > 0
        assert references_of(pool) == {}
        assert (pool.free_blocks, runner.free_states) == (pool.capacity_blocks, STATES)
        wait_until(lambda: shared_agent.status()["arena"]["runs"] == 0)
        assert shared_agent.status()["arena"]["leased_bytes"] == 0
    if runner.window_layout is None:
        for name, answer in driver.answers.items():
            whole = answer_alone(make_runner, request_of(name, driver.prompts[name], LONGEST))
            assert answer == whole[: len(answer)], name
