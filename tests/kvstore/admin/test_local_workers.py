"""Real workers beside real nodes: who starts them, who ends them, and what they make possible."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.local_workers import bind_control_ports
from kvstore.admin.node_stop import StopOutcome
from kvstore.cluster.map import load_cluster_map
from kvstore.errors import NodeError
from kvstore.token_file import read_token_file
from tests.kvstore.admin.command_line import cachalot_here, cachalot_json, find_running
from tests.kvstore.admin.control_host import Reply, request
from tests.patience import wait_until

SMALL = ("--nodes", "3", "--code", "2+1", "--target-size", "8MiB")


def ask(cluster: LocalCluster, node: str, method: str, path: str, body: object = None) -> Reply:
    """One request to the control API of a node, by what the folder of the cluster says."""
    control = load_cluster_map(cluster.cluster_path).node_by_name[node].control
    assert control is not None
    token = read_token_file(cluster.folder / "control-token")
    return request(int(control.rpartition(":")[2]), method, path, body, token)


@pytest.fixture
def cluster(folder: Path) -> Iterator[LocalCluster]:
    with LocalCluster.start(
        folder, nodes=3, k=2, m=1, target_size_bytes=8 << 20, gc=True
    ) as cluster:
        yield cluster


def test_worker_runs_beside_every_node_and_serves_its_control_api(cluster: LocalCluster) -> None:
    assert all(cluster.workers.pid(node) for node in cluster.node_names)
    for node in cluster.node_names:
        said = ask(cluster, node, "GET", "/api/status").json
        assert said["worker"]["node"] == node
        assert said["worker"]["pid"] == cluster.workers.pid(node)
        assert said["nodes_alive"] == 3
    assert (cluster.folder / "control-token").stat().st_mode & 0o777 == 0o600


def test_node_that_was_down_catches_up_with_the_policy(cluster: LocalCluster) -> None:
    cluster.kill("n02")
    cluster.workers.kill("n02")
    change = {"kind": "ttl", "ttl_class": "agent", "ttl_s": 100}
    said = ask(cluster, "n01", "PUT", "/api/policy", {"change": change, "who": "ada"}).json
    assert list(said["missing"]) == ["n02"]
    cluster.restart_node("n02")
    wait_until(lambda: ask(cluster, "n01", "GET", "/api/policy").json["nodes"]["n02"] == 1)


def test_killed_worker_is_started_again_on_its_old_port(cluster: LocalCluster) -> None:
    before = {node: cluster.workers.pid(node) for node in cluster.node_names}
    content = cluster.cluster_path.read_bytes()
    cluster.workers.kill("n02")
    assert cluster.workers.pid("n02") is None
    with pytest.raises(NodeError, match="is not running"):
        cluster.workers.kill("n02")
    with LocalCluster.start(cluster.folder, gc=True) as again:
        after = {node: again.workers.pid(node) for node in cluster.node_names}
        assert {node for node in before if before[node] != after[node]} == {"n02"}
        assert cluster.cluster_path.read_bytes() == content
        assert ask(again, "n02", "GET", "/api/status").json["worker"]["pid"] == after["n02"]


def test_node_serves_without_its_worker(cluster: LocalCluster) -> None:
    for node in cluster.node_names:
        cluster.workers.kill(node)
    said = cachalot_json("status", "--cluster", cluster.cluster_path)
    assert said["nodes_alive"] == 3


def test_workers_end_by_themselves_when_they_are_asked(cluster: LocalCluster) -> None:
    wait_until(
        lambda: all(
            "looking after" in cluster.workers.log_path(node).read_text()
            for node in cluster.node_names
        )
    )
    stopped = cluster.workers.stop(cluster.node_names)
    assert [one.outcome for one in stopped] == [StopOutcome.STOPPED] * 3
    assert cluster.workers.recorded() == []


def test_cluster_without_workers_gets_them_and_their_addresses_later(folder: Path) -> None:
    with LocalCluster.start(folder, nodes=2, k=1, m=1, target_size_bytes=8 << 20) as cluster:
        assert cluster.workers.recorded() == []
        assert not (folder / "control-token").exists()
        assert b"control" not in cluster.cluster_path.read_bytes()
        pids = [cluster.node_pid(node) for node in cluster.node_names]
        with LocalCluster.start(folder, gc=True) as later:
            assert later.map.epoch == cluster.map.epoch + 1
            assert [later.node_pid(node) for node in later.node_names] == pids
            # The nodes follow the new map while they run.
            assert ask(later, "n02", "GET", "/api/status").json["nodes_alive"] == 2


def test_taken_control_port_costs_that_worker_its_api_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LocalCluster.start(folder, nodes=1, k=1, m=0, target_size_bytes=8 << 20, gc=True) as one:
        wait_until(lambda: "looking after" in one.workers.log_path("n01").read_text())
        one.workers.kill("n01")
        with (
            bind_control_ports(one.map.nodes)["n01"],
            LocalCluster.start(folder, gc=True) as again,
        ):
            assert again.workers.pid("n01") is not None
        assert "its worker runs without the control API" in capsys.readouterr().err


def test_up_starts_workers_and_down_ends_them(folder: Path) -> None:
    said = cachalot_json("up", "--dir", folder, *SMALL)
    assert all(node["worker_pid"] and node["control"] for node in said["nodes"])
    assert len(find_running(folder)) == 6
    plan = cachalot_json("down", "--dir", folder, "--wipe", "--dry-run")
    assert [worker["outcome"] for worker in plan["workers"]] == ["would be stopped"] * 3
    assert len(find_running(folder)) == 6
    done = cachalot_json("down", "--dir", folder, "--wipe")
    assert {worker["outcome"] for worker in done["workers"]} <= {"stopped", "not running"}
    assert done["kept_paths"] == []
    assert find_running(folder) == []
    assert list(folder.iterdir()) == []


def test_up_without_workers_starts_none(folder: Path) -> None:
    said = cachalot_json("up", "--dir", folder, "--no-gc", *SMALL)
    assert [node["worker_pid"] for node in said["nodes"]] == [None] * 3
    assert [node["control"] for node in said["nodes"]] == [None] * 3
    assert len(find_running(folder)) == 3


def test_down_ends_workers_whose_nodes_are_gone(folder: Path) -> None:
    with LocalCluster.start(
        folder, nodes=1, k=1, m=0, target_size_bytes=8 << 20, gc=True
    ) as cluster:
        cluster.stop_node("n01")
        cluster.workers.kill("n01", signal.SIGSTOP)
        result = cachalot_here("down", "--dir", folder, code=0)
        assert "1 gc_worker: stopped" in result.stdout
        assert cluster.workers.pid("n01") is None
