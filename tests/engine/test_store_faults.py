"""What the log says of a store that fails: when it begins to, and that it goes on or does again."""

from __future__ import annotations

import pytest

from engine.errors import TransferFailed
from engine.store_faults import LOG_EVERY_S, StoreFaults
from kvstore.errors import AgentUnreachable, StoreError
from tests.engine.llm_engine.engine_bench import Clock

GONE = AgentUnreachable("agent.sock", "it has gone")


def test_store_that_has_come_back_and_fails_again_is_told_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    faults = StoreFaults(clock)
    faults.note("match", GONE)
    clock.now_s += LOG_EVERY_S
    faults.note("save", StoreError("no node"))
    assert [one.split(": ", 1)[1] for one in caplog.messages] == [
        f"match failed, going on without it: {GONE}",
        "save failed, going on without it: no node",
    ]


def test_store_that_fails_on_and_on_is_one_line_a_minute_that_says_how_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    faults = StoreFaults(clock)
    for _ in range(12):
        faults.note("fetch", GONE)
        clock.now_s += LOG_EVERY_S / 5
    assert faults.count == 12
    assert [one.rsplit(" (", 1)[-1] for one in caplog.messages[1:]] == [
        "4 more of these before)"
    ] * 2


def test_errors_of_the_device_do_not_keep_those_of_the_store_out_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = StoreFaults(Clock())
    faults.note("fetch", TransferFailed("the copy has failed"))
    faults.note("fetch", GONE)
    assert len(caplog.messages) == 2
