"""`cachalot up` with real nodes: what it starts, what it leaves alone, how it fails."""

import os
import resource
import shlex
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from kvstore.admin.local_plan import LocalShape, plan_local_map
from kvstore.admin.quantities import make_code
from kvstore.cluster.map import load_cluster_map, write_cluster_map
from tests.kvstore.admin.command_line import (
    COMMAND,
    ROOT,
    cachalot,
    cachalot_here,
    cachalot_json,
    find_running,
    is_running,
    one_line,
    start_cachalot,
)
from tests.patience import wait_until

# What is said of nodes here holds with and without workers; test_local_workers.py is about those.
ALONE = "--no-gc"
SMALL = (ALONE, "--nodes", "2", "--code", "1+1", "--target-size", "8MiB")


def test_up_starts_every_node_of_a_new_cluster(folder: Path) -> None:
    said = cachalot_json("up", "--dir", folder, *SMALL)
    assert list(said) == [
        "cluster_path",
        "cluster",
        "code",
        "web_page",
        "nodes",
        "agents",
        "engines",
    ]
    assert said["cluster_path"] == str(folder / "cluster.toml")
    assert said["code"] == {"k": 1, "m": 1}
    assert said["web_page"] is None or said["nodes"][0]["control"] in said["web_page"]["url"]
    assert [node["node"] for node in said["nodes"]] == ["n01", "n02"]
    assert all(node["is_started"] for node in said["nodes"])
    cluster_map = load_cluster_map(folder / "cluster.toml")
    assert said["cluster"] == cluster_map.cluster
    assert [node["address"] for node in said["nodes"]] == [n.address for n in cluster_map.nodes]
    assert {target.size_bytes for target in cluster_map.targets} == {8 << 20}
    pids = sorted(node["pid"] for node in said["nodes"])
    assert find_running(folder) == pids
    for node in said["nodes"]:
        assert os.getsid(node["pid"]) == node["pid"], "it would end with the shell"
        assert Path(node["log_path"]).read_text().count("serving") == 1
        host, _, port = node["address"].rpartition(":")
        socket.create_connection((host, int(port)), timeout=5.0).close()


def test_up_again_starts_nothing_and_keeps_every_process(running: Path) -> None:
    pids = find_running(running)
    result = cachalot("up", "--dir", running, ALONE)
    assert "0 nodes started, 2 were running" in result.stdout
    assert find_running(running) == pids


def test_up_again_starts_only_the_killed_node_on_its_old_port(running: Path) -> None:
    before = cachalot_json("up", "--dir", running, ALONE)["nodes"]
    content = (running / "cluster.toml").read_bytes()
    os.kill(before[1]["pid"], signal.SIGKILL)
    after = cachalot_json("up", "--dir", running, *SMALL)["nodes"]
    assert [node["is_started"] for node in after] == [False, True]
    assert [node["address"] for node in after] == [node["address"] for node in before]
    assert after[1]["pid"] != before[1]["pid"]
    assert after[0] | {"is_started": True} == before[0] | {"is_started": True}
    assert (running / "cluster.toml").read_bytes() == content
    assert cachalot_json("status", "--cluster", running / "cluster.toml")["nodes_alive"] == 2


def test_up_says_which_node_does_not_answer_although_its_process_is_there(running: Path) -> None:
    (node, *_) = cachalot_json("up", "--dir", running, ALONE)["nodes"]
    os.kill(node["pid"], signal.SIGSTOP)
    try:
        line = one_line(cachalot("up", "--dir", running, ALONE, "--wait-s", "0.5", code=4))
    finally:
        os.kill(node["pid"], signal.SIGCONT)
    assert f"node n01: process {node['pid']} is there but does not answer" in line


def test_up_refuses_a_folder_that_it_may_not_write_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    # By the answer of the kernel, as the tests may run as root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
    line = one_line(cachalot_here("up", "--dir", folder, *SMALL, code=2))
    expected = "expected a folder to write in: Permission denied"
    assert line == f"cachalot: folder: given {folder}, {expected}"
    assert list(folder.iterdir()) == []


def test_two_ups_at_once_end_with_one_process_for_each_node(folder: Path) -> None:
    commands = [start_cachalot("up", "--dir", folder, *SMALL) for _ in range(2)]
    for command in commands:
        stdout, stderr = command.communicate(timeout=40.0)
        assert command.returncode == 0, stderr
        assert "nodes started" in stdout
    assert len(find_running(folder)) == 2


