"""The HTTP client of the control API, against real sockets that behave well and badly."""

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.admin.control_client import (
    ControlEndpoint,
    ControlPlane,
    ControlRefused,
    ControlUnreachable,
    NoWorker,
    find_endpoints,
    parse_control_url,
)
from kvstore.admin.local_plan import LocalShape, plan_local_map
from kvstore.admin.policy_change import ChangeNotUnderstood, send_change
from kvstore.admin.quantities import make_code
from kvstore.errors import InvalidArgument
from kvstore.retention import DEFAULT_POLICY
from tests.kvstore.admin.command_line import start_cachalot
from tests.patience import OPERATION_S, PATIENCE_S, WELL_BEFORE_S, wait_until

TOKEN = "a-token-of-the-test-that-is-long-enough"


class Peer:
    """Answers each connection with given bytes, and keeps what it was sent."""

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self.requests: list[bytes] = []
        self.on_request: Callable[[], object] = lambda: None
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def endpoint(self, node: str = "n01") -> ControlEndpoint:
        return ControlEndpoint(node=node, address=self.address)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.requests.append(read_request(connection))
                self.on_request()
                try:
                    self._answer(connection)
                except OSError:
                    continue  # the client has gone, which is what some tests want

    def close(self) -> None:
        # A thread that waits in accept is not woken by close alone.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10.0)


def read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    wanted = int(lengths[0].split(b":")[1]) if lengths else 0
    while len(body) < wanted:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@contextmanager
def peer(answer: Callable[[socket.socket], None]) -> Iterator[Peer]:
    found = Peer(answer)
    try:
        yield found
    finally:
        found.close()


def reply(status: str, body: bytes) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode() + body)

    return send


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_request_carries_the_token_and_the_body_and_gives_the_answer() -> None:
    with peer(reply("200 OK", b'{"a": 1}')) as one:
        plane = ControlPlane([one.endpoint()], TOKEN)
        body = {"why": "ü"}
        assert plane.ask_any("PUT", "/api/policy", body=body, deadline_s=OPERATION_S) == {"a": 1}
    head, _, content = one.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"PUT /api/policy HTTP/1.1\r\n")
    assert f"Authorization: Bearer {TOKEN}".encode() in head
    assert json.loads(content) == body


@pytest.mark.parametrize(
    ("status", "exit_code"),
    [("400 Bad", 2), ("401 No", 2), ("404 None", 2), ("409 Lost", 1), ("500 Oh", 1), ("503 No", 4)],
)
def test_refusal_has_the_exit_code_of_who_has_to_act(status: str, exit_code: int) -> None:
    body = json.dumps({"error": "TTL", "given": "0", "expected": "1 or more"}).encode()
    with peer(reply(status, body)) as one:
        plane = ControlPlane([one.endpoint()], TOKEN)
        with pytest.raises(ControlRefused) as caught:
            plane.ask(one.endpoint(), "GET", "/x", deadline_s=OPERATION_S)
    assert caught.value.exit_code == exit_code
    if status.startswith("400"):
        assert str(caught.value) == "TTL: given 0, expected 1 or more"
    if status.startswith("401"):
        assert "--token-file" in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_refusal_without_json_is_still_one_line() -> None:
    with peer(reply("502 Bad Gateway", b"<html>")) as one:
        plane = ControlPlane([one.endpoint()], TOKEN)
        with pytest.raises(ControlRefused, match=r"^node n01: HTTP status 502$"):
            plane.ask(one.endpoint(), "GET", "/x", deadline_s=OPERATION_S)


