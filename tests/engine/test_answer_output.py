"""What a person is told beside an answer: lines of their own, and why not all of it was saved."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.answer_display import describe_dead_nodes, describe_silent_agent
from engine.generate import Output
from engine.generate_options import Place
from engine.save_receipt import SaveSummary
from kvstore.client import NodeReport
from kvstore.errors import AgentUnreachable


def test_nodes_that_do_not_answer_are_told_of_when_some_of_an_answer_is_not_saved() -> None:
    reports = [
        NodeReport(node="n01", address="a:1", is_alive=True),
        NodeReport(node="n02", address="a:2", is_alive=False),
    ]
    place = Place(agent=Path("/run/my agent.sock"))
    look = "(`cachalot status --socket '/run/my agent.sock'` shows them)"
    some = SaveSummary(stored=2, failed=1)
    assert describe_dead_nodes(reports, place, some, is_hit=False) == (
        f"1 of 2 nodes answer; 1 block was not saved {look}"
    )
    assert describe_dead_nodes(reports[:1], place, some, is_hit=False) is None
    error = AgentUnreachable("a.sock", "silent")
    assert describe_silent_agent(error, place, SaveSummary(failed=3)) == (
        f"agent a.sock: silent; 3 blocks were not saved {look}"
    )


def test_error_in_an_answer_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for is_json in (False, True):
        output = Output(is_json=is_json)
        with output:
            output.show("The quick")
        output.__exit__(KeyboardInterrupt)
    assert capsys.readouterr().out == "The quick\n"


def test_remark_is_for_a_person_and_on_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Output(is_json=False) as output:
        output.show("The quick")
        output.remark("unseen")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        output.remark("waiting")
        output.show(" brown")
    assert capsys.readouterr() == ("The quick\n brown", "engine.generate: waiting\n")
