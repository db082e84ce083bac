"""Waiting for nodes to say that they serve, with processes that say something else."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.admin.local_folder import NodeOptions
from kvstore.admin.node_start import (
    LOG_TAIL_LINES,
    NodeStartFailed,
    StartingNode,
    bind_known_ports,
    bind_new_ports,
    check_node_options,
    is_ready_line,
    node_command,
    read_tail,
    wait_until_ready,
)
from kvstore.cluster.entities import Node
from kvstore.errors import InvalidArgument

READY = "import json, os, sys, time; say = sys.stdout.write; pid = os.getpid()\n"
SAY_READY = "say(json.dumps({'node': 'n01', 'address': 'x:1', 'pid': pid}) + '\\n')\n"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


def start(stack: ExitStack, tmp_path: Path, code: str, name: str = "n01") -> StartingNode:
    """Start a process that runs `code` in place of a node."""
    log_path = tmp_path / f"{name}.log"
    log_path.write_text("from the run before\n")
    with open(log_path, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", READY + code], stdout=subprocess.PIPE, stderr=log
        )
        log_offset = log.tell()
    stack.enter_context(process)
    stack.callback(process.kill)
    return StartingNode(name=name, process=process, log_path=log_path, log_offset=log_offset)


def test_wait_ends_when_the_ready_line_came_in_pieces(stack: ExitStack, tmp_path: Path) -> None:
    code = "text = json.dumps({'node': 'n01', 'pid': pid}) + '\\n'\n"
    code += "say(text[:5]); time.sleep(0.05); say(text[5:]); time.sleep(60)"
    node = start(stack, tmp_path, code)
    wait_until_ready({"n01": node}, deadline_s=20.0)
    assert node.process.poll() is None


@pytest.mark.parametrize(
    ("code", "words", "exit_code"),
    [
        ("sys.exit(2)", "exit code 2 before", 2),
        ("sys.exit(3)", "ended with exit code 3 before it was ready", 3),
        ("sys.exit(5)", "ended with exit code 5 before it was ready", 5),
        ("sys.exit(1)", "ended with exit code 1 before it was ready", 4),
        ("sys.exit(77)", "ended with exit code 77 before it was ready", 4),
        ("os.kill(pid, 9)", f"ended with signal {int(signal.SIGKILL)} before it was ready", 4),
        ("say('hello\\n')", "said b'hello' and not that it is ready", 4),
        ("say('{}\\n')", "said b'{}' and not that it is ready", 4),
        ("say('[' * 4000 + '\\n')", "and not that it is ready", 4),
        ("say('x' * 100000)", "said much, and not that it is ready", 4),
        ("say(json.dumps({'node': 'n02', 'pid': pid}) + '\\n')", "and not that it is ready", 4),
        ("say(json.dumps({'node': 'n01', 'pid': 1}) + '\\n')", "and not that it is ready", 4),
    ],
)
def test_wait_fails_when_a_node_ends_or_says_something_else(
    stack: ExitStack, tmp_path: Path, code: str, words: str, exit_code: int
) -> None:
    node = start(stack, tmp_path, code)
    with pytest.raises(NodeStartFailed) as caught:
        wait_until_ready({"n01": node}, deadline_s=20.0)
    assert words in str(caught.value)
    assert caught.value.exit_code == exit_code
    assert str(node.log_path) in str(caught.value)


def test_failure_shows_the_end_of_the_log_of_this_run_only(
    stack: ExitStack, tmp_path: Path
) -> None:
    code = "[print('line', i, file=sys.stderr) for i in range(40)]; sys.exit(5)"
    node = start(stack, tmp_path, code)
    with pytest.raises(NodeStartFailed) as caught:
        wait_until_ready({"n01": node}, deadline_s=20.0)
    lines = str(caught.value).splitlines()
    assert lines[1:] == [f"  line {i}" for i in range(40 - LOG_TAIL_LINES, 40)]
    assert "from the run before" not in str(caught.value)


def test_wait_fails_at_its_deadline_when_nodes_say_nothing(
    stack: ExitStack, tmp_path: Path
) -> None:
    nodes = {name: start(stack, tmp_path, "time.sleep(60)", name) for name in ("n01", "n02")}
    with pytest.raises(NodeStartFailed, match=r"was not ready after 0 s \(and 1 more\)") as caught:
        wait_until_ready(nodes, deadline_s=0.3)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("line", "is_ready"),
    [
        (json.dumps({"node": "n01", "pid": 7, "address": "127.0.0.1:1"}).encode(), True),
        (json.dumps({"node": "n01", "pid": 7, "more": [1]}).encode(), True),
        (json.dumps({"node": "n01", "pid": "7"}).encode(), False),
        (json.dumps(["n01", 7]).encode(), False),
        (b"\xff\xfe", False),
        (b"[" * 100_000, False),
        (b"", False),
    ],
)
def test_ready_line_names_node_and_process(line: bytes, is_ready: bool) -> None:
    assert is_ready_line(line, node="n01", pid=7) == is_ready


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (NodeOptions(segment_size_bytes=1024), "segment size: given 1.0 KiB, expected 64.0 KiB to"),
        (NodeOptions(segment_size_bytes=1 << 40), "segment size: given 1.0 TiB, expected 64.0 KiB"),
        (NodeOptions(sync="often"), "sync: given 'often', expected one of never, interval, batch"),
    ],
)
def test_options_that_nodes_would_refuse_are_refused_first(
    options: NodeOptions, words: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_node_options(options)
    assert words in str(caught.value)


def test_options_that_nodes_take_raise_nothing() -> None:
    check_node_options(NodeOptions())
    check_node_options(NodeOptions(segment_size_bytes=64 << 10, sync="never"))


def test_tail_of_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert read_tail(tmp_path / "none", 0) == []


def test_new_ports_are_open_before_a_node_listens() -> None:
    listeners = bind_new_ports(3, "127.0.0.1")
    ports = [listener.getsockname()[1] for listener in listeners]
    assert len(set(ports)) == 3
    for port in ports:
        socket.create_connection(("127.0.0.1", port), timeout=5.0).close()
    for listener in listeners:
        listener.close()


def test_taken_port_is_named_and_nothing_stays_open() -> None:
    with socket.socket() as stranger, socket.socket() as free:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        free.bind(("127.0.0.1", 0))
        free_port, taken_port = free.getsockname()[1], stranger.getsockname()[1]
        free.close()
        nodes = [
            Node(name="n01", address=f"127.0.0.1:{free_port}"),
            Node(name="n02", address=f"127.0.0.1:{taken_port}"),
        ]
        with pytest.raises(NodeStartFailed) as caught:
            bind_known_ports(nodes)
        assert f"node n02: its address 127.0.0.1:{taken_port} is taken" in str(caught.value)
        assert caught.value.exit_code == 4
        with socket.socket() as again:
            again.bind(("127.0.0.1", free_port))


def test_address_of_another_machine_is_refused() -> None:
    node = Node(name="n01", address="192.0.2.1:4000")
    with pytest.raises(NodeStartFailed, match="cannot be listened on"):
        bind_known_ports([node])


def test_command_names_only_the_options_that_were_given() -> None:
    plain = node_command(Path("/d/cluster.toml"), "n01", NodeOptions(), 5)
    assert plain[1:] == [
        *("-m", "kvstore.node", "--cluster", "/d/cluster.toml"),
        *("--node", "n01", "--listen-fd", "5"),
    ]
    options = NodeOptions(segment_size_bytes=1 << 20, sync="batch")
    full = node_command(Path("/d/cluster.toml"), "n01", options, 5)
    assert full[len(plain) :] == ["--segment-size", "1048576", "--sync", "batch"]