@pytest.mark.parametrize(
    "answer",
    [
        reply("200 OK", b"<html>"),
        reply("200 OK", b"[" * 100_000),
        lambda connection: connection.sendall(b"SSH-2.0-OpenSSH\r\n"),
        lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"),
        lambda connection: None,
    ],
    ids=["html", "deep", "ssh", "cut", "closed"],
)
def test_what_is_no_answer_of_the_api_counts_as_unreachable(
    answer: Callable[[socket.socket], None],
) -> None:
    with peer(answer) as one:
        plane = ControlPlane([one.endpoint()], TOKEN)
        with pytest.raises(ControlUnreachable) as caught:
            plane.ask(one.endpoint(), "GET", "/x", deadline_s=OPERATION_S)
    assert caught.value.is_sent
    assert "\n" not in str(caught.value)


def test_answer_longer_than_the_bound_is_not_taken_in() -> None:
    def flood(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while True:
            connection.sendall(b" " * (1 << 20))

    with peer(flood) as one:
        plane = ControlPlane([one.endpoint()], TOKEN)
        with pytest.raises(ControlUnreachable, match="more than 16777216 bytes"):
            plane.ask(one.endpoint(), "GET", "/x", deadline_s=OPERATION_S)


def test_deadline_holds_for_an_answer_that_comes_a_byte_at_a_time() -> None:
    def trickle(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(1000):
            connection.sendall(b" ")
            time.sleep(0.02)

    with peer(trickle) as one:
        plane = ControlPlane([one.endpoint()], TOKEN)
        with pytest.raises(ControlUnreachable, match="no answer in time"):
            plane.ask(one.endpoint(), "GET", "/x", deadline_s=0.3)


@pytest.mark.parametrize("first", [b"HTTP/1.1 200 OK\r\n", b""], ids=["headers", "status line"])
def test_deadline_holds_for_a_head_that_comes_a_byte_at_a_time(first: bytes) -> None:
    def trickle(connection: socket.socket) -> None:
        connection.sendall(first + b"X")
        for _ in range(250):
            connection.sendall(b"y")
            time.sleep(0.02)

    with peer(trickle) as one:
        plane = ControlPlane([one.endpoint()], TOKEN)
        with pytest.raises(ControlUnreachable, match="no answer in time"):
            plane.ask(one.endpoint(), "GET", "/x", deadline_s=0.3)


def test_redirection_is_a_refusal_and_is_not_followed() -> None:
    with peer(lambda connection: None) as other:
        place = f"302 Found\r\nLocation: http://{other.address}/"
        with peer(reply(place, b"")) as one:
            plane = ControlPlane([one.endpoint()], TOKEN)
            with pytest.raises(ControlRefused, match=r"^node n01: HTTP status 302$"):
                plane.ask(one.endpoint(), "GET", "/x", deadline_s=OPERATION_S)
        assert other.requests == []


@pytest.mark.parametrize("host", ["a..b", "x y", "a" * 70, "\udcff"])
def test_host_in_the_map_that_no_resolver_takes_is_a_node_that_cannot_be_reached(
    host: str,
) -> None:
    odd = ControlEndpoint(node="n01", address=f"{host}:80")
    with pytest.raises(ControlUnreachable) as caught:
        ControlPlane([odd], TOKEN).ask(odd, "GET", "/x", deadline_s=OPERATION_S)
    assert not caught.value.is_sent


@pytest.mark.parametrize("policy", [None, {"format": 2}, DEFAULT_POLICY.to_values()])
def test_change_that_is_answered_with_something_else_may_have_been_made(policy: object) -> None:
    with peer(reply("200 OK", json.dumps({"policy": policy}).encode())) as one:
        plane = ControlPlane([one.endpoint()], TOKEN)
        with pytest.raises(ChangeNotUnderstood, match="look at `cachalot policy log`") as caught:
            send_change(plane, "PUT", "/api/policy", {})
    assert caught.value.exit_code == 4


def test_next_node_is_asked_when_the_first_is_not_there() -> None:
    gone = ControlEndpoint(node="n01", address=free_address())
    with peer(reply("200 OK", b'{"from": 2}')) as two:
        plane = ControlPlane([gone, two.endpoint("n02")], TOKEN)
        assert plane.ask_any("PUT", "/x", body={}, deadline_s=OPERATION_S) == {"from": 2}


def test_change_that_may_have_been_made_is_not_sent_to_a_second_node() -> None:
    with peer(lambda connection: None) as one, peer(reply("200 OK", b"{}")) as two:
        plane = ControlPlane([one.endpoint("n01"), two.endpoint("n02")], TOKEN)
        with pytest.raises(ControlUnreachable):
            plane.ask_any("PUT", "/x", body={}, deadline_s=OPERATION_S)
        assert two.requests == []
        # A question may be asked again.
        assert plane.ask_any("GET", "/x", deadline_s=OPERATION_S) == {}


def test_without_any_worker_the_way_to_start_one_is_named() -> None:
    nodes = [ControlEndpoint(node=f"n0{n}", address=free_address()) for n in range(1, 5)]
    with pytest.raises(NoWorker, match=r"n01: .*Connection refused; .*; and 2 more; `cachalot up"):
        ControlPlane(nodes, TOKEN).ask_any("GET", "/x", deadline_s=OPERATION_S)


def test_each_node_is_asked_and_a_fault_is_its_own() -> None:
    gone = ControlEndpoint(node="n01", address=free_address())
    with peer(reply("200 OK", b'{"a": 1}')) as two, peer(reply("503 No", b"{}")) as three:
        plane = ControlPlane([gone, two.endpoint("n02"), three.endpoint("n03")], TOKEN)
        found = plane.ask_each("GET", "/x", deadline_s=OPERATION_S)
    assert list(found) == ["n01", "n02", "n03"]
    assert isinstance(found["n01"], ControlUnreachable)
    assert not found["n01"].is_sent
    assert found["n02"] == {"a": 1}
    assert isinstance(found["n03"], ControlRefused)
    assert ControlPlane([], TOKEN).ask_each("GET", "/x", deadline_s=OPERATION_S) == {}


def test_interrupted_command_ends_while_a_worker_is_silent(running: Path) -> None:
    token = running / "token"
    token.write_text("t" * 40)
    token.chmod(0o600)
    is_over = threading.Event()

    def hold(connection: socket.socket) -> None:
        is_over.wait(PATIENCE_S)

    with peer(hold) as silent:
        command = start_cachalot(
            "verify", "--cluster", running / "cluster.toml",
            "--control", silent.address, "--token-file", token,
        )  # fmt: skip
        wait_until(lambda: silent.requests)
        command.send_signal(signal.SIGINT)
        _, stderr = command.communicate(timeout=WELL_BEFORE_S)
        is_over.set()
    assert (command.returncode, stderr) == (130, "")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://127.0.0.1:80", "127.0.0.1:80"),
        ("localhost:9000", "localhost:9000"),
        ("http://[::1]:9000/", "[::1]:9000"),
    ],
)
def test_control_option_is_read_as_written(text: str, address: str) -> None:
    found = parse_control_url(text)
    assert found.address == address
    assert (found.host, found.port) == (address.rpartition(":")[0].strip("[]"), found.port)


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "https://localhost:1", "http://localhost", "http://localhost:b"),
        *("http://localhost:1/path", "http://localhost:99999", "http://localhost:1/?a"),
        *("a..b:80", "x y:80", "a" * 70 + ":80", "\udcff:80", "user:secret@localhost:80"),
    ],
)
def test_control_option_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--control: given .* expected HOST:PORT of"):
        parse_control_url(text)


def test_map_without_control_addresses_has_no_endpoint(tmp_path: Path) -> None:
    shape = LocalShape(nodes=2, code=make_code("code", 1, 1), target_size_bytes=1 << 30)
    assert find_endpoints(plan_local_map(shape, cluster="ab" * 16, ports=[1, 2])) == []


def test_node_is_named_once_in_a_refusal() -> None:
    own = ControlRefused("n03", 502, {"error": "node n03: no node took the policy"})
    assert str(own) == "node n03: no node took the policy"
    assert str(ControlRefused("n03", 503, {"error": "stopping"})) == "node n03: stopping"
