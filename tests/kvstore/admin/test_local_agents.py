"""Real agents beside real nodes: who starts them, who ends them, and what is left of them."""

import os
import re
import shutil
import signal
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.admin import local_folder
from kvstore.admin.agent_socket import ask_agent_at
from kvstore.admin.local_agents import agent_command, check_agents
from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.local_folder import LocalAgentOptions, LocalFolder
from kvstore.admin.local_plan import (
    AGENTS_MAX,
    LocalWishes,
    add_entrypoints,
    choose_agents,
    find_differences,
    name_agents,
)
from kvstore.admin.node_process import AGENT, is_command_of_node
from kvstore.admin.node_start import NodeStartFailed
from kvstore.admin.node_stop import StopOutcome
from kvstore.cluster.map import load_cluster_map, write_cluster_map
from kvstore.errors import AgentUnreachable, InvalidArgument, NodeError
from tests.kvstore.admin.command_line import (
    Result,
    cachalot,
    cachalot_here,
    cachalot_json,
    find_running,
    is_running,
    one_line,
)
from tests.kvstore.admin.conftest import end_all
from tests.kvstore.cluster.fleets import planned_map

SMALL = ("--nodes", "1", "--code", "1+0", "--target-size", "8MiB", "--no-gc")
SMALL_AGENTS = ("--arena", "16MiB", "--window-memory", "4MiB")
OPTIONS = LocalAgentOptions(arena_bytes=16 << 20, window_memory_bytes=4 << 20)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Give a folder with a path that is short enough for sockets."""
    place = Path(tempfile.mkdtemp(dir="/tmp", prefix="ca-"))
    yield place / "c"
    end_all(place)
    shutil.rmtree(place)


def start(folder: Path, agents: int | None = None) -> LocalCluster:
    return LocalCluster.start(
        folder,
        nodes=1,
        k=1,
        m=0,
        target_size_bytes=8 << 20,
        agents=agents,
        agent_options=OPTIONS,
    )


@pytest.fixture(scope="module")
def served() -> Iterator[LocalCluster]:
    """Give a cluster of one node and one agent, to tests that harm the agent only."""
    place = Path(tempfile.mkdtemp(dir="/tmp", prefix="ca-"))
    with start(place / "c", agents=1) as cluster:
        yield cluster
    end_all(place)
    shutil.rmtree(place)


@pytest.fixture
def cluster(served: LocalCluster) -> LocalCluster:
    """Give the same with its agent running, whatever a test before did to it."""
    if served.agents.pid("a01") is None:
        served.agents.start("a01")
    served.agents.kill("a01", signal.SIGCONT)
    return served


# --- plans


def test_agents_are_named_as_they_count() -> None:
    assert name_agents(3) == ["a01", "a02", "a03"]
    assert len({len(name) for name in name_agents(AGENTS_MAX)}) == 1


def test_added_entrypoints_take_free_names_and_keep_the_others() -> None:
    one = add_entrypoints(planned_map(12), [7001])
    two = add_entrypoints(one, [7002, 7003])
    assert [(point.name, point.address) for point in two.entrypoints] == [
        ("a01", "127.0.0.1:7001"),
        ("a02", "127.0.0.1:7002"),
        ("a03", "127.0.0.1:7003"),
    ]
    assert two.epoch == planned_map(12).epoch


def test_wish_for_agents_is_met_by_adding_and_never_by_taking_away() -> None:
    cluster_map = add_entrypoints(planned_map(12), [7001, 7002])
    assert choose_agents(LocalWishes(), 2) == 2
    assert choose_agents(LocalWishes(agents=5), 2) == 5
    assert find_differences(LocalWishes(agents=2), cluster_map) == []
    assert find_differences(LocalWishes(agents=3), cluster_map) == []
    assert find_differences(LocalWishes(agents=1), cluster_map) == [
        "2 agents, not 1 (more can be added, and none taken away)"
    ]
    for count in (-1, AGENTS_MAX + 1):
        with pytest.raises(InvalidArgument, match=f"agents: given {count}, expected 0 to"):
            choose_agents(LocalWishes(agents=count))


def test_command_line_of_an_agent_is_recognised_and_no_other_command(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    command = agent_command(folder, "a01", OPTIONS, 7)
    path = folder.cluster_path

    def is_it(words: list[str], name: str = "a01") -> bool:
        return is_command_of_node(words, place_path=path, node=name, program=AGENT)

    assert is_it(command)
    assert is_it(["/usr/bin/python3", "/usr/bin/cachalot", *command[3:]])
    assert not is_it(command, "a02")
    assert not is_it([word.replace("agent", "status") for word in command[:4]] + command[4:])
    assert not is_it([*command[:3], "status", *command[4:]])
    assert not is_it(command[:2])


def test_folder_whose_path_is_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    with pytest.raises(InvalidArgument) as caught:
        LocalCluster.start(deep, nodes=1, k=1, m=0, agents=1)
    assert "a Unix socket's may have 107" in caught.value.expected
    assert not deep.exists()
    longest = 107 - len("/agents/a01.sock")
    check_agents(LocalFolder("/" + "d" * (longest - 1)), ["a01"], OPTIONS)
    with pytest.raises(InvalidArgument, match=f"at most {longest} bytes"):
        check_agents(LocalFolder("/" + "d" * longest), ["a01"], OPTIONS)


def test_option_that_no_agent_may_have_is_refused_and_not_kept(folder: Path) -> None:
    wrong = LocalAgentOptions(arena_bytes=1000)
    with pytest.raises(InvalidArgument, match="--arena: given 1000 B, expected"):
        LocalCluster.start(folder, nodes=1, k=1, m=0, agents=1, agent_options=wrong)
    assert not folder.exists()


def test_more_memory_than_the_machine_has_is_refused_and_not_kept(cluster: LocalCluster) -> None:
    kept = (cluster.folder / "agents.json").read_text()
    for option, said in (
        ("--arena", "memory: given 15 TiB of arena and 4 MiB of window records, expected together"),
        ("--window-memory", "memory: given 16 MiB of arena and 15 TiB of window records, expected"),
    ):
        line = one_line(cachalot_here("up", "--dir", cluster.folder, option, "15TiB", code=2))
        assert said in line
    line = one_line(cachalot_here("up", "--dir", cluster.folder, "--fetch-workers", "65", code=2))
    assert "--fetch-workers: given 65, expected 1 to 64" in line
    assert (cluster.folder / "agents.json").read_text() == kept


# --- processes


def test_cluster_starts_agents_that_are_entrypoints_and_ends_them(folder: Path) -> None:
    with start(folder, agents=2) as cluster:
        assert cluster.agent_names == ["a01", "a02"]
        assert cluster.map.epoch == 1
        for name in cluster.agent_names:
            path = cluster.agents.socket(name)
            assert path == folder / "agents" / f"{name}.sock"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            said = ask_agent_at(path, 5.0)
            assert said["pid"] == cluster.agents.pid(name)
            assert said["entrypoint"] == name
            assert said["address"] == cluster.map.entrypoint_by_name[name].address
            assert said["arena"]["size_bytes"] == OPTIONS.arena_bytes
            assert said["windows"]["memory_bytes"] == OPTIONS.window_memory_bytes
            assert "serving agent" in cluster.agents.log_path(name).read_text()
    assert find_running(folder) == []
    assert list(folder.glob("agents/*.sock")) == []


def test_killed_agent_starts_again_on_its_address_and_socket(cluster: LocalCluster) -> None:
    path, address = cluster.agents.socket("a01"), cluster.map.entrypoints[0].address
    pid = cluster.agents.pid("a01")
    assert pid is not None
    cluster.agents.kill("a01")
    assert not is_running(pid)
    assert cluster.agents.pid("a01") is None
    with pytest.raises(NodeError, match="agent a01: is not running"):
        cluster.agents.kill("a01")
    with pytest.raises(AgentUnreachable):
        ask_agent_at(path, 1.0)
    cluster.agents.start("a01")
    said = ask_agent_at(path, 5.0)
    assert (said["pid"], said["address"]) == (cluster.agents.pid("a01"), address)
    with pytest.raises(InvalidArgument, match="given a01, which runs"):
        cluster.agents.start("a01")
    with pytest.raises(InvalidArgument, match="expected one of the map: a01"):
        cluster.agents.start("a02")


def test_agents_come_later_and_those_that_are_missing_are_started(folder: Path) -> None:
    with start(folder) as cluster:
        node = cluster.node_pid("n01")
        assert cluster.agent_names == []
        with start(folder, agents=1) as one:
            assert one.map.epoch == 2
            assert load_cluster_map(folder / "cluster.toml") == one.map
            first = one.agents.pid("a01")
            with LocalCluster.start(folder, agents=2) as two:
                assert two.map.epoch == 3
                assert (two.agents.pid("a01"), two.node_pid("n01")) == (first, node)
                assert (
                    ask_agent_at(two.agents.socket("a02"), 5.0)["arena"]["size_bytes"] == 16 << 20
                )
                two.agents.kill("a01")
                with pytest.raises(InvalidArgument, match="has 2 agents, not 1"):
                    LocalCluster.start(folder, agents=1)
                with LocalCluster.start(folder) as again:
                    assert again.map.epoch == 3
                    assert again.agents.pid("a01") not in (None, first)
                    assert again.agents.pid("a02") == two.agents.pid("a02")


def test_stop_takes_away_what_a_killed_agent_left(cluster: LocalCluster) -> None:
    cluster.agents.kill("a01")
    assert cluster.agents.socket("a01").is_socket()
    (stopped,) = cluster.agents.stop(["a01"])
    assert stopped.outcome is StopOutcome.NOT_RUNNING
    assert not cluster.agents.socket("a01").exists()
    assert cluster.agents.recorded() == []


def test_stop_leaves_the_socket_of_an_agent_that_somebody_else_started(
    cluster: LocalCluster,
) -> None:
    path = cluster.agents.socket("a01")
    record = cluster.folder / "agents" / "a01" / "agent.json"
    content = record.read_text()
    pid = cluster.agents.pid("a01")
    record.write_text(content.replace(str(pid), "1"))
    cluster.agents.stop(["a01"])
    assert path.is_socket()
    assert ask_agent_at(path, 5.0)["pid"] == pid
    record.write_text(content)


def test_nothing_is_left_running_when_an_agent_does_not_come_up(folder: Path) -> None:
    (folder / "agents").mkdir(parents=True)
    (folder / "agents" / "a02.sock").write_text("not a socket")
    with pytest.raises(NodeStartFailed) as caught:
        start(folder, agents=2)
    assert re.match(r"agent a02: ended with exit code 2", str(caught.value))
    assert "which is there and is no socket" in str(caught.value)
    assert caught.value.exit_code == 2
    assert find_running(folder) == []


def test_agent_is_not_started_while_another_command_has_the_folder(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.agents.kill("a01")
    monkeypatch.setattr(local_folder, "LOCK_POLL_S", 0.01)
    with LocalFolder(cluster.folder).locked():
        starter = threading.Thread(target=cluster.agents.start, args=("a01",))
        starter.start()
        starter.join(1.0)
        assert starter.is_alive()
        assert cluster.agents.pid("a01") is None
    starter.join(60.0)
    assert cluster.agents.pid("a01") is not None


def test_agent_that_does_not_answer_is_named_and_nothing_is_started(cluster: LocalCluster) -> None:
    cluster.agents.kill("a01", signal.SIGSTOP)
    with pytest.raises(NodeError, match=r"agent a01: process .* does not answer"):
        LocalCluster.start(cluster.folder, agents=2, deadline_s=0.5)
    assert load_cluster_map(cluster.folder / "cluster.toml") == cluster.map


def test_taken_port_of_an_agent_is_said(cluster: LocalCluster) -> None:
    cluster.agents.kill("a01")
    point = cluster.map.entrypoints[0]
    with socket.create_server((point.host, point.port)):
        with pytest.raises(NodeStartFailed, match=r"agent a01: its address .* is taken by"):
            LocalCluster.start(cluster.folder, agents=2)
        # The map has not grown by an agent that was not started.
        assert load_cluster_map(cluster.cluster_path) == cluster.map
        assert cluster.agents.pid("a01") is None
    assert cluster.node_pid("n01") is not None


# --- commands


def test_up_starts_agents_and_down_ends_them(folder: Path) -> None:
    said = cachalot_json("up", "--dir", folder, *SMALL, "--agents", "2", *SMALL_AGENTS)
    first, second = said["agents"]
    assert list(first) == ["agent", "socket", "address", "pid", "is_started", "log_path"]
    assert (first["agent"], second["agent"]) == ("a01", "a02")
    assert first["socket"] == str(folder / "agents" / "a01.sock")
    assert first["is_started"] is True
    assert is_running(first["pid"])
    os.kill(second["pid"], signal.SIGKILL)
    shown = cachalot("up", "--dir", folder).stdout
    assert "0 nodes started, 1 was running" in shown
    assert [line.split()[:2] for line in shown.splitlines() if line.startswith("a0")] == [
        ["a01", "was"],
        ["a02", "started"],
    ]
    plan = cachalot_json("down", "--dir", folder, "--wipe", "--dry-run")
    assert [one["outcome"] for one in plan["agents"]] == ["would be stopped"] * 2
    assert is_running(first["pid"])
    done = cachalot_json("down", "--dir", folder, "--wipe")
    assert [one["agent"] for one in done["agents"]] == ["a01", "a02"]
    assert {one["outcome"] for one in done["agents"]} == {"stopped"}
    assert (done["removed_paths"], done["kept_paths"]) == (plan["removed_paths"], [])
    assert find_running(folder) == []
    assert list(folder.iterdir()) == []


def test_wipe_clears_what_a_killed_agent_left_and_keeps_what_is_not_ours(folder: Path) -> None:
    cachalot("up", "--dir", folder, *SMALL, "--agents", "1", *SMALL_AGENTS)
    (folder / "agents" / "notes").write_text("mine")
    pid = ask_agent_at(folder / "agents" / "a01.sock", 5.0)["pid"]
    os.kill(pid, signal.SIGKILL)
    plan = cachalot_json("down", "--dir", folder, "--wipe", "--dry-run")
    done = cachalot_json("down", "--dir", folder, "--wipe")
    assert done["removed_paths"] == plan["removed_paths"]
    assert done["kept_paths"] == [str(folder / "agents" / "notes")]
    assert [path.name for path in folder.rglob("*")] == ["agents", "notes"]


def test_wipe_is_refused_while_somebody_elses_agent_serves_the_socket(folder: Path) -> None:
    with start(folder, agents=1) as cluster:
        record = folder / "agents" / "a01" / "agent.json"
        content = record.read_text()
        record.unlink()
        line = one_line(cachalot_here("down", "--dir", folder, "--wipe", code=4))
        assert line.startswith(f"cachalot: agent {cluster.agents.socket('a01')}: a process that")
        assert (folder / "cluster.toml").is_file()
        record.write_text(content)


def test_down_of_one_node_leaves_the_agents(folder: Path) -> None:
    with start(folder, agents=1) as cluster:
        result = cachalot_here("down", "--dir", folder, "--node", "n01", code=0)
        assert "a01" not in result.stdout
        assert cluster.agents.pid("a01") is not None
        assert cluster.node_pid("n01") is None


def test_agent_keeps_its_options_until_it_is_started_anew_and_up_says_so(
    cluster: LocalCluster,
) -> None:
    folder = cluster.folder
    try:
        changed = cachalot("up", "--dir", folder, "--no-gc", "--arena", "32MiB")
        again = cachalot("up", "--dir", folder, "--no-gc")
        for said in (changed, again):
            assert said.stderr.endswith(
                "cachalot: a01 keeps --arena 16.0 MiB until it is started anew:"
                f" cachalot down --dir {folder} --agent a01; cachalot up --dir {folder}\n"
            )
        pid = cluster.agents.pid("a01")
        assert one_line_of(cachalot("down", "--dir", folder, "--agent", "a01", "--dry-run")) == (
            f"a01: would be stopped (process {pid})"
        )
        ended = cachalot("down", "--dir", folder, "--agent", "a01")
        assert one_line_of(ended) == f"a01: stopped (process {pid})"
        assert ended.stderr == f"cachalot: `cachalot up --dir {folder}` starts a01 again\n"
        assert cluster.node_pid("n01") is not None
        assert one_line_of(cachalot("down", "--dir", folder, "--agent", "a01")) == (
            "a01: not running"
        )
        said = cachalot("up", "--dir", folder, "--no-gc")
        assert "keeps" not in said.stderr
        status = ask_agent_at(cluster.agents.socket("a01"), 5.0)
        assert status["arena"]["size_bytes"] == 32 << 20
    finally:
        LocalFolder(folder).write_agent_options(OPTIONS)


def one_line_of(result: Result) -> str:
    (line,) = result.stdout.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--agent", "a09"), "--agent: given 'a09', expected one of the map: a01"),
        (
            ("--agent", "a09", "--agent", "a01"),
            "--agent: given 'a09', expected one of the map: a01",
        ),
        (("--agent", "a01", "--node", "n01"), "--agent: given --node too, expected one of them"),
        (("--agent", "a01", "--wipe"), "--wipe: given --agent too, expected one of them"),
    ],
)
def test_down_of_what_is_no_agent_of_the_map_is_refused(
    cluster: LocalCluster, words: tuple[str, ...], said: str
) -> None:
    line = one_line(cachalot_here("down", "--dir", cluster.folder, *words, code=2))
    assert line == f"cachalot: {said}"
    assert cluster.agents.pid("a01") is not None


def test_socket_of_an_agent_in_a_folder_that_is_not_there_is_refused(cluster: LocalCluster) -> None:
    path = cluster.folder / "none" / "s"
    words = ("agent", "--cluster", cluster.cluster_path, "--socket", path, "--arena", "1MiB")
    line = one_line(cachalot(*words, code=2))
    assert f"--socket: given {path}, but folder {path.parent} is not there, expected" in line


def test_second_agent_on_a_socket_is_refused_in_one_line(cluster: LocalCluster) -> None:
    path = cluster.agents.socket("a01")
    line = one_line(cachalot("agent", "--cluster", cluster.cluster_path, "--socket", path, code=1))
    assert f"socket {path}: another agent serves it (process {cluster.agents.pid('a01')})" in line
    assert ask_agent_at(path, 5.0)["pid"] == cluster.agents.pid("a01")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--roles", "check,fly"),
            "--roles: given 'fly', expected some of check,fetch,store,window",
        ),
        (
            ("--roles", "fly", "--roles", "check"),
            "--roles: given 'fly', expected some of check,fetch,store,window",
        ),
        (("--arena", "4GB"), "--arena: given '4GB', expected a size such as 4GiB"),
        (("--arena", "1KiB"), "--arena: given 1 KiB, expected 1 MiB to 16 TiB"),
        (("--fetch-workers", "0"), "--fetch-workers: given 0, expected 1 to"),
        (("--window-memory", "1"), "--window-memory: given 1 B, expected"),
        (("--name", "a b"), "--name: given 'a b', expected 1 to 32 of"),
        (("--listen", "somewhere"), "--listen: given 'somewhere', expected"),
        (("--listen", "0.0.0.0:0"), "--listen: given '0.0.0.0:0', expected"),
        (("--entrypoint", "a02"), "--entrypoint"),
        (("--metrics", "here"), "--metrics: given 'here', expected"),
        (("--socket", "/tmp/" + "s" * 110), "--socket: given a path of 115 bytes"),
    ],
)
def test_wrong_option_of_an_agent_is_named(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    write_cluster_map(add_entrypoints(planned_map(12), [7001]), tmp_path / "cluster.toml")
    socket_words = () if words[0] == "--socket" else ("--socket", str(tmp_path / "s"))
    result = cachalot_here(
        "agent", "--cluster", tmp_path / "cluster.toml", *socket_words, *words, code=2
    )
    assert said in one_line(result)


def test_agent_without_a_map_says_so(tmp_path: Path) -> None:
    result = cachalot_here(
        "agent", "--cluster", tmp_path / "cluster.toml", "--socket", tmp_path / "s", code=3
    )
    assert "no cluster map" in one_line(result)
