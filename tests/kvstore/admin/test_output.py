"""Tables on a terminal and in a pipe."""

import sys

import pytest

from kvstore.admin.output import align_columns, draw_table, progress_bar

HEADER = ("node", "state", "blocks")
ROWS = [["n01", "alive", "12345"], ["n02", "down", "-"]]
LEFT = frozenset({"node", "state"})


def test_columns_are_aligned_without_a_terminal() -> None:
    assert align_columns(HEADER, ROWS, LEFT).splitlines() == [
        "node  state  blocks",
        "n01   alive   12345",
        "n02   down        -",
    ]


def test_table_without_rows_is_its_header() -> None:
    assert align_columns(HEADER, [], LEFT) == "node  state  blocks"


def test_drawn_table_is_not_cut_short_when_the_terminal_is_narrow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    address = "[2001:db8::1]:65535"
    drawn = draw_table(HEADER, [["n01", "alive", address]], LEFT)
    assert address in drawn
    assert len(drawn.splitlines()) == 2


def test_drawn_table_shows_names_as_they_are() -> None:
    drawn = draw_table(HEADER, [["[bold]", "alive", "1"]], LEFT)
    assert "[bold]" in drawn
    assert len(drawn.splitlines()) == 2


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("verifying", 10) as bar:
        bar.show(5, "at n01")
    assert capsys.readouterr() == ("", "")


def test_progress_is_drawn_on_stderr_of_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with progress_bar("verifying", 10) as bar:
        bar.show(5, "at n01")
    said = capsys.readouterr()
    assert said.out == ""
    assert "verifying at n01" in said.err
    assert "50%" in said.err
