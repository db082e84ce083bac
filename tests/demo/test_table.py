"""The table says in few characters what a request gave."""

from collections.abc import Sequence

import pytest
from rich.console import Console

from demo.claims import Claim
from demo.outcomes import Outcome, Request
from demo.table import (
    ANSWER_CHARACTERS_MAX,
    ANSWER_CHARACTERS_MIN,
    COLUMNS,
    answer_characters,
    describe_end,
    describe_outcome,
    describe_running,
    draw_table,
    format_seconds,
    format_time,
    shorten,
)
from tests.demo.replies import make_reply

HOLDS, BROKEN = Claim("so", True), Claim("not so", False)


def make_outcomes(*ttft_s: float, claims: Sequence[Claim] = (HOLDS,)) -> list[Outcome]:
    return [
        Outcome(Request(number, f"request {number}"), make_reply(ttft_s=time_s), tuple(claims))
        for number, time_s in enumerate(ttft_s, 1)
    ]


def test_row_has_the_numbers_of_the_reply() -> None:
    reply = make_reply(prompt_ids=range(3_972), hit_tokens=3_968, ttft_s=0.25, text="So\n\nit is.")
    cells = describe_outcome(Outcome(Request(3, "again"), reply, (HOLDS,)), 80)
    assert cells == [
        *("3", "again", "3,972", "3,968"),
        *("250 ms", "2 ms", "90 ms", "158 ms"),
        "So it is.",
    ]
    assert len(cells) == len(COLUMNS)


def test_row_of_a_running_request_shows_what_has_come_of_the_answer() -> None:
    assert describe_running(Request(1, "cold"), "", 80)[-1] == "..."
    running = describe_running(Request(1, "cold"), "So it", 80)
    assert (running[-1], len(running)) == ("So it", len(COLUMNS))


@pytest.mark.parametrize(
    ("time_s", "text"),
    [(0.0, "0 ms"), (0.0316, "32 ms"), (0.9994, "999 ms"), (0.9996, "1.00 s"), (11.4, "11.40 s")],
)
def test_time_has_the_unit_that_fits(time_s: float, text: str) -> None:
    assert format_time(time_s) == text


@pytest.mark.parametrize(
    ("time_s", "text"), [(11.42, "11.4 s"), (0.36, "0.4 s"), (0.1, "0.1 s"), (0.094, "0.09 s")]
)
def test_seconds_never_round_to_nothing(time_s: float, text: str) -> None:
    assert format_seconds(time_s) == text


def test_answer_is_cut_to_its_room() -> None:
    assert shorten("a b " * 30, 10) == "a b a b..."
    assert len(shorten("x" * 100, 24)) == 24
    widths = [answer_characters(width) for width in (60, 80, 120, 200)]
    assert widths == [ANSWER_CHARACTERS_MIN, ANSWER_CHARACTERS_MIN, 52, ANSWER_CHARACTERS_MAX]


def test_end_sets_the_cold_request_against_the_next_one() -> None:
    assert describe_end(make_outcomes(11.4, 0.41, 7.0)) == [
        "",
        "all 3 claims hold",
        "time to first token 11.4 s -> 0.4 s (request 1, nothing stored; request 2, a hit)",
    ]


def test_end_boasts_of_nothing_when_a_claim_is_broken() -> None:
    assert describe_end(make_outcomes(11.4, 0.4, claims=(HOLDS, BROKEN))) == []
    assert describe_end(make_outcomes(11.4)) == []


def test_table_shows_an_answer_as_it_is() -> None:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(draw_table([["1", "cold", *("",) * 6, "a[0] is [red]not[/red] markup"]]))
    console.file.close()
    assert "a[0] is [red]not[/red] markup" in console.export_text()
