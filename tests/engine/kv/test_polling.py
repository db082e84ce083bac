"""What has no wait with a deadline is looked at, ever less often."""

from __future__ import annotations

from threading import Event
from typing import cast

import pytest

from engine.kv import polling
from engine.kv.polling import POLL_FIRST_S, POLL_MAX_S, poll


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was slept, without a sleep."""
    pauses: list[float] = []

    class Pause:
        def wait(self, timeout_s: float) -> None:
            pauses.append(timeout_s)

    monkeypatch.setattr(polling, "Event", cast("type[Event]", Pause))
    return pauses


def test_pauses_grow_up_to_a_bound_and_end_when_it_is_over(pauses: list[float]) -> None:
    looks = iter([False] * 7 + [True])
    assert poll(lambda: next(looks), 1.0)
    assert pauses == [POLL_FIRST_S * 2**n for n in range(5)] + [POLL_MAX_S] * 2


def test_what_is_over_already_costs_no_pause(pauses: list[float]) -> None:
    assert poll(lambda: True, 0.0)
    assert pauses == []


def test_what_is_not_over_by_the_deadline_is_told_after_a_last_look(pauses: list[float]) -> None:
    looks: list[int] = []
    assert not poll(lambda: bool(looks.append(1)), 0.05, poll_max_s=0.01)  # type: ignore[func-returns-value]
    assert len(looks) == len(pauses) + 1
    assert 0.05 <= sum(pauses) < 0.06
