"""An engine that drains sends its sequences away at whatever token they are, and each goes on with
equal tokens; what cannot leave yet is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import pytest

from engine.request import Request
from engine.store_faults import StoreFaults
from engine.worker import hand_overs as hand_overs_module
from engine.worker.engine_thread import EngineThread
from engine.worker.hand_overs import HandOvers
from engine.worker.messages import (
    Answer,
    Failed,
    Finished,
    HandedOver,
    Tokens,
    Waiting,
    pack_tokens,
)
from engine.worker.outbox import Delivery
from engine.worker.request_line import RequestLine
from kvstore.client import BlockingAgentClient
from tests.engine.handover.agent_in_memory import AgentInMemory
from tests.engine.llm_engine.driven import Kept
from tests.engine.llm_engine.engine_bench import (
    EngineBench,
    MakeRunner,
    answer_alone,
    bench,
    dense_summing,
    nano,
    prompt_of,
    request_of,
    summing,
)
from tests.engine.waiting import DEADLINE_S, wait_until
from tests.engine.worker.worker_process import submission


class Worker:
    """An engine in its thread, with its hand-overs, and what its clients are told.

    `after_turn` is called in the thread: what it orders is done before the next step.
    """

    def __init__(
        self, make_runner: MakeRunner, agent: AgentInMemory, kept: Kept, *, pool_blocks: int = 64
    ) -> None:
        self.bench = EngineBench(make_runner, kept=kept, pool_blocks=pool_blocks, state_slots=16)
        self.engine = self.bench.engine
        self.hand_overs = HandOvers(
            self.engine,
            cast("BlockingAgentClient", agent),
            faults=StoreFaults(),
            on_change=self.engine.wake,
        )
        self.errors: list[BaseException | None] = []
        self.thread = EngineThread(
            self.engine,
            self.hand_overs,
            RequestLine(16, clock=self.bench.clock),
            ends_after_prefill=False,
            on_end=self.errors.append,
            clock=self.bench.clock,
        )
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Answer] = {}
        self.after_turn: Callable[[], None] = lambda: None

    def submit(self, request: Request) -> None:
        sampling = request.sampling
        message = submission(request.prompt_ids, request.max_tokens, sampling)
        message.answered_ids = pack_tokens(request.answered_ids)
        assert self.thread.submit(request.request_id, message) is None

    def take_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        for name, answer in deliveries:
            assert name not in self.ends, "an answer after the last one"
            if isinstance(answer, Tokens):
                self.tokens.setdefault(name, []).extend(answer.token_ids)
            elif not isinstance(answer, Waiting):
                self.ends[name] = answer
        self.after_turn()

    def drain_when(self, is_so: Callable[[], bool]) -> None:
        """Once, right after the turn in which it became so."""

        def look() -> None:
            if is_so():
                self.after_turn = lambda: None
                self.thread.hand_over_all()

        self.after_turn = look

    def end_of(self, name: str) -> Answer:
        wait_until(lambda: name in self.ends or bool(self.errors))
        return self.ends[name]

    def ticket_of(self, name: str) -> bytes:
        end = self.end_of(name)
        assert isinstance(end, HandedOver), end
        assert end.ticket is not None, end.reason
        return end.ticket

    def close(self) -> None:
        assert self.thread.stop(DEADLINE_S)
        assert self.errors == [None]
        assert self.hand_overs.close(DEADLINE_S)
        assert self.engine.close()
        self.bench.assert_all_is_free()


OpenWorker = Callable[..., Worker]


@contextmanager
def workers(make_runner: MakeRunner, agent: AgentInMemory, kept: Kept) -> Iterator[OpenWorker]:
    """Workers at one agent, with one store; at the end nothing is left of any sequence."""
    opened: list[Worker] = []

    def open_one(**settings: int) -> Worker:
        opened.append(Worker(make_runner, agent, kept, **settings))
        opened[-1].thread.start(opened[-1].take_deliveries)
        return opened[-1]

    try:
        yield open_one
    finally:
        for worker in opened:
            worker.close()
    assert agent.offers == 0
    assert all(run.is_released for run in agent.leased)


PROMPT = prompt_of(124)
"""Four tokens of the answer fill its block, the fifth of them computes that, and window state may
be copied until the fifth token behind it."""
MAX_TOKENS = 132
"""Up to the end of the next block, which is computed to its end for the next turn."""


@pytest.mark.parametrize(
    ("make_runner", "tokens"),
    [
        *((summing, tokens) for tokens in (1, 2, 3, 4, 5, 6, 9, 10, 11, 131)),
        *((dense_summing, tokens) for tokens in (1, 4, 5)),
        *((nano, tokens) for tokens in (5, 10)),
    ],
)
def test_sequence_that_is_drained_at_any_token_goes_on_with_equal_tokens(
    make_runner: MakeRunner, tokens: int
) -> None:
    max_tokens = 14 if make_runner is nano else MAX_TOKENS
    request, kept, agent = request_of("r", PROMPT, max_tokens), Kept(), AgentInMemory()
    with workers(make_runner, agent, kept) as open_worker:
        first, second = open_worker(), open_worker()
        first.drain_when(lambda: len(first.tokens.get("r", ())) == tokens)
        first.submit(request)
        ticket = first.ticket_of("r")
        assert len(first.tokens["r"]) == tokens
        second.thread.resume("r", ticket)
        assert isinstance(second.end_of("r"), Finished)
        answer = first.tokens["r"] + second.tokens["r"]
        assert answer == answer_alone(make_runner, request)
    # Whatever was to be kept for the next turn is there: the one worker or the other had it.
    turn = request_of("turn", [*PROMPT, *answer, *prompt_of(140, 3)], 4)
    with bench(make_runner, kept=kept) as third:
        third.add(turn)
        third.finish()
        assert third.tokens("turn") == answer_alone(make_runner, turn)
        assert (third.report("turn").hit_tokens > 0, third.report("turn").replay_tokens) == (
            True,
            0,
        )


@pytest.mark.parametrize("max_tokens", [MAX_TOKENS, MAX_TOKENS - 1])
def test_answer_that_is_complete_ends_where_it_is(max_tokens: int) -> None:
    """Also if its last token is yet to be computed."""
    request, agent = request_of("r", PROMPT, max_tokens), AgentInMemory()
    with workers(summing, agent, Kept()) as open_worker:
        worker = open_worker()
        worker.drain_when(lambda: len(worker.tokens.get("r", ())) == max_tokens)
        worker.submit(request)
        end = worker.end_of("r")
        assert isinstance(end, Finished), end
        assert worker.tokens["r"] == answer_alone(summing, request)


def test_sequence_that_is_still_coming_leaves_when_it_has_come() -> None:
    """Its ticket is spent: it cannot go anywhere else before."""
    request, agent = request_of("r", PROMPT, 40), AgentInMemory()
    with workers(summing, agent, Kept()) as open_worker:
        first, second, third = open_worker(), open_worker(), open_worker()
        first.drain_when(lambda: len(first.tokens.get("r", ())) == 3)
        first.submit(request)
        ticket = first.ticket_of("r")
        agent.may_take.clear()
        second.thread.resume("r", ticket)
        wait_until(lambda: second.engine.status.held == 1)
        second.thread.hand_over_all()
        wait_until(lambda: second.thread._is_leaving)
        agent.may_take.set()
        third.thread.resume("r", second.ticket_of("r"))
        assert isinstance(third.end_of("r"), Finished)
        assert "r" not in second.tokens, "it leaves with the turn in which it has come"
        assert first.tokens["r"] + third.tokens["r"] == answer_alone(summing, request)


def test_all_sequences_leave_when_there_are_more_than_may_at_one_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those whose turn has not come go on with their answers."""
    monkeypatch.setattr(hand_overs_module, "LEAVING_MAX", 2)
    monkeypatch.setattr("engine.handover.sender.IN_FLIGHT_MAX", 3)
    requests = [request_of(f"r{number}", prompt_of(20, number), 200) for number in range(8)]
    names, agent = [request.request_id for request in requests], AgentInMemory()
    with workers(summing, agent, Kept()) as open_worker:
        first, second = open_worker(pool_blocks=128), open_worker(pool_blocks=128)
        agent.may_lease.clear()
        first.drain_when(lambda: first.tokens.keys() >= {*names})
        for request in requests:
            first.submit(request)
        wait_until(lambda: first.engine.status.counts.detached == 2)
        stopped = {name: len(first.tokens[name]) for name in names}
        wait_until(lambda: _grown(first, stopped) == 6)
        assert first.ends == {}
        agent.may_lease.set()
        for request in requests:
            second.thread.resume(request.request_id, first.ticket_of(request.request_id))
        for request in requests:
            name = request.request_id
            assert isinstance(second.end_of(name), Finished)
            answer = first.tokens[name] + second.tokens[name]
            assert answer == answer_alone(summing, request)


