"""The control API over real nodes: what each route answers, and how it refuses."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.admin.control.changes import check_drain
from kvstore.admin.control.docs_page import render_docs_page
from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.local_plan import LocalShape, add_entrypoints, plan_local_map
from kvstore.admin.quantities import make_code
from kvstore.cluster.map import write_cluster_map
from kvstore.errors import DeadlineExceeded, InvalidArgument, NodeError
from kvstore.settings import SETTINGS
from tests.architecture.source_tree import ROOT
from tests.kvstore.admin.control_host import ControlApi, Reply, serve_worker
from tests.kvstore.cluster.fleets import planned_map

KEY = "ab" * 32
DOCUMENT = ROOT / "docs" / "control-api.md"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("control") / "cluster"
    with LocalCluster.start(folder, nodes=3, k=2, m=1, target_size_bytes=8 << 20) as cluster:
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


def check_problem(reply: Reply, status: int) -> tuple[str, str, str]:
    """The three fields of a fault, all of which must be there."""
    assert reply.status == status, reply.content
    assert reply.headers["content-type"] == "application/problem+json"
    assert list(reply.json) == ["error", "given", "expected"]
    return reply.json["error"], reply.json["given"], reply.json["expected"]


def test_status_has_the_cluster_the_policy_and_the_worker(api: ControlApi) -> None:
    api.worker.reports["redundancy"] = {"at_s": api.worker.now_s() - 5, "by_shards": {"3": 7}}
    said = (api.ask("GET", "/api/status")).json
    assert (said["nodes_alive"], said["nodes_total"], said["spare_nodes"]) == (3, 3, 1)
    assert said["code"] == {"k": 2, "m": 1}
    assert [node["node"] for node in said["nodes"]] == ["n01", "n02", "n03"]
    assert said["policy"]["watermarks"] == {"high": 0.9, "low": 0.85}
    assert said["worker"]["node"] == "n01"
    assert said["redundancy"]["by_shards"] == {"3": 7}
    assert 5 <= said["redundancy"]["age_s"] < 60
    assert said["scrub"] is None


def test_worker_says_what_it_knows_without_asking_any_node(api: ControlApi) -> None:
    now_s = api.worker.now_s()
    # A count of shards says when it began and how long it took.
    api.worker.reports["redundancy"] = {"started_at_s": now_s - 9, "duration_s": 4.0}
    said = (api.ask("GET", "/api/worker")).json
    assert api.worker.asked == 0
    assert said["worker"]["node"] == "n01"
    assert 5 <= said["redundancy"]["age_s"] < 60
    assert said["ages"] is None
    assert set(said) <= set((api.ask("GET", "/api/status")).json)


def test_workers_of_a_map_without_addresses_are_this_one_alone(api: ControlApi) -> None:
    api.worker.reports["redundancy"] = {"blocks_by_shards": [0, 0, 2, 7], "backlog": 2}
    said = api.ask("GET", "/api/workers").json
    assert [(one["node"], one["state"]) for one in said["workers"]] == [
        *(("n01", "running"), ("n02", "no address"), ("n03", "no address")),
    ]
    assert said["workers"][0]["blocks_by_shards"] == [0, 0, 2, 7]
    assert said["redundancy"]["by_shards"] == {"3": 7, "2": 2}
    assert (said["redundancy"]["nodes_counted"], said["redundancy"]["nodes_total"]) == (1, 3)


def test_cluster_without_entrypoints_has_no_agents(api: ControlApi) -> None:
    said = api.ask("GET", "/api/agents").json
    assert (said["agents"], said["summary"]) == ([], "")
    assert api.ask("GET", "/api/agents", token=None).status == 401


def test_agents_are_asked_at_most_every_two_seconds(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        map_path = tmp_path / "cluster.toml"
        port = silent.getsockname()[1]
        write_cluster_map(add_entrypoints(planned_map(12), [port]), map_path)
        with serve_worker(map_path) as api:
            first = api.ask("GET", "/api/agents").json
            again = api.ask("GET", "/api/agents").json
        silent.settimeout(0.0)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()
    (agent,) = first["agents"]
    assert (agent["agent"], agent["is_alive"], agent["entrypoint"]) == ("a01", False, "a01")
    assert agent["problem"].startswith("no answer within 1.00 s")
    assert first["summary"] == "0 of 1 agent alive; 1 entrypoint down: a01"
    assert again["agents"] == first["agents"]


def test_body_that_is_no_json_is_shown_as_the_text_it_is(api: ControlApi) -> None:
    reply = api.ask("PUT", "/api/policy", b"ttl=5")
    _, given, _ = check_problem(reply, 400)
    assert "b'" not in given


def test_nodes_are_what_each_says_of_itself(cluster: LocalCluster, api: ControlApi) -> None:
    rows = (api.ask("GET", "/api/nodes")).json["nodes"]
    assert [row["statistics"]["pid"] for row in rows] == [
        cluster.node_pid(name) for name in cluster.node_names
    ]
    assert all(row["is_alive"] and row["control"] is None for row in rows)


def test_dead_node_is_named_with_the_reason(tmp_path: Path) -> None:
    with LocalCluster.start(tmp_path / "c", nodes=2, k=1, m=1, target_size_bytes=8 << 20) as two:
        two.kill("n02")
        with serve_worker(two.cluster_path) as api:
            rows = (api.ask("GET", "/api/nodes")).json["nodes"]
            status = (api.ask("GET", "/api/status")).json
    assert [row["is_alive"] for row in rows] == [True, False]
    assert rows[1]["problem"]
    assert (status["nodes_alive"], status["spare_nodes"]) == (1, 0)


def test_worker_is_asked_for_what_only_it_knows(api: ControlApi) -> None:
    assert (api.ask("GET", "/api/events")).json == {
        "events": [{"at_s": 5, "kind": "evicted", "shards": 3}]
    }
    assert (api.ask("GET", "/api/history")).json == {"columns": [], "tiers": []}
    assert (api.ask("GET", f"/api/inspect/{KEY.upper()}")).json == {"key": KEY}
    assert api.worker.inspected == [bytes.fromhex(KEY)]
    assert (api.ask("POST", "/api/verify", {"sample": 7})).json == {"sampled": 7}
    said = (api.ask("POST", "/api/gc/run", {"deadline_s": 5})).json
    assert said == {"is_done": True, "deadline_s": 5.0}


def test_metrics_are_those_of_the_node(api: ControlApi) -> None:
    reply = api.ask("GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    assert b'cachalot_up{node="n01"} 1.0' in reply.content


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("GET", "/api/inspect/abc", None, "64 hex digits"),
        ("GET", f"/api/inspect/{KEY}0", None, "64 hex digits"),
        ("POST", "/api/verify", {"sample": 0}, "greater than or equal to 1"),
        ("POST", "/api/verify", {"sample": 10**9}, "less than or equal to 100000"),
        ("POST", "/api/verify", {"sampel": 5}, "not permitted"),
        ("POST", "/api/verify", {"sample": "5"}, "valid integer"),
        ("POST", "/api/verify", b"{", "JSON"),
        ("POST", "/api/gc/run", {"deadline_s": 1e9}, "less than or equal to 300"),
        ("POST", "/api/gc/plan", {}, "required"),
        ("PUT", "/api/policy", {"change": {"kind": "other"}, "who": "me"}, "'ttl', 'watermarks'"),
        ("POST", "/api/drain/n09", {"who": "me"}, "one of the map: n01, n02, n03"),
        ("DELETE", "/api/drain/n09", {"who": "me"}, "one of the map: n01, n02, n03"),
        ("PUT", "/api/settings", {"name": "sync", "value": 1, "who": "me"}, "start kvstored anew"),
        ("PUT", "/api/settings", {"name": "x", "value": 1, "who": "me"}, "one of evict_bytes"),
        ("POST", "/api/policy/undo", {"who": "me"}, "a change in the log"),
    ],
)
def test_wrong_request_is_refused_with_the_rule(
    api: ControlApi, method: str, path: str, body: object, expected: str
) -> None:
    assert expected in check_problem(api.ask(method, path, body), 400)[2]


def test_faults_of_nodes_are_not_the_faults_of_who_asks(api: ControlApi) -> None:
    api.worker.fault = NodeError("n02", "is on fire")
    error, _, _ = check_problem(api.ask("GET", f"/api/inspect/{KEY}"), 502)
    assert error == "node n02: is on fire"
    api.worker.fault = DeadlineExceeded("n02", "no answer")
    check_problem(api.ask("GET", f"/api/inspect/{KEY}"), 504)


def test_mistake_of_ours_is_logged_and_not_shown(
    api: ControlApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.worker.fault = RuntimeError("a detail that is nobody's business")
    reply = api.ask("GET", f"/api/inspect/{KEY}")
    check_problem(reply, 500)
    assert b"business" not in reply.content
    assert "nobody's business" in caplog.text


def test_unknown_route_and_method_are_answered_in_the_same_form(api: ControlApi) -> None:
    check_problem(api.ask("GET", "/api/nothing"), 404)
    check_problem(api.ask("DELETE", "/api/status"), 405)


def test_settings_show_unit_limits_default_and_value(api: ControlApi) -> None:
    rows = {row["name"]: row for row in (api.ask("GET", "/api/settings")).json["settings"]}
    assert list(rows) == list(SETTINGS)
    assert rows["scrub_bytes_per_s"]["value"] == rows["scrub_bytes_per_s"]["default"] == 8 << 20
    assert rows["scrub_bytes_per_s"]["unit"] == "bytes a second"
    assert rows["scrub_is_on"] | {"what_for": ""} == {
        "name": "scrub_is_on",
        "heat": "hot",
        "unit": "on or off",
        "default": True,
        "value": True,
        "is_set": False,
        "low": None,
        "high": None,
        "what_for": "",
    }
    assert (rows["sync"]["heat"], rows["sync"]["value"]) == ("cold", None)


def test_plan_of_a_change_is_made_under_the_changed_policy(api: ControlApi) -> None:
    change = {"kind": "ttl", "ttl_class": "agent", "ttl_s": 60}
    assert (api.ask("POST", "/api/gc/plan", {"change": change})).status == 200
    assert (api.ask("GET", "/api/gc/plan")).status == 200
    assert [policy.ttl_of("agent") for policy in api.worker.planned] == [60, 259_200]
    assert (api.ask("GET", "/api/policy")).json["policy"]["version"] == 0


def test_description_lists_every_route_and_its_page_loads_nothing_from_elsewhere(
    api: ControlApi,
) -> None:
    described = (api.ask("GET", "/openapi.json", token=None)).json
    assert {"/api/status", "/api/policy", "/api/drain/{node}", "/metrics"} <= set(
        described["paths"]
    )
    page = (api.ask("GET", "/docs", token=None)).content.decode()
    assert page == render_docs_page(described)
    for path in described["paths"]:
        assert path in page
    assert re.findall(r"(?:src|href)=\"(?!#|/)", page) == []
    assert "<script" not in page


def test_document_lists_every_route(api: ControlApi) -> None:
    described = (api.ask("GET", "/openapi.json", token=None)).json["paths"]
    routes = {(method.upper(), path) for path, methods in described.items() for method in methods}
    rows = re.findall(r"^\| `([A-Z`, ]+) (/[^`]*)` \|", DOCUMENT.read_text(), re.MULTILINE)
    listed = {(method, path) for methods, path in rows for method in re.findall("[A-Z]+", methods)}
    assert listed == routes


def test_docs_page_escapes_what_it_shows() -> None:
    hostile = {
        "info": {"title": "<b>"},
        "paths": {"/<x>": {"get": {"summary": "<i>", "description": "&"}}},
    }
    page = render_docs_page(hostile)
    assert "<b>" not in page
    assert "<i>" not in page
    assert "&lt;x&gt;" in page


def test_nothing_of_the_web_framework_is_loaded_before_somebody_asks() -> None:
    code = (
        "import sys, kvstore.admin.control.serving;"
        "sys.exit(any(name in sys.modules for name in ('fastapi', 'uvicorn', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0


def test_nodes_drain_only_as_long_as_blocks_can_be_stored() -> None:
    shape = LocalShape(nodes=12, code=make_code("code", 10, 2), target_size_bytes=1 << 30)
    cluster_map = plan_local_map(shape, cluster="ab" * 16, ports=range(5000, 5012))
    check_drain(cluster_map, frozenset(), "n03")
    check_drain(cluster_map, frozenset({"n03"}), "n03")
    with pytest.raises(InvalidArgument) as caught:
        check_drain(cluster_map, frozenset({"n04"}), "n03")
    assert str(caught.value) == (
        "drain: given 'n03' beside n04, expected at most 1 draining in a code group (group g0000):"
        " a block needs 11 of 12 nodes to be stored"
    )


def test_server_ends_when_it_is_cancelled_and_leaves_signals_alone(
    cluster: LocalCluster,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with serve_worker(cluster.cluster_path) as api:
        assert json.loads((api.ask("GET", "/healthz", token=None)).content)
        assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(OSError, match=os.strerror(111)):
        api.ask("GET", "/healthz")
