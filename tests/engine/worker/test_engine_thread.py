"""The engine's thread between its clients and its steps: orders are bounded, and none is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Event

import pytest

from engine import request_checks
from engine.engine_config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.model_runner import ModelRunner
from engine.request import Request, TokenEvent
from engine.worker import engine_thread as engine_thread_module
from engine.worker.engine_thread import ORDERS_PER_STEP, EngineThread
from engine.worker.messages import Finished, Refused
from engine.worker.outbox import Delivery
from tests.engine.llm_engine.engine_bench import llama, prompt_of, request_of
from tests.engine.waiting import DEADLINE_S

REQUESTS = 3 * ORDERS_PER_STEP + 5


class WatchedEngine(LLMEngine):
    """Notes how many requests it had been given when each step began."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner, config=EngineConfig(sequences_max=8, queue_requests_max=1000))
        self.given: list[int] = []

    def step(self, wait_s: float = 0.0) -> list[TokenEvent]:
        self.given.append(self.status.counts.requests)
        return super().step(wait_s)


@dataclass(eq=False)
class Clients:
    """What they were told last, by request."""

    expected: int
    answers: dict[str, object] = field(default_factory=dict)
    is_over: Event = field(default_factory=Event)

    def post(self, deliveries: Sequence[Delivery]) -> None:
        for request_id, answer in deliveries:
            if isinstance(answer, Finished | Refused):
                assert request_id not in self.answers
                self.answers[request_id] = answer
        if len(self.answers) == self.expected:
            self.is_over.set()


@contextmanager
def running(expected: int, requests: Sequence[Request]) -> Iterator[tuple[WatchedEngine, Clients]]:
    """An engine that all requests were ordered of before its thread had its first turn."""
    errors: list[BaseException | None] = []
    clients = Clients(expected)
    engine = WatchedEngine(llama(64, 8))
    with engine:
        thread = EngineThread(engine, None, ends_after_prefill=False, on_end=errors.append)
        for request in requests:
            thread.submit(request)
        thread.start(clients.post)
        try:
            yield engine, clients
        finally:
            assert thread.stop(DEADLINE_S)
    assert errors == [None]


def test_crowd_of_clients_does_not_hold_up_a_step_and_nobody_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is left in line for a later step is not waited with until somebody else comes."""
    monkeypatch.setattr(engine_thread_module, "IDLE_WAIT_S", 3600.0)
    crowd = [request_of(f"r{number}", prompt_of(4, number), 1) for number in range(REQUESTS)]
    with running(REQUESTS, crowd) as (engine, clients):
        assert clients.is_over.wait(DEADLINE_S)
        assert all(isinstance(answer, Finished) for answer in clients.answers.values())
        steps = pairwise([0, *engine.given])
        assert max(after - before for before, after in steps) == ORDERS_PER_STEP


def test_tokens_of_a_prompt_are_looked_at_in_the_thread_of_who_submits_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[str] = []
    sound_check = request_checks.check_request

    def check(request: Request, runner: ModelRunner) -> None:
        looked.append(threading.current_thread().name)
        sound_check(request, runner)

    monkeypatch.setattr(request_checks, "check_request", check)
    monkeypatch.setattr("engine.llm_engine.check_request", check)
    requests = [request_of("good", prompt_of(300), 2), request_of("bad", [5, 10**6], 2)]
    with running(2, requests) as (engine, clients):
        assert clients.is_over.wait(DEADLINE_S)
        assert isinstance(clients.answers["good"], Finished)
        refused = clients.answers["bad"]
        assert isinstance(refused, Refused)
        assert refused.cause == "invalid"
        assert "token id" in refused.reason
        assert engine.status.counts.requests == 1
    assert looked == [threading.current_thread().name] * 2