def _grown(worker: Worker, before: dict[str, int]) -> int:
    """How many answers have more tokens than before."""
    return sum(len(worker.tokens[name]) > tokens for name, tokens in before.items())


def test_what_has_no_cache_here_is_given_up_and_run_again_elsewhere() -> None:
    """A sequence that was preempted, and one that is in line: there is nothing to send."""
    requests = [request_of(name, prompt_of(126, ord(name)), 200) for name in "abc"]
    agent = AgentInMemory()
    with workers(summing, agent, Kept()) as open_worker:
        first, second = open_worker(pool_blocks=4), open_worker()
        first.drain_when(lambda: first.engine.status.counts.preemptions > 0)
        for request in requests:
            first.submit(request)
        ends = {request.request_id: first.end_of(request.request_id) for request in requests}
        kinds = sorted(type(end).__name__ for end in ends.values())
        assert kinds == ["Failed", "Failed", "HandedOver"]
        for request in requests:
            name, end = request.request_id, ends[request.request_id]
            given = first.tokens.get(name, [])
            if isinstance(end, Failed):
                second.submit(replace(request, answered_ids=tuple(given)))
            else:
                second.thread.resume(name, first.ticket_of(name))
            assert isinstance(second.end_of(name), Finished)
            assert given + second.tokens[name] == answer_alone(summing, request)
