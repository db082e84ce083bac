"""What `cachalot status` says of engines, from what their workers answer."""

import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvstore.admin.engine_plan import LocalEngine
from kvstore.admin.engine_socket import HEAD, EngineSilent, ask_engine_at
from kvstore.admin.engine_status import EnginesStatus, EngineStatus, describe_engine
from tests.patience import OPERATION_S


def status_of(
    engine: str,
    role: str,
    *,
    pid: int | None = 1,
    problem: str = "",
    namespace: str | None = None,
) -> EngineStatus:
    return EngineStatus(
        engine=engine, role=role, pid=pid, socket="s", problem=problem, namespace=namespace
    )


def test_engine_that_is_down_or_silent_is_not_alive() -> None:
    alive = status_of("p01", "prefill")
    down, silent = status_of("d01", "decode", pid=None), status_of("d02", "decode", problem="no")
    whole, torn = EnginesStatus((alive,)), EnginesStatus((alive, down, silent))
    assert (whole.are_all_alive, whole.describe()) == (True, "1 of 1 engine alive")
    assert (torn.are_all_alive, torn.describe()) == (False, "1 of 3 engines alive")
    assert EnginesStatus().are_all_alive


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        ([("p01", "prefill", 1), ("d01", "decode", None)], "engines: no decode worker answers: "),
        ([("p01", "prefill", None), ("d01", "decode", 1)], "engines: no prefill worker answers; "),
        ([("p01", "prefill", 1), ("d01", "decode", 1), ("d02", "decode", None)], ""),
        ([("p01", "prefill", 1), ("b01", "both", 1)], ""),
        ([("p01", "prefill", None), ("d01", "decode", None)], ""),
    ],
)
def test_role_that_nobody_plays_is_named(
    engines: list[tuple[str, str, int | None]], said: str
) -> None:
    status = EnginesStatus(tuple(status_of(name, role, pid=pid) for name, role, pid in engines))
    found = [line for line in status.problems() if line.startswith("engines: ")]
    assert [line[: len(said)] for line in found] == ([said] if said else [])


def test_engines_of_different_models_are_named() -> None:
    one, two = (
        status_of(name, role, namespace=space)
        for name, role, space in (("p01", "prefill", "aa"), ("d01", "decode", "bb"))
    )
    (line,) = EnginesStatus((one, two, status_of("d02", "decode"))).problems()
    assert line.endswith("as their models differ (namespaces: p01 aa; d01 bb)")
    assert EnginesStatus((one, status_of("d01", "decode", namespace="aa"))).problems() == []


def test_json_has_what_a_worker_says_beside_the_figures_of_the_table() -> None:
    moves = {"mover": "staged", "rates": [{"name": "staged", "in_bytes_per_s": 5e10}]}
    said = {
        "requests": 2,
        "store_errors": 1,
        "transfer_errors": 3,
        "blocks_move": moves,
        "engine": {"waiting": 1, "saves": {"stored": 4, "known": 1}},
        "hand_overs": {"sent": 7},
    }
    engine = describe_engine(LocalEngine("b01", "both"), 5, Path("s"), said).render_json()
    assert (engine["requests"], engine["waiting"], engine["saved_blocks"]) == (2, 1, 5)
    assert (engine["store_errors"], engine["transfer_errors"]) == (1, 3)
    assert engine["blocks_move"] == moves
    assert engine["document"] == said


@pytest.mark.parametrize("strange", [None, 5, [], "staged"])
def test_moves_that_are_not_understood_are_none(strange: object) -> None:
    said = {"blocks_move": strange}
    assert describe_engine(LocalEngine("b01", "both"), 5, Path("s"), said).blocks_move is None


@contextmanager
def worker_that_says(answer: object) -> Iterator[Path]:
    """Give the socket of a worker that gives one answer, whatever it is asked."""
    body = msgspec.msgpack.encode(answer)
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="ce-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        path = Path(folder) / "b01.sock"
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(HEAD.pack(len(body)) + body)

        serving = threading.Thread(target=serve)
        serving.start()
        yield path
        serving.join()


def test_document_that_no_json_could_hold_is_shown_all_the_same() -> None:
    document = {"key": b"\x00\xff", "rate": float("nan"), "by_number": {1: 2}, "requests": 3}
    with worker_that_says({"type": "Status", "document": document}) as path:
        found = ask_engine_at(path, OPERATION_S)
    assert json.loads(json.dumps(found, allow_nan=False)) == {
        "key": "AP8=",
        "rate": None,
        "by_number": {"1": 2},
        "requests": 3,
    }


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {"type": "Status"},
        {"type": "Status", "document": []},
        {"type": "Refused", "document": {}},
        {"type": "Status", "document": {"x": msgspec.msgpack.Ext(5, b"x")}},
    ],
)
def test_answer_that_is_no_status_is_told_as_such(answer: object) -> None:
    with (
        worker_that_says(answer) as path,
        pytest.raises(EngineSilent, match=r"its answer is not understood|not answer with its"),
    ):
        ask_engine_at(path, OPERATION_S)