@pytest.mark.parametrize(
    ("words", "differs"),
    [
        (("--nodes", "4"), "3 nodes, not 4"),
        (("--code", "1+1"), "code 2+1, not 1+1"),
        (("--target-size", "1GiB"), "targets of 8.0 MiB, not 1.0 GiB"),
        (("--nodes", "12", "--code", "10+2"), "3 nodes, not 12 and code 2+1, not 10+2"),
    ],
)
def test_up_refuses_a_cluster_that_differs_in_one_line(
    folder: Path, words: tuple[str, ...], differs: str
) -> None:
    write_map_only(folder)
    result = cachalot_here("up", "--dir", folder, *words, code=2)
    assert one_line(result) == (
        f"cachalot: cluster: given one in {folder} that has {differs},"
        " expected the same, or another folder for another cluster"
    )
    assert find_running(folder) == []


def write_map_only(folder: Path) -> None:
    """Lay down the map of a cluster of three nodes that never ran."""
    shape = LocalShape(nodes=3, code=make_code("code", 2, 1), target_size_bytes=8 << 20)
    folder.mkdir()
    planned = plan_local_map(shape, cluster="cd" * 16, ports=[20001, 20002, 20003])
    write_cluster_map(planned, folder / "cluster.toml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "6"), "nodes: given 6, expected at least 12, because code 10+2"),
        (("--nodes", "3", "--code", "4+2"), "say --nodes 6, or --code 2+1"),
        (("--nodes", "0"), "nodes: given 0, expected 1 to 128"),
        (("--code", "10-2"), "--code: given '10-2', expected K+M"),
        (("--code", "40+2"), "--code: given 40+2, expected at most 32 shards"),
        (("--target-size", "4GB"), "--target-size: given '4GB', expected a size such as 4GiB"),
        (("--target-size", "4"), "target size: given 4 B, expected at least 256.0 KiB"),
        (("--segment-size", "big"), "--segment-size: given 'big', expected a size"),
        (("--segment-size", "1KiB"), "segment size: given 1.0 KiB, expected 64.0 KiB to"),
    ],
)
def test_up_names_a_wrong_argument_and_makes_nothing(
    folder: Path, words: tuple[str, ...], said: str
) -> None:
    result = cachalot_here("up", "--dir", folder, *words, code=2)
    assert said in one_line(result)
    assert one_line(result).startswith("cachalot: ")
    assert not folder.exists()


@pytest.mark.parametrize(
    "words",
    [("--sync", "often"), ("--nodes", "many"), ("--wait-s", "0"), ("--nods", "3"), ("extra",)],
)
def test_up_shows_usage_when_the_command_line_is_wrong(
    folder: Path, words: tuple[str, ...]
) -> None:
    result = cachalot_here("up", "--dir", folder, *words, code=2)
    assert result.stderr.startswith("Usage: cachalot up")
    assert words[-1] in result.stderr or words[0] in result.stderr
    assert not folder.exists()


def test_up_names_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        result = cachalot_here("up", "--dir", place, *SMALL, code=2)
        assert one_line(result).startswith(f"cachalot: folder: given {place}, expected a folder")


def test_up_names_the_taken_port_and_starts_no_node(running: Path) -> None:
    cachalot("down", "--dir", running)
    address = load_cluster_map(running / "cluster.toml").nodes[1].address
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        stranger.listen()
        result = cachalot("up", "--dir", running, ALONE, code=4)
    assert f"node n02: its address {address} is taken by another process" in one_line(result)
    assert find_running(running) == []


def test_up_passes_on_that_a_target_is_of_another_cluster(running: Path) -> None:
    cachalot("down", "--dir", running)
    identity = running / "nodes/n02/target/target.json"
    foreign = identity.read_text().replace(
        load_cluster_map(running / "cluster.toml").cluster, "ef" * 16
    )
    identity.write_text(foreign)
    result = cachalot("up", "--dir", running, ALONE, code=5)
    assert "node n02: ended with exit code 5 before it was ready" in result.stderr
    assert f"its cluster is {'ef' * 16}, expected" in result.stderr
    assert find_running(running) == []
    assert identity.read_text() == foreign


def test_up_shows_every_mistake_of_a_broken_map(folder: Path) -> None:
    write_map_only(folder)
    path = folder / "cluster.toml"
    text = path.read_text().replace("k = 2", "k = 99").replace("127.0.0.1:20002", "nowhere")
    path.write_text(text)
    result = cachalot_here("up", "--dir", folder, code=3)
    assert "has 2 mistakes:" in result.stderr
    assert "k: given 99" in result.stderr
    assert "address: given 'nowhere'" in result.stderr


