"""The engine's thread between its clients and its steps: orders are bounded, and none is left."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from threading import Event

import pytest

from engine import request_checks
from engine.engine_config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.model_runner import ModelRunner
from engine.request import Request, TokenEvent
from engine.request_checks import PreparedRequest
from engine.worker import engine_thread as engine_thread_module
from engine.worker.engine_thread import NOTICE_INTERVAL_S, ORDERS_PER_STEP, EngineThread
from engine.worker.messages import Finished, Refused, Submit, Waiting, pack_tokens
from engine.worker.outbox import Delivery
from engine.worker.request_line import RequestLine
from tests.engine.llm_engine.engine_bench import dense_summing, llama, prompt_of, request_of
from tests.engine.waiting import DEADLINE_S, wait_until

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
    """What they were told last, by request, and meanwhile."""

    expected: int
    answers: dict[str, object] = field(default_factory=dict)
    waits: dict[str, list[Waiting]] = field(default_factory=lambda: defaultdict(list))
    is_over: Event = field(default_factory=Event)

    def post(self, deliveries: Sequence[Delivery]) -> None:
        for request_id, answer in deliveries:
            if isinstance(answer, Finished | Refused):
                assert request_id not in self.answers
                self.answers[request_id] = answer
            elif isinstance(answer, Waiting):
                self.waits[request_id].append(answer)
        if len(self.answers) == self.expected:
            self.is_over.set()


def submission_of(request: Request) -> Submit:
    return Submit(
        prompt_ids=pack_tokens(request.prompt_ids),
        max_tokens=request.max_tokens,
        answered_ids=pack_tokens(request.answered_ids),
    )


@contextmanager
def asked(
    requests: Sequence[Request],
    *,
    make_engine: Callable[[], LLMEngine] = lambda: WatchedEngine(llama(64, 8)),
    line_max: int = 1000,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[EngineThread, RequestLine, LLMEngine]]:
    """An engine whose thread has not had its first turn: all requests were read and wait."""
    errors: list[BaseException | None] = []
    line = RequestLine(line_max, clock=time.monotonic)
    with make_engine() as engine:
        thread = EngineThread(
            engine, None, line, ends_after_prefill=False, on_end=errors.append, clock=clock
        )
        for request in requests:
            assert thread.submit(request.request_id, submission_of(request)) is None
        wait_until(lambda: line.ready == len(line) == len(requests))
        yield thread, line, engine
        assert thread.stop(DEADLINE_S)
    assert errors == [None]


@contextmanager
def running(expected: int, requests: Sequence[Request]) -> Iterator[tuple[WatchedEngine, Clients]]:
    """An engine that all requests were ordered of before its thread had its first turn."""
    clients = Clients(expected)
    with asked(requests) as (thread, _, engine):
        assert isinstance(engine, WatchedEngine)
        thread.start(clients.post)
        yield engine, clients


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


def test_tokens_of_a_prompt_are_looked_at_in_a_thread_in_which_nobody_waits(
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
    assert looked == ["request-reader-0"] * 2


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Submit(prompt_ids=b"abc", max_tokens=4), "token ids of 3 bytes"),
        (Submit(prompt_ids=b"", max_tokens=4, temperature=float("inf")), "temperature"),
    ],
)
def test_request_with_wrong_values_is_refused(message: Submit, reason: str) -> None:
    clients = Clients(1)
    with asked([]) as (thread, _, _):
        thread.start(clients.post)
        assert thread.submit("r", message) is None
        assert clients.is_over.wait(DEADLINE_S)
    refused = clients.answers["r"]
    assert isinstance(refused, Refused)
    assert refused.cause == "invalid"
    assert reason in refused.reason


def test_answer_that_its_context_has_ended_elsewhere_is_finished() -> None:
    whole = replace(request_of("r", prompt_of(1022), 9), answered_ids=(4, 5))
    with running(1, [whole]) as (_, clients):
        assert clients.is_over.wait(DEADLINE_S)
    finished = clients.answers["r"]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.report["answer_tokens"]) == ("length", 2)


# --- what is not begun


def test_request_beyond_those_that_may_wait_is_refused_at_once() -> None:
    """And not by a step that may be long in coming: here there is none at all."""
    requests = [request_of(f"r{number}", prompt_of(4), 1) for number in range(2)]
    with asked(requests, line_max=2) as (thread, line, _):
        refusals = (
            thread.submit("more", submission_of(requests[0])),
            thread.resume("ticket", b"t"),
        )
        for refused in refusals:
            assert isinstance(refused, Refused)
            assert refused.cause == "busy"
            assert "2 requests wait" in refused.reason
        assert len(line) == 2
        assert thread.describe()["engine"]["counts"]["refused"] == 2
        thread.start(lambda deliveries: None)


def count_prepared() -> int:
    gc.collect()
    return sum(type(one) is PreparedRequest for one in gc.get_objects())


def test_clients_that_ask_and_go_away_leave_nothing_to_a_step() -> None:
    others = count_prepared()
    crowd = [request_of(f"r{number}", prompt_of(300, number), 1) for number in range(REQUESTS)]
    with asked(crowd, line_max=REQUESTS) as (thread, line, engine):
        assert count_prepared() == others + REQUESTS
        for request in crowd:
            thread.abort(request.request_id)
        assert (len(line), count_prepared()) == (0, others)
        clients = Clients(1)
        assert thread.submit("after", submission_of(request_of("after", prompt_of(4), 1))) is None
        thread.start(clients.post)
        assert clients.is_over.wait(DEADLINE_S)
        assert engine.status.counts.requests == 1


# --- what waits


class TurnClock:
    """An hour goes by whenever it is looked at."""

    def __init__(self) -> None:
        self._hours = count()

    def __call__(self) -> float:
        return 3600.0 * next(self._hours)


def test_client_in_line_is_told_its_place_until_it_has_its_turn() -> None:
    requests = [request_of(name, prompt_of(4), 20) for name in "abc"]
    clients = Clients(3)

    def make() -> LLMEngine:
        return LLMEngine(llama(64, 1), config=EngineConfig(sequences_max=1))

    with asked(requests, make_engine=make, clock=TurnClock()) as (thread, _, _):
        thread.start(clients.post)
        assert clients.is_over.wait(DEADLINE_S)
    assert clients.waits["b"][0] == Waiting(state="queued", ahead=0)
    places = [wait.ahead for wait in clients.waits["c"] if wait.state == "queued"]
    assert places[0] == 1
    assert sorted(places, reverse=True) == places, "it goes back in line"
    assert len(clients.waits["b"]) > 15, "each turn in which the first one answers"


def test_client_whose_request_gave_way_is_told_so_and_one_that_gets_tokens_nothing() -> None:
    requests = [request_of(name, prompt_of(100, ord(name)), 400) for name in "ab"]
    clients = Clients(2)

    def make() -> LLMEngine:
        return LLMEngine(dense_summing(5, 2))

    with asked(requests, make_engine=make, clock=TurnClock()) as (thread, _, _):
        thread.start(clients.post)
        assert clients.is_over.wait(DEADLINE_S)
    assert Waiting(state="preempted", ahead=0) in clients.waits["b"]
    assert len(clients.waits["a"]) < 10


def test_client_that_waits_is_not_told_so_at_every_step() -> None:
    requests = [request_of(name, prompt_of(4), 20) for name in "ab"]
    clients = Clients(2)

    def make() -> LLMEngine:
        return LLMEngine(llama(64, 1), config=EngineConfig(sequences_max=1))

    now_s = NOTICE_INTERVAL_S - 0.1
    with asked(requests, make_engine=make, clock=lambda: now_s) as (thread, _, _):
        thread.start(clients.post)
        assert clients.is_over.wait(DEADLINE_S)
    assert clients.waits == {}


def test_log_has_one_line_for_each_request_that_was_begun(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "engine.worker")
    requests = [request_of(f"r{number}", prompt_of(9, number), 20) for number in range(3)]
    with running(4, [*requests, request_of("bad", [5, 10**6], 2)]) as (_, clients):
        assert clients.is_over.wait(DEADLINE_S)
    assert [line.split(" prompt_tokens")[0] for line in sorted(caplog.messages)] == [
        f"request={request.request_id} ended=length" for request in requests
    ]
