"""The line for each request that ends in a worker: it says what was hit, and comes once."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from engine.worker.request_log import Ending, log_end
from kvstore.event_log import find_fields
from tests.engine.llm_engine.driven import Kept
from tests.engine.llm_engine.engine_bench import (
    EngineBench,
    bench,
    nano,
    prompt_of,
    request_of,
)


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "engine.worker.request_log")


def line_of(caplog: pytest.LogCaptureFixture, one: EngineBench, ending: Ending) -> dict[str, Any]:
    """What the log says of the request `r`, but for what it took."""
    caplog.clear()
    log_end("r", ending, one.report("r"))
    (record,) = caplog.records
    fields = find_fields(str(record.msg), record.args)
    return {name: value for name, value in fields.items() if name != "ttft_s"}


def test_line_is_for_people_and_for_programs(caplog: pytest.LogCaptureFixture) -> None:
    with bench(has_source=False) as one:
        one.add(request_of("r", prompt_of(300), 3))
        one.clock.now_s += 1.5
        one.finish()
        log_end("r", "length", one.report("r"))
    assert caplog.messages == [
        "request=r ended=length prompt_tokens=300 hit_tokens=0 replay_tokens=0 fetched_tokens=0 "
        "shared_tokens=0 computed_tokens=300 answer_tokens=3 ttft_s=1.500"
    ]


def test_hit_is_told_by_where_it_came_from(caplog: pytest.LogCaptureFixture) -> None:
    prompt, kept = prompt_of(530), Kept()
    with bench(kept=kept) as other:
        other.add(request_of("r", prompt, 1))
        other.finish()
    with bench(kept=kept) as one:
        one.add(request_of("begun", prompt[:300], 1))
        one.finish()
        one.add(request_of("r", prompt, 2))
        one.finish()
        assert line_of(caplog, one, "length") == {
            "request": "r",
            "ended": "length",
            "prompt_tokens": 530,
            "hit_tokens": 512,
            "replay_tokens": 0,
            "fetched_tokens": 256,
            "shared_tokens": 256,
            "computed_tokens": 18,
            "answer_tokens": 2,
        }


def test_what_was_replayed_was_fetched_and_computed_too(caplog: pytest.LogCaptureFixture) -> None:
    prompt, kept = prompt_of(400), Kept()
    with bench(nano, kept=kept) as other:
        other.add(request_of("r", prompt, 1))
        other.finish()
    kept.windows.clear()
    longer = [*prompt[:384], *prompt_of(140, 2)]
    with bench(nano, kept=kept) as one:
        one.add(replace(request_of("r", longer, 9), ends_after_prefill=True))
        one.step_until(lambda: one.answers["r"].is_prefilled)
        line = line_of(caplog, one, "prefilled")
        assert line["ended"] == "prefilled"
        assert (line["hit_tokens"], line["replay_tokens"], line["fetched_tokens"]) == (
            256,
            128,
            384,
        )
        assert line["hit_tokens"] + line["computed_tokens"] == len(longer) == line["prompt_tokens"]
        assert line["answer_tokens"] == 1
        one.engine.abort("r")
        one.finish()


def test_request_that_ends_without_a_token_has_computed_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with bench(has_source=False) as one:
        one.add(request_of("r", prompt_of(300), 3))
        one.engine.abort("r")
        one.finish()
        line = line_of(caplog, one, "aborted")
        assert (line["prompt_tokens"], line["computed_tokens"], line["answer_tokens"]) == (
            300,
            0,
            0,
        )


def test_tokens_that_were_answered_elsewhere_are_computed_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with bench(has_source=False) as one:
        one.add(request_of("r", prompt_of(20), 8, answered_ids=(5, 6, 7)))
        one.finish()
        line = line_of(caplog, one, "length")
        assert (line["prompt_tokens"], line["computed_tokens"], line["answer_tokens"]) == (
            20,
            23,
            8,
        )
