"""What stands before the control API: the token, and bounds of size, time and number."""

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.admin.control import gate, http_server
from kvstore.admin.control.serving import (
    ControlAddressError,
    adopt_control_listener,
    check_control_address,
    listen_for_control,
)
from kvstore.admin.local_cluster import LocalCluster
from kvstore.errors import InvalidArgument
from tests.kvstore.admin.control_host import TOKEN, ControlApi, serve_worker
from tests.patience import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("gate") / "cluster"
    with LocalCluster.start(folder, nodes=1, k=1, m=0, target_size_bytes=8 << 20) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def served(cluster: LocalCluster) -> Iterator[ControlApi]:
    with serve_worker(cluster.cluster_path) as api:
        yield api


@pytest.fixture
def api(served: ControlApi) -> ControlApi:
    """Give the API as it is at first, whatever a test before did to its worker."""
    served.worker.reset()
    return served


def verify_request() -> bytes:
    head = f"POST /api/verify HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nHost: x\r\n"
    return (head + "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}").encode()


async def send_raw(port: int, content: bytes) -> bytes:
    """Everything that is answered to `content` until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(content)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    finally:
        writer.close()


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "é"])
@pytest.mark.parametrize("path", ["/api/status", "/metrics", "/api/nothing", "/staticx", "//"])
def test_data_needs_the_whole_token(api: ControlApi, token: str | None, path: str) -> None:
    reply = api.ask("GET", path, token=token)
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert TOKEN.encode() not in reply.content


@pytest.mark.parametrize("path", ["/healthz", "/", "/docs", "/openapi.json", "/static/style.css"])
def test_what_holds_no_data_needs_no_token(api: ControlApi, path: str) -> None:
    assert (api.ask("GET", path, token=None)).status == 200


def test_static_files_do_not_lead_out_of_their_folder(api: ControlApi) -> None:
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py"):
        assert (api.ask("GET", path, token=None)).status == 404


def test_wrong_tokens_are_logged_now_and_then_and_never_shown(
    api: ControlApi, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_wrongly(times: int) -> None:
        for _ in range(times):
            assert (api.ask("GET", "/api/status", token="guessed-token")).status == 401

    monkeypatch.setattr(gate, "REFUSALS_LOGGED_EVERY_S", 0.0)
    ask_wrongly(1)
    monkeypatch.setattr(gate, "REFUSALS_LOGGED_EVERY_S", 60.0)
    caplog.clear()
    ask_wrongly(5)
    assert caplog.messages == []
    monkeypatch.setattr(gate, "REFUSALS_LOGGED_EVERY_S", 0.0)
    ask_wrongly(1)
    assert caplog.messages == ["control: token missing or wrong from=127.0.0.1 requests=6"]


def test_token_in_the_address_does_not_count(api: ControlApi) -> None:
    assert (api.ask("GET", f"/api/status?token={TOKEN}", token=None)).status == 401


def test_every_answer_forbids_caching_and_foreign_content(api: ControlApi) -> None:
    for path in ("/", "/healthz", "/api/status"):
        headers = (api.ask("GET", path)).headers
        assert headers["content-security-policy"].startswith("default-src 'self'")
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


async def test_too_long_a_body_is_refused_by_its_announced_length(api: ControlApi) -> None:
    head = (
        f"POST /api/verify HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        "Content-Type: application/json\r\nContent-Length: 9999999999\r\n\r\n"
    )
    assert (await send_raw(api.port, head.encode())).startswith(b"HTTP/1.1 413")


async def test_too_long_a_body_is_refused_when_no_length_is_announced(api: ControlApi) -> None:
    head = (
        f"POST /api/verify HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    assert (await send_raw(api.port, head.encode() + chunk * 3)).startswith(b"HTTP/1.1 413")


async def test_body_that_does_not_come_is_not_waited_for(
    api: ControlApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "BODY_DEADLINE_S", 0.2)
    head = (
        f"POST /api/verify HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        "Content-Type: application/json\r\nContent-Length: 20\r\n\r\n{"
    )
    assert (await send_raw(api.port, head.encode())).startswith(b"HTTP/1.1 408")


def test_route_that_takes_too_long_is_answered_in_time(
    api: ControlApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "REQUEST_DEADLINE_S", 0.2)
    api.worker.verify_s = 3600.0
    assert (api.ask("POST", "/api/verify", {})).status == 504


async def test_connection_that_says_nothing_is_closed(
    api: ControlApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (api.ask("GET", "/healthz")).status == 200
    monkeypatch.setattr(http_server, "HEAD_DEADLINE_S", 0.2)
    for content in (b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nX: "):
        assert await send_raw(api.port, content) == b""


async def test_connection_that_never_reads_is_closed(
    api: ControlApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (api.ask("GET", "/healthz")).status == 200
    monkeypatch.setattr(http_server, "CONNECTION_DEADLINE_S", 0.3)
    api.worker.verify_s = 3600.0
    assert await send_raw(api.port, verify_request()) == b""


async def test_work_ends_when_nobody_waits_for_it(api: ControlApi) -> None:
    api.worker.verify_s = 3600.0
    _, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(verify_request())
    async with asyncio.timeout(PATIENCE_S):
        while not api.worker.is_verifying:
            await asyncio.sleep(0.01)
        writer.close()
        while not api.worker.is_verify_cancelled:
            await asyncio.sleep(0.01)


def test_request_in_progress_is_told_that_the_server_ends(cluster: LocalCluster) -> None:
    with ThreadPoolExecutor(1) as pool:
        with serve_worker(cluster.cluster_path) as api:
            api.worker.verify_s = 3600.0
            asked = pool.submit(api.ask, "POST", "/api/verify", {})
            wait_until(lambda: api.worker.is_verifying)
        reply = asked.result(PATIENCE_S)
    assert (reply.status, reply.json["error"]) == (504, "the server is being stopped")


@pytest.mark.parametrize(
    "content",
    [
        b"\x00" * 100,
        b"GET " + b"/" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 4000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /api/verify HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    ],
)
async def test_garbage_costs_its_own_connection_only(api: ControlApi, content: bytes) -> None:
    assert (api.ask("GET", "/healthz")).status == 200
    assert (await send_raw(api.port, content))[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 401")
    assert (api.ask("GET", "/healthz")).status == 200


async def test_one_connection_carries_one_request(api: ControlApi) -> None:
    assert (api.ask("GET", "/healthz")).headers["connection"] == "close"
    request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    assert (await send_raw(api.port, request * 2)).count(b"HTTP/1.1 200") == 1


async def test_too_many_connections_are_turned_away_and_the_rest_goes_on(
    api: ControlApi,
) -> None:
    assert (api.ask("GET", "/healthz")).status == 200
    held = [
        await asyncio.open_connection("127.0.0.1", api.port)
        for _ in range(http_server.CONNECTIONS_MAX)
    ]
    assert (api.ask("GET", "/healthz")).status == 503
    for _, writer in held:
        writer.close()
        await writer.wait_closed()
    assert (api.ask("GET", "/healthz")).status == 200


async def test_connections_that_say_nothing_do_not_take_all_descriptors(
    api: ControlApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (api.ask("GET", "/healthz")).status == 200
    monkeypatch.setattr(http_server, "CONNECTIONS_OPEN_MAX", 4)
    monkeypatch.setattr(http_server, "HEAD_DEADLINE_S", 3600.0)
    held = [await asyncio.open_connection("127.0.0.1", api.port) for _ in range(7)]
    endings = [asyncio.create_task(reader.read()) for reader, _ in held]
    async with asyncio.timeout(PATIENCE_S):
        while sum(ending.done() for ending in endings) < 3:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert sum(ending.done() for ending in endings) == 3
    for _, writer in held:
        writer.close()
    await asyncio.gather(*endings, return_exceptions=True)
    assert (api.ask("GET", "/healthz")).status == 200


@pytest.mark.parametrize("address", ["127.0.0.1:80", "[::1]:80", "localhost:80", "127.9.9.9:80"])
def test_loopback_needs_no_permission(address: str) -> None:
    assert check_control_address(address, is_remote_allowed=False)[1] == 80


@pytest.mark.parametrize("address", ["0.0.0.0:80", "[::]:80", "10.0.0.1:80", "node7:80"])
def test_address_that_others_can_reach_needs_the_option(address: str) -> None:
    with pytest.raises(InvalidArgument, match="--control-remote"):
        check_control_address(address, is_remote_allowed=False)
    assert check_control_address(address, is_remote_allowed=True)[1] == 80


@pytest.mark.parametrize("address", ["", "80", ":80", "127.0.0.1:", "127.0.0.1:x", "h:70000"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument, match="host:port"):
        check_control_address(address, is_remote_allowed=True)


def test_taken_port_is_a_typed_error() -> None:
    with (
        listen_for_control("127.0.0.1", 0) as listener,
        pytest.raises(ControlAddressError, match="cannot listen"),
    ):
        listen_for_control("127.0.0.1", listener.getsockname()[1])


def test_only_a_listening_socket_is_adopted() -> None:
    with listen_for_control("127.0.0.1", 0) as listener, socket.socket() as other:
        adopted = adopt_control_listener(listener.detach())
        assert adopted.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        adopted.close()
        with pytest.raises(InvalidArgument, match="--control-fd"):
            adopt_control_listener(other.detach())
    with pytest.raises(InvalidArgument, match="--control-fd"):
        adopt_control_listener(987_654)
