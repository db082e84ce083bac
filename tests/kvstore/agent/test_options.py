"""What an agent may be told, how much memory it may take, and where it listens."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kvstore.agent.memory_check import MemoryLeft, check_memory, read_memory_left
from kvstore.agent.options import AgentOptions, Role, fit_name, format_size, parse_roles
from kvstore.agent.peer_listener import address_of, listen_for_peers
from kvstore.cluster.map import load_cluster_map
from kvstore.cluster.validation import NAME_PATTERN
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
        ({"name": "x" * 33}, "--name"),
        ({"name": ""}, "--name: given '', expected 1 to 32"),
        ({"name": ".a"}, "--name"),
        ({"name": "a b"}, "--name"),
        ({"entrypoint": "e1", "roles": parse_roles("window")}, "--roles: .* expected check"),
        ({"entrypoint": "e1", "listen": "127.0.0.1:0"}, "--listen: .* beside --entrypoint"),
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


def test_sizes_are_told_in_their_unit() -> None:
    with pytest.raises(InvalidArgument, match="--arena: given 4 KiB, expected 1 MiB to 16 TiB"):
        options(arena_bytes=4096)
    with pytest.raises(InvalidArgument, match="--window-memory: given 1 B, expected 1 MiB to"):
        options(window_memory_bytes=1)
    assert [format_size(size) for size in (0, 1023, 1536, 40 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "40 GiB",
    ]


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("gpu-17.example", "gpu-17.example"),
        ("gpu-17." + "x" * 40, "gpu-17"),
        ("x" * 64, "x" * 32),
        ("_my host", "my-host"),
        ("\u00fc1", "1"),
        ("", "agent"),
        ("...", "agent"),
    ],
)
def test_name_of_a_host_is_made_to_fit_the_rule_of_names(host: str, name: str) -> None:
    assert fit_name(host) == name
    assert NAME_PATTERN.fullmatch(name)


# Memory -------------------------------------------------------------------------------------------


def test_memory_that_is_there_raises_nothing() -> None:
    check_memory(100, 50, MemoryLeft(150, 150))
    check_memory(100, 50, MemoryLeft(None, None))


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (MemoryLeft(149, None), "at most what this machine has left, 149 B"),
        (MemoryLeft(200, 149), "at most what the container's memory limit has left, 149 B"),
    ],
)
def test_memory_that_is_not_there_is_refused_with_its_limit(left: MemoryLeft, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        check_memory(100, 50, left)


def test_memory_is_told_in_the_units_that_it_was_given_in() -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_memory(40 << 30, 512 << 20, MemoryLeft(23 << 30, None))
    assert str(caught.value) == (
        "memory: given 40 GiB of arena and 512 MiB of window records,"
        " expected together at most what this machine has left, 23 GiB"
    )
    assert caught.value.exit_code == 2


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
