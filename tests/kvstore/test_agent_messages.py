"""Bytes of the agent's socket, docs/formats/agent-socket.md: another byte is another version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstore import agent_messages as m

PAGE = Path(__file__).parents[2] / "docs/formats/agent-socket.md"

GOLDEN = [
    (
        7,
        m.Hello(version=1, client="engine"),
        "230000000700000083a474797065a548656c6c6fa776657273696f6e01a6636c69656e74a6656e67696e65",
    ),
    (
        8,
        m.RunLeased(run=3, offset=4096, blocks=64),
        "2f00000008000000"
        "85a474797065a952756e4c6561736564a372756e03a66f6666736574cd1000a6626c6f636b7340a4636f6465920000",
    ),
    (
        2**32 - 1,
        m.PutWindow(namespace=0, key=bytes(range(32)), run=1),
        "46000000ffffffff"
        "84a474797065a950757457696e646f77a96e616d65737061636500a36b6579c420"
        + bytes(range(32)).hex()
        + "a372756e01",
    ),
]


@pytest.mark.parametrize(("request_id", "message", "expected"), GOLDEN)
def test_messages_have_these_bytes(request_id: int, message: m.Message, expected: str) -> None:
    assert m.pack_message(request_id, message).hex() == expected


def test_page_lists_every_message_and_every_field() -> None:
    page = PAGE.read_text()
    tables = page[page.index("## Requests") : page.index("## Order")]
    rows = {name: row for row in tables.splitlines() for name in re.findall(r"^\| `(\w+)`", row)}
    requests, answers = m.Request.__args__, m.Answer.__args__
    assert set(rows) == {kind.__name__ for kind in (*requests, *answers)}
    for kind in (*requests, *answers):
        missing = [name for name in kind.__struct_fields__ if name not in rows[kind.__name__]]
        assert missing == [], kind.__name__


def test_message_that_is_too_long_is_not_packed() -> None:
    with pytest.raises(ValueError, match="at most 1048576"):
        m.pack_message(1, m.StatusTold(bytes(m.MESSAGE_BYTES_MAX)))