def make_a_node_hang(folder: Path) -> None:
    """Let node n02 never come up: it waits for somebody to write into a pipe."""
    cachalot("down", "--dir", folder)
    identity = folder / "nodes/n02/target/target.json"
    identity.unlink()
    os.mkfifo(identity)


def test_up_gives_up_at_its_deadline_and_stops_what_it_started(running: Path) -> None:
    make_a_node_hang(running)
    # Long enough for the other node to come up on a busy machine.
    result = cachalot("up", "--dir", running, ALONE, "--wait-s", "8", code=4)
    assert "node n02: was not ready after 8 s; " in result.stderr
    assert find_running(running) == []


def test_interrupted_up_stops_what_it_started_without_a_word(running: Path) -> None:
    make_a_node_hang(running)
    command = start_cachalot("up", "--dir", running, ALONE)
    wait_until(lambda: (running / "nodes/n02/kvstored.json").exists())
    command.send_signal(signal.SIGINT)
    assert command.communicate(timeout=40.0) == ("", "")
    assert command.returncode == 130
    assert find_running(running) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_in_the_foreground_stops_its_nodes_when_it_is_ended(
    folder: Path, number: signal.Signals
) -> None:
    words = ("--nodes", "1", "--code", "1+0", "--json", "--foreground")
    command = start_cachalot("up", "--dir", folder, *words)
    assert command.stdout is not None
    assert '"pid"' in command.stdout.readline()
    assert len(find_running(folder)) == 3, "the command, its node and the worker beside that"
    command.send_signal(number)
    assert command.communicate(timeout=40.0)[1] == ""
    assert command.returncode == 0
    assert find_running(folder) == []


def test_nodes_outlive_the_shell_that_started_them(folder: Path) -> None:
    command = start_cachalot("up", "--dir", folder, ALONE, "--nodes", "1", "--code", "1+0")
    command.communicate(timeout=40.0)
    (pid,) = find_running(folder)
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != command.pid
    assert is_running(pid)


def test_node_options_are_kept_for_the_next_up(folder: Path) -> None:
    words = ("--nodes", "1", "--code", "1+0", "--sync", "batch", "--segment-size", "1MiB")
    cachalot("up", "--dir", folder, *words, ALONE)
    cachalot("down", "--dir", folder)
    cachalot("up", "--dir", folder, ALONE, "--sync", "never")
    (pid,) = find_running(folder)
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    assert "--sync\0never\0" in command
    assert "--segment-size\0001048576\0" in command


def up_on_full_disk(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The disk is full, as far as this process can see: it may write no byte to any file."""

    def write_nothing() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    return subprocess.run(
        [*COMMAND, "up", "--dir", str(folder), *words],
        cwd=ROOT,
        preexec_fn=write_nothing,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_up_writes_nothing_when_nothing_has_changed(running: Path) -> None:
    result = up_on_full_disk(running, ALONE)
    assert (result.returncode, result.stderr) == (0, "")
    assert "0 nodes started, 2 were running" in result.stdout


def test_file_that_up_cannot_write_is_named(folder: Path) -> None:
    result = up_on_full_disk(folder, "--nodes", "1", "--code", "1+0", "--no-gc")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"cachalot: {folder.resolve()}/nodes.json: File too large; raise the limit on the size of"
        " files (ulimit -f)\n"
    )
    assert list(folder.iterdir()) == []


def test_up_warns_when_the_disk_is_smaller_than_the_targets(folder: Path) -> None:
    words = ("--nodes", "1", "--code", "1+0", "--target-size", "1048576TiB")
    result = cachalot("up", "--dir", folder, *words, ALONE)
    assert "cachalot: warning: the targets may grow to 1048576.0 TiB in all" in result.stderr


def test_up_finds_its_cluster_through_a_link(running: Path) -> None:
    link = running.parent / "link"
    link.symlink_to(running)
    pids = find_running(running)
    cachalot("up", "--dir", link, ALONE)
    assert find_running(running) == pids
    cachalot("down", "--dir", link)
    assert find_running(running) == []


def test_output_of_up_may_be_piped(folder: Path) -> None:
    # A node that kept the pipe open would keep the reader waiting for ever.
    words = [*COMMAND, "up", "--dir", str(folder), "--nodes", "1", "--code", "1+0"]
    piped = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{shlex.join(words)} | cat"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=40.0,
        check=True,
    )
    assert "1 node started" in piped.stdout
