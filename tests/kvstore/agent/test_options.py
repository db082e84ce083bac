"""What an agent may be told, how much memory it may take, and where it listens."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kvstore.agent.memory_check import MemoryLeft, check_memory, read_memory_left
from kvstore.agent.options import AgentOptions, Role, parse_roles
from kvstore.agent.peer_listener import address_of, listen_for_peers
from kvstore.cluster.map import load_cluster_map
from kvstore.errors import InvalidArgument, StoreError
from kvstore.node.container_memory import SystemRoots


def options(**changes: object) -> AgentOptions:
    given: dict[str, Any] = {
        "cluster_path": Path("cluster.toml"),
        "socket_path": Path("agent.sock"),
        **changes,
    }
    return AgentOptions(**given)


def test_roles_are_read_in_any_order() -> None:
    assert parse_roles("window, check") == {Role.WINDOW, Role.CHECK}


@pytest.mark.parametrize("text", ["", "check,", "cook", "check;fetch"])
def test_unknown_roles_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--roles"):
        parse_roles(text)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"roles": frozenset()}, "--roles"),
        ({"socket_path": Path("x" * 108)}, "--socket"),
        ({"arena_bytes": 4096}, "--arena"),
        ({"arena_bytes": (1 << 30) + 1}, "--arena"),
        ({"fetch_workers": 0}, "--fetch-workers"),
        ({"window_memory_bytes": 1}, "--window-memory"),
        ({"name": "a\nb"}, "--name"),
        ({"name": "x" * 65}, "--name"),
        ({"listen": "0.0.0.0:0"}, "--listen"),
        ({"listen": "somewhere:1"}, "--listen"),
        ({"listen": "127.0.0.1"}, "--listen"),
        ({"listen": "127.0.0.1:70000"}, "--listen"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        options(**changes)


def test_options_of_what_is_not_used_are_not_looked_at() -> None:
    found = options(
        roles=frozenset({Role.CHECK}), arena_bytes=1, window_memory_bytes=1, listen="x", listen_fd=9
    )
    assert not found.has_arena


# Memory -------------------------------------------------------------------------------------------


def test_memory_that_is_there_may_be_taken() -> None:
    check_memory(100, 50, MemoryLeft(150, 150))
    check_memory(100, 50, MemoryLeft(None, None))


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (MemoryLeft(149, None), "this machine has 149 bytes left"),
        (MemoryLeft(200, 149), "the container's memory limit has 149 bytes left"),
    ],
)
def test_memory_that_is_not_there_is_refused_with_its_limit(left: MemoryLeft, said: str) -> None:
    with pytest.raises(StoreError, match=said):
        check_memory(100, 50, left)


def test_memory_left_is_read_from_the_system(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    2000 kB\n",
        "proc/self/cgroup": "0::/a\n",
        "cgroup/a/memory.max": "5000\n",
        "cgroup/a/memory.current": "3000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    roots = SystemRoots(proc=tmp_path / "proc", cgroup=tmp_path / "cgroup")
    assert read_memory_left(roots) == MemoryLeft(2000 * 1024, 2000)


def test_memory_left_is_unknown_when_the_system_does_not_say(tmp_path: Path) -> None:
    roots = SystemRoots(proc=tmp_path / "none", cgroup=tmp_path / "none")
    assert read_memory_left(roots) == MemoryLeft(None, None)


# Listening ----------------------------------------------------------------------------------------


def test_agent_listens_where_it_is_told(cluster_path: str) -> None:
    with listen_for_peers(options(listen="127.0.0.1:0"), load_cluster_map(cluster_path)) as found:
        host, _, port = address_of(found).rpartition(":")
        assert host == "127.0.0.1"
        socket.create_connection((host, int(port))).close()


def test_agent_adopts_an_inherited_socket(cluster_path: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        given = options(listen_fd=os.dup(theirs.fileno()))
        with listen_for_peers(given, load_cluster_map(cluster_path)) as found:
            assert found.getsockname() == theirs.getsockname()


def test_descriptor_that_does_not_listen_is_refused(cluster_path: str) -> None:
    with socket.socket() as theirs:
        given = options(listen_fd=os.dup(theirs.fileno()))
        with pytest.raises(InvalidArgument, match="--listen-fd"):
            listen_for_peers(given, load_cluster_map(cluster_path))


def test_address_that_is_taken_is_named(cluster_path: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        taken = f"127.0.0.1:{theirs.getsockname()[1]}"
        with pytest.raises(StoreError, match=f"cannot listen on {taken}"):
            listen_for_peers(options(listen=taken), load_cluster_map(cluster_path))


def test_entrypoint_that_is_not_in_the_map_is_refused(cluster_path: str) -> None:
    with pytest.raises(InvalidArgument, match="--entrypoint"):
        listen_for_peers(options(entrypoint="e9"), load_cluster_map(cluster_path))
