"""What /metrics of an agent says, and how its small server bears what comes."""

import errno
import http.client
import itertools
import json
import os
import re
import shutil
import socket
import socketserver
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvstore.admin.agent_metric_table import AGENT_METRICS
from kvstore.admin.control.metric_table import METRICS
from kvstore.admin.local_plan import add_entrypoints
from kvstore.cluster.map import write_cluster_map
from kvstore.errors import InvalidArgument, StoreError
from kvstore.metrics import server as metrics_server
from kvstore.metrics.server import MetricsServer, MetricTable
from tests.kvstore.admin.command_line import start_cachalot
from tests.kvstore.admin.conftest import end_all
from tests.kvstore.admin.test_metrics import documented
from tests.kvstore.cluster.fleets import planned_map
from tests.patience import PATIENCE_S, wait_until

TABLE = MetricTable("agent", "agent", AGENT_METRICS)
HISTOGRAM = {"bounds_s": [0.001, 0.01], "counts": [3, 2, 1], "sum_s": 0.5}
STATUS: dict[str, Any] = {
    "agent": "a01",
    "version": "0.1.0",
    "roles": ["check", "fetch"],
    "uptime_s": 5.5,
    "sessions": {"open": 2, "accepted": 7, "refused": 1},
    "arena": {
        "size_bytes": 1000,
        "leased_bytes": 400,
        "largest_free_bytes": 300,
        "runs": 3,
        "waiting": 4,
    },
    "fetch": {
        "queued": 1,
        "running": 2,
        "asked_blocks": 30,
        "blocks": 20,
        "bytes": 2000,
        "decoded": 5,
        "left": 4,
        "rejected": 6,
        "ended": {"complete": 8, "deadline": 9},
        "latency": HISTOGRAM,
        "workers": [{"cpu_s": 1.5, "restarts": 1}, {"cpu_s": 2.0, "restarts": 0}],
    },
    "store": {
        "queued": 3,
        "queued_bytes": 300,
        "stored": 10,
        "known": 11,
        "failed": 12,
        "dropped": 13,
        "degraded": 14,
        "dropped_runs": 2,
        "workers": [{"cpu_s": 0.5, "restarts": 2}],
    },
    "offers": {
        "open": 2,
        "open_bytes": 200,
        "made": 9,
        "refused": 1,
        "taken": 4,
        "sent": 1,
        "withdrawn": 1,
        "expired": 1,
        "sent_bytes": 700,
        "asked": 11,
        "skipped": 1,
        "remote_found": 5,
        "remote_absent": 1,
        "remote_rejected": 1,
        "remote_unreachable": 2,
        "remote_late": 1,
        "received_bytes": 800,
    },
    "match": {
        "count": 40,
        "prompts": 30,
        "prompt_tokens": 3000,
        "hit_tokens": 2000,
        "replay_tokens": 128,
        "windows_wanted": 20,
        "windows_found": 19,
        "latency": HISTOGRAM,
    },
    "windows": {
        "records": 5,
        "used_bytes": 500,
        "memory_bytes": 600,
        "puts": 50,
        "evicted": 1,
        "expired": 2,
        "rejected": 3,
        "lookups": 60,
        "found_here": 20,
        "found_elsewhere": 30,
        "fetches": 45,
        "fetched_here": 15,
        "fetched_bytes": 4500,
        "remote_found": 25,
        "remote_absent": 2,
        "remote_rejected": 1,
        "remote_unreachable": 1,
        "remote_late": 1,
        "withdrawn": 4,
    },
    "directory": {
        "entries": 100,
        "hosts": 3,
        "lookups": 70,
        "hits": 65,
        "announced": 200,
        "crowded_out": 1,
    },
}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read_samples(content: bytes) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(content.decode())
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"cachalot_agent_{name}", frozenset({"agent": "a01", **labels}.items())]


# --- what it says


def test_every_metric_of_agents_is_documented_and_named_by_its_unit() -> None:
    listed = {name: row for name, row in documented().items() if "_agent_" in name}
    assert listed == {
        metric.name: (
            metric.kind,
            ", ".join(f"`{label}`" for label in metric.labels) or "-",
            metric.unit,
        )
        for metric in AGENT_METRICS
    }
    assert len({metric.name for metric in (*METRICS, *AGENT_METRICS)}) == len(METRICS) + len(
        AGENT_METRICS
    )
    for metric in AGENT_METRICS:
        stem = metric.name.removesuffix("_total")
        if metric.unit in ("seconds", "bytes"):
            assert stem.endswith(f"_{metric.unit}"), metric.name
        assert set(metric.labels).isdisjoint({"agent", "node", "le", "job", "instance"})


def test_every_metric_has_its_figure_from_a_whole_document() -> None:
    found = read_samples(TABLE.render(STATUS))
    for metric in AGENT_METRICS:
        name = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
        assert any(sample == name for sample, _ in found), metric.name
    assert value(found, "info", version="0.1.0", roles="check,fetch") == 1
    assert value(found, "arena_leased_bytes") == 400
    assert value(found, "fetches_total", ended="deadline") == 9
    assert value(found, "fetch_seconds_bucket", le="0.01") == 5
    assert value(found, "fetch_seconds_sum") == 0.5
    assert value(found, "worker_cpu_seconds_total", kind="fetch") == 3.5
    assert value(found, "worker_restarts_total", kind="store") == 2
    assert value(found, "store_blocks_total", outcome="dropped") == 13
    assert value(found, "offers_ended_total", ended="taken") == 4
    assert value(found, "offers_remote_takes_total", ended="remote_unreachable") == 2
    assert value(found, "match_windows_total", kind="windows_found") == 19
    assert value(found, "window_found_total", place="found_elsewhere") == 30
    assert value(found, "window_remote_fetches_total", ended="remote_late") == 1
    assert value(found, "directory_entries") == 100


