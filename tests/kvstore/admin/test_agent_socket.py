"""`cachalot status --socket`: one agent asked over its own socket, and what else may lie there."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from kvstore.admin.agent_socket import ask_agent_at
from kvstore.agent_messages import HEAD, Refused, StatusTold, Welcome, pack_message
from kvstore.errors import AgentRefused, AgentUnreachable
from tests.kvstore.admin.command_line import ROOT, cachalot_here, one_line

WAIT_S = 20.0


@pytest.fixture
def place() -> Iterator[Path]:
    """Give a folder with a path that is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="ca-"))
    yield folder
    shutil.rmtree(folder)


@contextmanager
def stranger(path: Path, *answers: bytes) -> Iterator[None]:
    """Serve one connection on a socket: say `answers`, and wait until the other side is gone."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            # Whoever has seen enough closes, perhaps with bytes that it has not read.
            with listener.accept()[0] as connection, suppress(ConnectionError):
                connection.settimeout(WAIT_S)
                connection.recv(4096)
                for answer in answers:
                    connection.sendall(answer)
                if not answers or answers[-1]:
                    while connection.recv(4096):
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join(WAIT_S)
        assert not thread.is_alive()


WELCOME = pack_message(
    1, Welcome(version=1, agent="a", instance=1, roles=[], arena_bytes=0, cluster_path="/c")
)


@pytest.mark.parametrize(
    ("answers", "error", "said"),
    [
        ([], AgentUnreachable, "no answer within 0.30 s"),
        ([WELCOME], AgentUnreachable, "no answer within 0.30 s"),
        (
            [WELCOME, b""],
            AgentUnreachable,
            "it closed the connection: it is no agent's socket, or does not take this user",
        ),
        ([b"HTTP/1.1 400 Bad Request"], AgentUnreachable, "an answer of 1347703880 bytes"),
        ([HEAD.pack(4, 1) + b"\xc1\xc1\xc1\xc1"], AgentUnreachable, "is not understood"),
        ([WELCOME * 2], AgentUnreachable, "does not answer with its status"),
        (
            [pack_message(1, Refused(what="protocol version", given="1", expected="2"))],
            AgentRefused,
            "protocol version: given 1",
        ),
        ([WELCOME + pack_message(2, StatusTold(status=b"{"))], AgentUnreachable, "is not JSON"),
        ([WELCOME + pack_message(2, StatusTold(status=b"[]"))], AgentUnreachable, "not an object"),
    ],
)
def test_what_is_no_agent_behind_a_socket_is_told_and_never_waited_for(
    place: Path, answers: list[bytes], error: type[Exception], said: str
) -> None:
    with stranger(place / "s", *answers), pytest.raises(error, match=said):
        ask_agent_at(place / "s", 0.3)


def test_agent_that_takes_no_connections_is_said_to_be_crowded(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as held:
        listener.bind(str(place / "s"))
        listener.listen(0)
        with suppress(BlockingIOError):
            while True:
                waiting = held.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(str(place / "s"))
        with pytest.raises(AgentUnreachable, match="it does not take connections; many wait"):
            ask_agent_at(place / "s", 0.3)


def test_socket_that_is_not_there_is_named(place: Path) -> None:
    line = one_line(cachalot_here("status", "--socket", place / "s", code=4))
    assert line == f"cachalot: agent {place / 's'}: no such socket; is the agent running?"


def test_what_is_no_socket_or_has_no_agent_any_more_is_told_apart(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "f").write_text("")
    # The parser of the command line must not have an opinion on what cannot be read.
    monkeypatch.setattr(os, "access", lambda *_: False)
    for path in (place / "f", place):
        line = one_line(cachalot_here("status", "--socket", path, code=4))
        assert line == f"cachalot: agent {path}: is no socket"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(place / "s"))
    line = one_line(cachalot_here("status", "--socket", place / "s", code=4))
    assert line.endswith("nobody listens there; the agent that made it has ended")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_socket_of_another_user_is_said_to_be_so(place: Path) -> None:
    place.chmod(0o755)
    as_nobody = (
        "import os, sys; from pathlib import Path; from kvstore.admin.agent_socket import *;"
        "os.setuid(65534)\ntry: ask_agent_at(Path(sys.argv[1]), 5.0)\n"
        "except AgentUnreachable as error: print(error)"
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "s"))
        (place / "s").chmod(0o600)
        listener.listen()
        words = [sys.executable, "-c", as_nobody, str(place / "s")]
        ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == (
        f"agent {place / 's'}: Permission denied;"
        " an agent takes only processes of its own user, or root's\n"
    )


@pytest.mark.parametrize("words", [(), ("--cluster", "c", "--socket", "s")])
def test_status_wants_a_cluster_or_a_socket(words: tuple[str, ...]) -> None:
    assert "expected one of them" in one_line(cachalot_here("status", *words, code=2))


@pytest.mark.parametrize("words", [("--targets",), ("--control", "h:1"), ("--token-file", "t")])
def test_status_of_a_socket_refuses_what_only_a_cluster_has(words: tuple[str, ...]) -> None:
    line = one_line(cachalot_here("status", "--socket", "s", *words, code=2))
    assert f"{words[0]}: given --socket too, expected --cluster with it" in line
