"""What is seen while the demo runs, on a terminal and without one."""

import io
import re

import pytest
from rich.console import Console

from demo.claims import Claim
from demo.display import LiveDisplay, PlainDisplay, SilentDisplay, choose_display
from demo.outcomes import Outcome, Request
from tests.demo.replies import make_reply

COLD, SECOND = Request(1, "cold"), Request(2, "again")
SO, NOT_SO = Claim("2 blocks were stored", True), Claim("0 blocks failed", False)
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def make_terminal() -> Console:
    """A terminal of 140 columns that keeps what is written to it."""
    return Console(
        file=io.StringIO(), force_terminal=True, width=140, height=40, color_system="standard"
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def plain(text: str) -> str:
    """The words without what moves the cursor or colours them."""
    return CONTROL.sub("", text)


def test_live_display_draws_a_running_request_in_place_and_its_outcome_after_that() -> None:
    console = make_terminal()
    display = LiveDisplay(console)
    with display.shown():
        display.note("12 storage nodes")
        display.begin(COLD)
        display.take_text("So it [red]is[/red]")
        display._live.refresh()
        running = written(console)
        display.end(Outcome(COLD, make_reply(ttft_s=11.42, text="So it is now."), (SO, NOT_SO)))
        display._live.refresh()
        ended = written(console)[len(running) :]
    assert "12 storage nodes" in plain(running)
    assert "So it [red]is[/red]" in plain(running)
    assert "\x1b[1A" in ended, "the table must be drawn again over its old place"
    assert "1. answer: So it is now." in plain(ended)
    assert "1. ok 2 blocks were stored" in plain(ended)
    assert "1. WRONG 0 blocks failed" in plain(ended)
    assert "11.42 s" in plain(ended)
    assert "So it is now." in plain(ended)


def test_live_display_prints_an_answer_in_full_that_the_table_cuts() -> None:
    console = make_terminal()
    display = LiveDisplay(console)
    words = " ".join(f"word{number}" for number in range(60))
    with display.shown():
        display.begin(COLD)
        display.end(Outcome(COLD, make_reply(text=words), (SO,)))
    assert f"1. answer: {words}" in " ".join(plain(written(console)).split())


def test_live_display_gives_the_cursor_back_when_what_it_shows_breaks_off() -> None:
    console = make_terminal()
    display = LiveDisplay(console)

    def be_interrupted() -> None:
        with display.shown():
            display.begin(COLD)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        be_interrupted()
    assert written(console).rindex("\x1b[?25h") > written(console).rindex("\x1b[?25l")


def test_live_display_leaves_the_table_of_all_requests_and_the_end_line() -> None:
    console = make_terminal()
    display = LiveDisplay(console)
    outcomes = [
        Outcome(COLD, make_reply(ttft_s=11.42, text="One."), (SO,)),
        Outcome(SECOND, make_reply(ttft_s=0.41, text="Two."), (SO,)),
    ]
    with display.shown():
        for outcome in outcomes:
            display.begin(outcome.request)
            display.end(outcome)
    before = len(written(console))
    display.finish(outcomes)
    left = plain(written(console)[before:])
    assert [left.count(words) for words in ("cold", "again", "One.", "Two.")] == [1, 1, 1, 1]
    assert (
        left.rstrip().splitlines()[-1]
        == "time to first token 11.4 s -> 0.4 s (request 1, nothing stored; request 2, a hit)"
    )


def test_live_display_boasts_of_nothing_when_a_claim_is_broken() -> None:
    console = make_terminal()
    display = LiveDisplay(console)
    outcomes = [Outcome(COLD, make_reply(), (SO,)), Outcome(SECOND, make_reply(), (NOT_SO,))]
    with display.shown():
        for outcome in outcomes:
            display.begin(outcome.request)
            display.end(outcome)
    display.finish(outcomes)
    assert "time to first token" not in plain(written(console))


def test_display_is_chosen_by_where_the_output_goes() -> None:
    pipe = Console(file=io.StringIO(), force_terminal=False)
    assert isinstance(choose_display(make_terminal(), is_json=False), LiveDisplay)
    assert isinstance(choose_display(pipe, is_json=False), PlainDisplay)
    assert isinstance(choose_display(make_terminal(), is_json=True), SilentDisplay)