def test_agent_without_arena_windows_and_directory_has_no_such_samples() -> None:
    nothing: dict[str, Any] = {"windows": {}, "directory": None, "store": {}}
    check_only = {"agent": "a01", "arena": None, **nothing}
    names = {name for name, _ in read_samples(TABLE.render(check_only))}
    assert names == {"cachalot_agent_info"}


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=80),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [*STATUS, *(key for one in STATUS.values() if isinstance(one, dict) for key in one)]
            )
            | st.text(max_size=5),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from([*STATUS]), anything, max_size=10))
def test_whatever_a_document_says_is_rendered_or_left_out(status: dict[str, Any]) -> None:
    found = read_samples(TABLE.render(status))
    assert all(number >= 0 for number in found.values())


# --- the server


def get(address: tuple[str, int], path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    """Give a server of STATUS on a free port."""
    with (
        MetricsServer.listen("--metrics", "127.0.0.1:0", TABLE) as server,
        server.serve(lambda: STATUS),
    ):
        yield server


def test_server_answers_metrics_and_health_and_nothing_else(server: MetricsServer) -> None:
    status, content = get(server.address, "/metrics")
    assert status == 200
    assert read_samples(content) == read_samples(TABLE.render(STATUS))
    assert get(server.address, "/metrics?x=1")[0] == 200
    assert get(server.address, "/healthz") == (200, b'{"is_serving":true}')
    assert get(server.address, "/")[0] == 404
    assert get(server.address, "/metrics", "POST")[0] == 501


def test_busy_agent_is_said_to_be_busy() -> None:
    def read() -> dict[str, Any]:
        raise TimeoutError

    with MetricsServer.listen("--metrics", "127.0.0.1:0", TABLE) as server, server.serve(read):
        # Its health too: an agent whose event loop hangs serves nobody.
        for path in ("/metrics", "/healthz"):
            assert get(server.address, path) == (503, b"the agent is busy\n")


def test_mistake_of_ours_is_logged_and_ends_that_request_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said: list[dict[str, Any]] = [STATUS]
    with MetricsServer.listen("--metrics", "127.0.0.1:0", TABLE) as server, server.serve(said.pop):
        assert get(server.address, "/metrics")[0] == 200
        with pytest.raises(http.client.RemoteDisconnected):
            get(server.address, "/metrics")
        said.append(STATUS)
        assert get(server.address, "/metrics")[0] == 200
    assert "IndexError" in caplog.text


@pytest.mark.slow
def test_silent_connections_are_bounded_and_cut_off(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_DEADLINE_S", 5.0)
    with ExitStack() as held:
        silent = [
            held.enter_context(socket.create_connection(server.address, PATIENCE_S))
            for _ in range(metrics_server.REQUESTS_AT_ONCE_MAX)
        ]
        for one in silent:
            one.sendall(b"GET /met")
        wait_until(lambda: not is_served(server))
        # Those that say nothing more are cut off, and there is room again.
        assert [one.recv(1) for one in silent] == [b""] * len(silent)
    wait_until(lambda: is_served(server))


def test_server_without_descriptors_does_not_spin(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    def accept(_: object) -> NoReturn:
        tried.append(time.monotonic())
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(socketserver.TCPServer, "get_request", accept)
        with socket.create_connection(server.address, PATIENCE_S):
            wait_until(lambda: len(tried) >= 4)
    pauses_s = [later - sooner for sooner, later in itertools.pairwise(tried)]
    assert min(pauses_s) > metrics_server.ACCEPT_RETRY_S / 2
    assert get(server.address, "/metrics")[0] == 200


def test_server_without_threads_serves_again_when_there_are_some(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: object, *_arguments: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(socketserver.ThreadingMixIn, "process_request", start)
        for _ in range(metrics_server.REQUESTS_AT_ONCE_MAX):
            assert not is_served(server)
    assert is_served(server)


def is_served(server: MetricsServer) -> bool:
    try:
        return get(server.address, "/healthz")[0] == 200
    except ConnectionError:
        return False


def test_answer_comes_while_others_dawdle(server: MetricsServer) -> None:
    with socket.create_connection(server.address, PATIENCE_S) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nhost")
        assert get(server.address, "/metrics")[0] == 200


@pytest.mark.parametrize("address", ["", "here", ":80", "127.0.0.1:", "127.0.0.1:x", "::1:70000"])
def test_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument, match=r'--metrics: given .*expected "host:port"'):
        MetricsServer.listen("--metrics", address, TABLE)


def test_taken_address_is_said(server: MetricsServer) -> None:
    host, port = server.address
    with pytest.raises(StoreError, match=r"--metrics: cannot listen on .*Address already in use"):
        MetricsServer.listen("--metrics", f"{host}:{port}", TABLE)


def test_agent_serves_its_metrics_while_it_runs() -> None:
    place = Path(tempfile.mkdtemp(dir="/tmp", prefix="ca-"))
    write_cluster_map(add_entrypoints(planned_map(12), []), place / "cluster.toml")
    process = start_cachalot(
        *("agent", "--cluster", place / "cluster.toml", "--socket", place / "s", "--name", "h1"),
        *("--roles", "check", "--metrics", "127.0.0.1:0"),
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["pid"] == process.pid
        lines = iter(process.stderr.readline, "")
        (port,) = next(
            found.groups() for line in lines if (found := re.search(r"http://\S+:(\d+)/", line))
        )
        status, content = get(("127.0.0.1", int(port)), "/metrics")
        assert status == 200
        labels = frozenset({("agent", "h1")})
        assert read_samples(content)["cachalot_agent_sessions", labels] == 0
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)
        end_all(place)
        shutil.rmtree(place)
