"""A cluster of real processes, as the demo, benchmarks and fault tests use it."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.local_folder import LocalFolder, LocalFolderBusy
from kvstore.admin.local_plan import LocalShape, plan_local_map
from kvstore.admin.node_stop import StopOutcome
from kvstore.admin.quantities import make_code
from kvstore.cluster.map import write_cluster_map
from kvstore.errors import InvalidArgument, MissingClusterMap, NodeError
from tests.kvstore.admin.command_line import cachalot_json, find_running, is_running


def open_descriptors() -> set[str]:
    return {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}


def test_cluster_of_twelve_starts_and_stops(folder: Path) -> None:
    before = open_descriptors()
    with LocalCluster.start(folder) as cluster:
        assert len(find_running(folder)) == 12
        assert len(cluster.node_names) == 12
        assert (cluster.map.code.k, cluster.map.code.m) == (10, 2)
        assert all(cluster.is_alive(node) for node in cluster.node_names)
    assert find_running(folder) == []
    assert open_descriptors() == before, "descriptors were leaked"


def test_killed_node_is_dead_when_kill_returns_and_restarts_on_its_address(folder: Path) -> None:
    with LocalCluster.start(folder, nodes=2, k=1, m=1) as cluster:
        address = cluster.map.node_by_name["n02"].address
        pid = cluster.node_pid("n02")
        assert pid is not None
        cluster.kill("n02")
        assert not is_running(pid)
        assert not cluster.is_alive("n02")
        assert cluster.node_pid("n02") is None
        with pytest.raises(NodeError, match="node n02: is not running"):
            cluster.kill("n02")
        cluster.restart_node("n02")
        assert cluster.node_pid("n02") not in (None, pid)
        said = cachalot_json("status", "--cluster", cluster.cluster_path)
        assert [node["address"] for node in said["nodes"]][1] == address
        assert said["nodes_alive"] == 2


def test_node_can_be_stopped_still_and_go_on(folder: Path) -> None:
    with LocalCluster.start(folder, nodes=1, k=1, m=0) as cluster:
        cluster.kill("n01", signal.SIGSTOP)
        pid = cluster.node_pid("n01")
        assert cluster.is_alive("n01")
        assert "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()
        cluster.kill("n01", signal.SIGCONT)
        said = cachalot_json("status", "--cluster", cluster.cluster_path)
        assert said["nodes"][0]["pid"] == pid
        cluster.kill("n01", signal.SIGSTOP)
    assert find_running(folder) == []


def test_running_node_is_replaced_by_restart(folder: Path) -> None:
    with LocalCluster.start(folder, nodes=1, k=1, m=0) as cluster:
        before = cluster.node_pid("n01")
        cluster.restart_node("n01")
        assert cluster.node_pid("n01") not in (None, before)
        assert len(find_running(folder)) == 1
        assert cluster.stop_node("n01") is StopOutcome.STOPPED
        assert cluster.stop_node("n01") is StopOutcome.NOT_RUNNING


def test_started_again_in_one_process_it_is_the_same_cluster(folder: Path) -> None:
    with LocalCluster.start(folder, nodes=2, k=1, m=1) as first:
        first.kill("n01")
        second = LocalCluster.start(folder, nodes=2, k=1, m=1)
        assert second.map == first.map
        assert second.node_pid("n02") == first.node_pid("n02")
        second.stop()
        assert [first.is_alive(node) for node in first.node_names] == [False, False]
        outcomes = [stopped.outcome for stopped in first.stop()]
        assert outcomes == [StopOutcome.NOT_RUNNING] * 2


def test_exit_ends_nodes_whose_folder_was_removed(folder: Path) -> None:
    with LocalCluster.start(folder, nodes=1, k=1, m=0) as cluster:
        pid = cluster.node_pid("n01")
        assert pid is not None
        shutil.rmtree(folder)
    assert not is_running(pid)


def test_attach_needs_a_map(folder: Path) -> None:
    with pytest.raises(MissingClusterMap):
        LocalCluster.attach(folder)


def test_attach_starts_nothing_and_finds_what_runs(folder: Path) -> None:
    with LocalCluster.start(folder, nodes=1, k=1, m=0) as cluster:
        attached = LocalCluster.attach(folder)
        assert attached.node_pid("n01") == cluster.node_pid("n01")
        cluster.stop()
        assert LocalCluster.attach(folder).node_pid("n01") is None
        # And every path is where the node wrote.
        assert cluster.cluster_path == folder / "cluster.toml"
        assert (cluster.target_folder("n01") / "target.json").is_file()
        assert "serving node=n01" in cluster.log_path("n01").read_text()


@pytest.mark.parametrize("name", ["n02", "", "../n01"])
def test_unknown_node_is_refused(tmp_path: Path, name: str) -> None:
    shape = LocalShape(nodes=1, code=make_code("code", 1, 0), target_size_bytes=8 << 20)
    planned = plan_local_map(shape, cluster="cd" * 16, ports=[20001])
    write_cluster_map(planned, tmp_path / "cluster.toml")
    cluster = LocalCluster.attach(tmp_path)
    for call in (cluster.kill, cluster.is_alive, cluster.target_folder, cluster.restart_node):
        with pytest.raises(InvalidArgument, match="expected one of the map"):
            call(name)


def test_half_a_code_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="both or none"):
        LocalCluster.start(folder, nodes=1, k=1)
    assert not folder.exists()


def test_second_command_gives_up_when_the_folder_stays_busy(tmp_path: Path) -> None:
    held, waiting = LocalFolder(tmp_path), LocalFolder(tmp_path)
    with (
        held.locked(),
        pytest.raises(LocalFolderBusy, match="another command"),
        waiting.locked(deadline_s=0.1),
    ):
        pytest.fail("two commands had the folder at once")
    with waiting.locked(deadline_s=0.1):
        assert list(tmp_path.iterdir()) == []
