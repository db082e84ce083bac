"""`cachalot down` with real nodes: it ends ours and only ours, and removes only what is ours."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from gc_worker import folder_locks, journal, scrub_position
from kvstore.admin.wipe import SOFT_STATE
from kvstore.cluster.map import load_cluster_map
from kvstore.node.policy_store import POLICY_NAME
from tests.kvstore.admin.command_line import (
    ROOT,
    cachalot,
    cachalot_here,
    cachalot_json,
    find_running,
    is_running,
    one_line,
)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that has nothing to do with us."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def set_recorded_pid(folder: Path, node: str, pid: int) -> None:
    path = folder / f"nodes/{node}/kvstored.json"
    record = {"node": node, "address": "127.0.0.1:1", "pid": pid}
    path.write_text(json.dumps(record))


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_down_stops_every_node_and_may_be_run_again(running: Path) -> None:
    pids = find_running(running)
    said = cachalot_json("down", "--dir", running)
    assert list(said) == [
        "is_dry_run",
        "nodes",
        "workers",
        "agents",
        "engines",
        "removed_paths",
        "removed_bytes",
        "kept_paths",
    ]
    assert said["workers"] == []
    assert [node["outcome"] for node in said["nodes"]] == ["stopped"] * 2
    assert sorted(node["pid"] for node in said["nodes"]) == pids
    assert find_running(running) == []
    again = cachalot("down", "--dir", running)
    assert again.stdout == "no node was running\n"
    assert (running / "nodes/n01/target/target.json").exists()


def test_down_says_which_node_was_dead_before(running: Path) -> None:
    (pid, *_) = find_running(running)
    os.kill(pid, signal.SIGKILL)
    said = cachalot_json("down", "--dir", running)["nodes"]
    outcomes = {node["pid"]: node["outcome"] for node in said}
    assert outcomes.pop(pid) == "not running"
    assert set(outcomes.values()) == {"stopped"}


def test_down_ends_a_stopped_node(running: Path) -> None:
    for pid in find_running(running):
        os.kill(pid, signal.SIGSTOP)
    said = cachalot_json("down", "--dir", running)
    assert [node["outcome"] for node in said["nodes"]] == ["stopped"] * 2
    assert find_running(running) == []


def test_process_that_got_the_pid_of_a_dead_node_lives_on(
    running: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    cachalot("down", "--dir", running)
    set_recorded_pid(running, "n01", sleeper.pid)
    said = cachalot_json("down", "--dir", running)
    assert said["nodes"] == [{"node": "n01", "pid": sleeper.pid, "outcome": "not running"}]
    assert sleeper.poll() is None

    set_recorded_pid(running, "n01", sleeper.pid)
    started = cachalot_json("up", "--dir", running)["nodes"]
    assert all(node["is_started"] for node in started)
    cachalot("down", "--dir", running)
    assert sleeper.poll() is None


def test_node_of_another_cluster_lives_on(running: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    said = cachalot_json("up", "--dir", other, "--nodes", "1", "--code", "1+0")
    pid = said["nodes"][0]["pid"]
    cachalot("down", "--dir", running)
    set_recorded_pid(running, "n01", pid)
    cachalot("down", "--dir", running)
    assert is_running(pid)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}', '{"pid": -1}', '{"pid": 0}'])
def test_broken_record_counts_as_no_process(folder: Path, content: str) -> None:
    (folder / "nodes/n01").mkdir(parents=True)
    (folder / "nodes/n01/kvstored.json").write_text(content)
    result = cachalot_here("down", "--dir", folder, "--json", code=0)
    said = json.loads(result.stdout)
    assert said["nodes"] == [{"node": "n01", "pid": None, "outcome": "not running"}]


def test_down_stops_nodes_whose_map_was_broken(running: Path) -> None:
    (running / "cluster.toml").write_text("format = 1\n")
    result = cachalot("down", "--dir", running, "--wipe", code=3)
    assert "mistake" in result.stderr
    assert find_running(running) == []
    assert (running / "nodes/n01/target/target.json").exists()


@pytest.mark.parametrize("options", [(), ("--wipe",)])
def test_down_has_nothing_to_stop_where_there_is_no_cluster(
    folder: Path, options: tuple[str, ...]
) -> None:
    result = cachalot_here("down", "--dir", folder, *options, code=0)
    assert result.stdout == f"nothing to stop in {folder}: there is no cluster\n"
    assert not folder.exists()


@pytest.mark.parametrize("words", [("up",), ("down",), ("down", "--wipe")])
def test_empty_folder_name_is_refused_and_is_not_the_current_folder(
    words: tuple[str, ...],
) -> None:
    result = cachalot_here(*words, "--dir", "", code=2)
    assert "given an empty value, expected a folder" in result.stderr


def test_wipe_removes_everything_that_up_made(running: Path) -> None:
    planned = cachalot_json("down", "--dir", running, "--wipe", "--dry-run")
    assert planned["is_dry_run"]
    assert [node["outcome"] for node in planned["nodes"]] == ["would be stopped"] * 2
    assert len(find_running(running)) == 2
    done = cachalot_json("down", "--dir", running, "--wipe")
    assert done["removed_paths"] == planned["removed_paths"]
    assert done["kept_paths"] == []
    assert files_below(running) == []
    again = cachalot("down", "--dir", running, "--wipe")
    assert again.stdout.startswith(f"nothing to stop in {running}")


def test_wipe_leaves_what_is_not_ours(running: Path) -> None:
    (running / "notes.txt").write_text("mine")
    (running / "nodes/n01/target/notes.txt").write_text("mine")
    (running / "nodes/n04").mkdir()
    identity = running / "nodes/n02/target/target.json"
    identity.write_text(
        identity.read_text().replace(load_cluster_map(running / "cluster.toml").cluster, "0" * 32)
    )
    result = cachalot("down", "--dir", running, "--wipe")
    kept = ["nodes/n01/target/notes.txt", "nodes/n02/target", "nodes/n04"]
    for path in kept:
        assert f"not ours, stays: {running / path}\n" in result.stdout
    left = [path for path in files_below(running) if not Path(path).name.startswith("policy.")]
    assert left == [
        *("nodes", "nodes/n01", "nodes/n01/target", "nodes/n01/target/notes.txt"),
        *("nodes/n02", "nodes/n02/target", "nodes/n02/target/lock"),
        *("nodes/n02/target/target.json", "nodes/n04", "notes.txt"),
    ]


def test_one_node_is_stopped_and_started_again_while_the_other_runs(running: Path) -> None:
    pids = find_running(running)
    tried = cachalot("down", "--dir", running, "--node", "n02", "--dry-run")
    assert tried.stdout.splitlines()[0].startswith("n02: would be stopped")
    assert find_running(running) == pids
    done = cachalot("down", "--dir", running, "--node", "n02")
    assert done.stdout.startswith("n02: stopped (process ")
    assert "n01" not in done.stdout
    assert "starts n02 again" in done.stderr
    said = cachalot_json("status", "--cluster", running / "cluster.toml", code=6)
    assert [node["is_alive"] for node in said["nodes"]] == [True, False]
    again = cachalot_json("up", "--dir", running)["nodes"]
    assert [node["is_started"] for node in again] == [False, True]


def test_several_nodes_are_stopped_at_once_and_none_of_them_if_one_is_none(running: Path) -> None:
    pids = find_running(running)
    words = ("down", "--dir", running, "--node", "n01", "--node", "n02")
    line = one_line(cachalot_here(*words, "--node", "n07", code=2))
    assert line.endswith("given 'n07', expected one of the map: n01, n02")
    tried = cachalot_json(*words, "--dry-run")["nodes"]
    assert [(one["node"], one["outcome"]) for one in tried] == [
        ("n01", "would be stopped"),
        ("n02", "would be stopped"),
    ]
    assert find_running(running) == pids
    done = cachalot(*words)
    assert [line.split(" (")[0] for line in done.stdout.splitlines()] == [
        *("n01: stopped", "n02: stopped"),
    ]
    assert done.stderr == f"cachalot: `cachalot up --dir {running}` starts n01, n02 again\n"
    assert find_running(running) == []
    again = cachalot_json(*words)
    assert [one["outcome"] for one in again["nodes"]] == ["not running"] * 2
    assert again["workers"] == []


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("--node", "n07"), "expected one of the map: n01, n02"),
        (("--node", "n01", "--wipe"), "one"),
    ],
)
def test_node_to_stop_is_one_of_the_map_and_is_not_wiped_alone(
    running: Path, words: tuple[str, ...], rule: str
) -> None:
    before = find_running(running)
    assert rule in one_line(cachalot("down", "--dir", running, *words, code=2))
    assert find_running(running) == before


def test_wipe_is_refused_when_something_else_serves_a_target(running: Path) -> None:
    cachalot("down", "--dir", running)
    words = ["--cluster", str(running / "cluster.toml"), "--node", "n01"]
    with subprocess.Popen(
        [sys.executable, "-m", "kvstore.node", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline()
        before = files_below(running)
        result = cachalot("down", "--dir", running, "--wipe", code=5)
        assert "a process that `cachalot up` did not start serves it" in one_line(result)
        assert files_below(running) == before
        assert stranger.poll() is None
        stranger.terminate()


def test_wipe_knows_every_file_that_a_node_and_its_worker_keep_beside_the_segments() -> None:
    names = [POLICY_NAME, "policy.tmp", "index.arrow", "index.arrow.tmp"]
    names += ["segment-000001.used", "segment-000001.used.tmp"]
    names += [folder_locks.LOCK_NAME, journal.JOURNAL_NAME, f"{journal.JOURNAL_NAME}.tmp"]
    names += [scrub_position.FILE_NAME, f"{scrub_position.FILE_NAME}.tmp"]
    unknown = [name for name in names if not any(fnmatch(name, one) for one in SOFT_STATE)]
    assert unknown == []
    assert not any(fnmatch("segment-000001.seg", one) for one in SOFT_STATE)


@pytest.mark.parametrize("option", ["--agent", "--engine"])
def test_name_of_any_length_is_shown_in_short(running: Path, option: str) -> None:
    result = cachalot_here("down", "--dir", running, option, "x" * 100_000, code=2)
    assert f"{option}: given 'xxx" in result.stderr
    assert len(result.stderr) < 300
