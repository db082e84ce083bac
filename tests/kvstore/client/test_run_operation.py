"""What a caller learns of a fetch or a save that goes on without it."""

from concurrent.futures import Future

import pytest

from kvstore.client import RunOperation
from kvstore.errors import AgentUnreachable


def test_operation_calls_back_once_when_it_ends() -> None:
    outcome: Future[int] = Future()
    operation = RunOperation(outcome, "a save")
    seen: list[bool] = []
    operation.when_done(lambda: seen.append(operation.is_done))
    assert seen == []
    outcome.set_result(3)
    assert seen == [True]
    assert operation.join() == 3


def test_operation_that_has_ended_calls_back_at_once_also_after_an_error() -> None:
    outcome: Future[int] = Future()
    outcome.set_exception(AgentUnreachable("a.sock", "gone"))
    operation = RunOperation(outcome, "a save")
    calls: list[None] = []
    operation.when_done(lambda: calls.append(None))
    assert calls == [None]
    with pytest.raises(AgentUnreachable):
        operation.join()
