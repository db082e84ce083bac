"""What is shown of agents: read from what they say, found through the map and the directories."""

import asyncio
import json
import math
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvstore.admin import agent_inquiry
from kvstore.admin.agent_inquiry import (
    AgentReport,
    ask_agents,
    find_other_agents,
    find_silent_agents,
    keep_figures,
)
from kvstore.admin.agent_metric_table import AGENT_METRICS
from kvstore.admin.agent_socket import ask_agent_at
from kvstore.admin.agent_status import (
    COLUMNS,
    AgentsStatus,
    describe_agent,
    describe_agents,
    render_row,
)
from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.local_folder import LocalAgentOptions
from kvstore.admin.local_plan import add_entrypoints
from kvstore.cluster.map import load_cluster_map
from kvstore.metrics.server import MetricTable
from tests.kvstore.admin.command_line import (
    cachalot,
    cachalot_json,
    start_cachalot,
)
from tests.kvstore.admin.conftest import end_all
from tests.kvstore.cluster.fleets import planned_map
from tests.patience import OPERATION_S, PATIENCE_S, wait_until

SAID: dict[str, Any] = {
    "agent": "a01",
    "pid": 42,
    "uptime_s": 61.5,
    "roles": ["check", "fetch"],
    "sessions": {"open": 3},
    "arena": {"size_bytes": 1 << 30, "leased_bytes": 1 << 20, "runs": 2, "waiting": 1},
    "fetch": {"queued": 4, "running": 5, "bytes": 600},
    "store": {"queued": 7, "dropped": 8, "failed": 3},
    "windows": {
        "records": 9,
        "used_bytes": 900,
        "memory_bytes": 1000,
        "lookups": 8,
        "found_here": 1,
        "found_elsewhere": 5,
    },
    "directory": {
        "entries": 30,
        "hosts_seen": [{"address": "10.0.0.1:7", "records": 9}, {"address": "10.0.0.9:7"}],
    },
}


def report(said: dict[str, Any], *, name: str | None = "a01", port: int = 1) -> AgentReport:
    return AgentReport(address=f"10.0.0.{port}:7", entrypoint=name, is_alive=True, statistics=said)


def silent(name: str | None, port: int) -> AgentReport:
    return AgentReport(
        address=f"10.0.0.{port}:7", entrypoint=name, is_alive=False, problem="no answer"
    )


# --- what they say


def test_agent_is_described_by_what_it_says() -> None:
    agent = describe_agent(report(SAID))
    assert (agent.agent, agent.entrypoint, agent.state, agent.pid) == ("a01", "a01", "alive", 42)
    assert agent.roles == ("check", "fetch")
    assert (agent.arena_bytes, agent.arena_used_bytes, agent.runs) == (1 << 30, 1 << 20, 2)
    assert (agent.fetch_queued, agent.fetch_running, agent.fetched_bytes) == (4, 5, 600)
    assert (agent.store_queued, agent.store_dropped, agent.store_failed) == (7, 8, 3)
    assert describe_agents([report(SAID)]).problems() == [
        "agent a01: 11 blocks not saved since it started: 3 failed, 8 dropped"
    ]
    assert (agent.window_records, agent.window_bytes) == (9, 900)
    assert agent.window_hit_ratio == 0.75
    assert agent.directory_entries == 30
    assert dict(zip(COLUMNS, render_row(agent), strict=True)) == {
        "agent": "a01",
        "state": "alive",
        "pid": "42",
        "address": "10.0.0.1:7",
        "roles": "check,fetch",
        "arena used": "1.0 MiB",
        "arena": "1.0 GiB",
        "runs": "2",
        "fetch queue": "4",
        "windows": "9",
        "window hits": "75 %",
        "directory": "-",
        "uptime": "1 min 1 s",
    }


def test_agent_without_arena_windows_and_directory_has_no_such_figures() -> None:
    said: dict[str, Any] = {
        "agent": "h1",
        "roles": ["check"],
        "arena": None,
        "windows": {},
        "directory": None,
    }
    agent = describe_agent(report(said, name=None))
    assert (agent.arena_bytes, agent.window_records, agent.directory_entries) == (None,) * 3
    assert render_row(agent)[5:12] == ["-"] * 7


def test_share_of_the_directory_is_of_all_parts_that_are_known() -> None:
    quarter, rest = {**SAID, "directory": {"entries": 25}}, {"directory": {"entries": 75}}
    found = describe_agents(
        [report(quarter), report(rest, name="a02", port=2), report({}, name=None, port=3)]
    )
    assert [one.directory_share for one in found.agents] == [0.25, 0.75, None]
    empty = describe_agents([report({"directory": {"entries": 0}})])
    assert empty.agents[0].directory_share is None


def test_silent_agents_are_down_and_only_those_of_the_map_are_missed() -> None:
    found = describe_agents([report(SAID), silent("a02", 2), silent(None, 3)])
    assert [one.state for one in found.agents] == ["alive", "down", "down"]
    assert found.entrypoints_down == ["a02"]
    assert found.problems()[:2] == ["agent a02: no answer", "agent 10.0.0.3:7: no answer"]
    assert found.describe() == "1 of 3 agents alive; 1 entrypoint down: a02"
    assert json.loads(json.dumps(found.render_json()))[1]["state"] == "down"
    assert AgentsStatus().entrypoints_down == []


def test_agents_that_directories_know_are_found_once_and_without_the_entrypoints() -> None:
    hosts = ["10.0.0.1:7", "10.0.0.8:7", "a-name.example:7", 5, None, "10.0.0.8:0"]
    seen = {"directory": {"hosts_seen": [{"address": host} for host in hosts]}}
    found = find_other_agents([report(SAID), report(seen, name="a02", port=2)])
    assert found == ["10.0.0.8:7", "10.0.0.9:7"]
    # An entrypoint that the map names by a host name is known elsewhere by its IP address.
    assert find_other_agents([report({**SAID, "address": "10.0.0.9:7"})]) == []


def test_agents_that_fell_silent_are_those_that_no_directory_hears() -> None:
    def missing(**silent: float) -> dict[str, Any]:
        listed = [{"address": f"10.0.0.{n[1:]}:7", "silent_s": s} for n, s in silent.items()]
        return {"directory": {"entries": 1, "hosts": 1, "hosts_missed": [*listed, {}, 5]}}

    reports = [report(missing(h1=9, h5=90, h6=70, h9=9)), report(missing(h5=80), name="b", port=2)]
    # One of these, and one that the other directory hears, are not silent.
    heard = report(SAID, name="c", port=3)
    assert find_silent_agents([*reports, heard]) == {"10.0.0.6:7": 70, "10.0.0.5:7": 80}
    gone = replace(silent(None, 5), silent_s=80.0)
    found = describe_agents([*reports, gone])
    assert found.problems() == ["agent 10.0.0.5:7: silent for 1 min 20 s: no answer"]
    assert found.render_json()[2]["silent_s"] == 80.0
    assert found.unasked == 0


def test_what_is_kept_of_a_document_is_small_and_shows_the_same() -> None:
    assert describe_agent(report(keep_figures(SAID))) == describe_agent(report(SAID))
    huge: dict[str, Any] = {"agent": "a" * (1 << 20), "roles": [[]] * (1 << 18)}
    huge |= {f"{number}": {f"{inner}": [{}] * 99 for inner in range(99)} for number in range(99)}
    kept = keep_figures(huge)
    assert len(json.dumps(kept)) < 64 << 10
    assert (kept["agent"], kept["roles"]) == ("a" * 128, [])


HALF_A_CHARACTER = "\ud800"
TOO_LARGE = 10**400
"""JSON has no limit for whole numbers, and floats have one."""


def test_text_of_an_agent_does_nothing_to_a_terminal() -> None:
    hostile = f"a{HALF_A_CHARACTER}\x1b[2J\n\u202eb"
    agent = describe_agent(report({"agent": hostile, "roles": [hostile]}))
    assert (agent.agent, agent.roles) == ("a??[2J??b", ("a??[2J??b",))
    said = AgentReport(address="10.0.0.1:7", entrypoint="e", is_alive=False, problem="no\x1b" * 999)
    (line,) = describe_agents([said]).problems()
    assert line.startswith("agent e: no?no?")
    assert len(line) < 320


def test_number_that_no_float_holds_is_not_believed() -> None:
    agent = describe_agent(report({"pid": TOO_LARGE, "uptime_s": TOO_LARGE, "arena": {"runs": 1}}))
    assert (agent.pid, agent.uptime_s, agent.runs) == (None, None, 1)


def test_agents_that_a_directory_does_not_name_are_counted() -> None:
    crowd = {"directory": {"entries": 1, "hosts": 300}}
    found = describe_agents([report(crowd), report(SAID, name=None, port=2)])
    assert found.unasked == 298
    assert found.describe() == "2 of 2 agents alive; at least 298 more were not asked"
    assert describe_agents([report({"directory": {"hosts": 1}})]).unasked == 0


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(TOO_LARGE)
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=80),
    lambda inner: (
        st.lists(inner, max_size=10)
        | st.dictionaries(
            st.sampled_from(
                [*SAID, *(key for one in SAID.values() if isinstance(one, dict) for key in one)]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from([*SAID]), anything, max_size=10))
def test_whatever_an_agent_says_is_shown_or_left_out(said: dict[str, Any]) -> None:
    found = describe_agents([report(said)])
    (agent,) = found.agents
    assert len(render_row(agent)) == len(COLUMNS)
    assert len(agent.agent) <= 64
    assert "".join(render_row(agent)).isprintable()
    for value in (agent.pid, agent.runs, agent.window_records, agent.directory_entries):
        assert value is None or (isinstance(value, int) and value >= 0)
    assert agent.window_hit_ratio is None or 0 <= agent.window_hit_ratio <= 1
    assert agent.uptime_s is None or math.isfinite(agent.uptime_s)
    assert all(len(host) <= 300 for host in find_other_agents([report(said)]))


# --- agents that do not answer


async def test_agent_in_line_behind_silent_ones_is_not_said_to_be_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_inquiry, "ASKED_AT_ONCE_MAX", 1)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as two:
        ports = [listener.getsockname()[1] for listener in (one, two)]
        reports = await ask_agents(
            add_entrypoints(planned_map(12), ports),
            deadline_s=0.2,
            loop=asyncio.get_running_loop(),
            clock=time.monotonic,
        )
    assert [report.problem for report in reports] == [
        "no answer within 0.20 s",
        "not asked within 0.20 s: too many others do not answer",
    ]


# --- real agents


@pytest.fixture
def place() -> Iterator[Path]:
    """Give a folder with a path that is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="ca-"))
    yield folder
    end_all(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Give one node and two agents."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="ca-"))
    options = LocalAgentOptions(arena_bytes=16 << 20, window_memory_bytes=4 << 20)
    with LocalCluster.start(
        folder / "c", nodes=1, k=1, m=0, target_size_bytes=8 << 20, agents=2, agent_options=options
    ) as cluster:
        yield cluster
    end_all(folder)
    shutil.rmtree(folder)


def ask(cluster: LocalCluster, deadline_s: float = OPERATION_S) -> list[AgentReport]:
    async def run() -> list[AgentReport]:
        return await ask_agents(
            load_cluster_map(cluster.cluster_path),
            deadline_s=deadline_s,
            loop=asyncio.get_running_loop(),
            clock=time.monotonic,
        )

    return asyncio.run(run())


def test_agents_of_the_map_answer_with_what_their_sockets_say(cluster: LocalCluster) -> None:
    reports = ask(cluster)
    assert [one.entrypoint for one in reports] == ["a01", "a02"]
    for one in reports:
        assert one.is_alive
        direct = ask_agent_at(cluster.agents.socket(str(one.entrypoint)), 5.0)
        assert direct.keys() == one.statistics.keys()
        assert (direct["pid"], direct["instance"]) == (
            one.statistics["pid"],
            one.statistics["instance"],
        )
        described = describe_agent(one)
        missing = [
            name
            for name in (
                "pid",
                "uptime_s",
                "sessions",
                "arena_bytes",
                "runs",
                "waiting",
                "fetch_queued",
                "fetch_running",
                "fetched_bytes",
                "store_queued",
                "store_dropped",
                "store_failed",
                "window_records",
                "window_bytes",
                "window_memory_bytes",
                "directory_entries",
            )
            if getattr(described, name) is None
        ]
        assert missing == []


def test_whole_document_of_a_real_agent_is_kept_as_far_as_its_status_goes(
    cluster: LocalCluster,
) -> None:
    whole = ask(cluster)[0]
    kept = replace(whole, statistics=keep_figures(whole.statistics))
    assert describe_agent(kept) == describe_agent(whole)


def test_every_metric_has_its_figure_from_a_real_agent(cluster: LocalCluster) -> None:
    table = MetricTable("agent", "agent", AGENT_METRICS)
    content = table.render(ask(cluster)[0].statistics).decode()
    families = {one.name: one.samples for one in text_string_to_metric_families(content)}
    empty = {name for name, samples in families.items() if not samples}
    # A fetch that has not ended has no end.
    assert empty == {"cachalot_agent_fetches"}
    assert len(families) == len(AGENT_METRICS)


def test_status_shows_agents_and_one_of_them_alone(cluster: LocalCluster) -> None:
    shown = cachalot("status", "--cluster", cluster.cluster_path).stdout
    rows = [line.split() for line in shown.splitlines() if line.startswith("a0")]
    assert [row[:3] for row in rows] == [
        [name, "alive", str(cluster.agents.pid(name))] for name in cluster.agent_names
    ]
    assert "2 of 2 agents alive" in shown
    alone = cachalot("status", "--socket", cluster.agents.socket("a01")).stdout.splitlines()
    assert len(alone) == 2
    assert alone[1].split()[:4] == rows[0][:4]
    said = cachalot_json("status", "--socket", cluster.agents.socket("a01"))
    assert (said["agent"], said["pid"]) == ("a01", cluster.agents.pid("a01"))


def test_agent_that_is_no_entrypoint_is_found_through_the_directory(
    cluster: LocalCluster, place: Path
) -> None:
    words = ("agent", "--cluster", cluster.cluster_path, "--socket", place / "s", "--name", "h1")
    process = start_cachalot(
        *words, "--roles", "window", "--arena", "1MiB", "--window-memory", "1MiB"
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["agent"] == "h1"
        wait_until(lambda: len(ask(cluster)) == 3)
        said = cachalot_json("status", "--cluster", cluster.cluster_path)
        other = said["agents"][2]
        assert other["window_memory_bytes"] == 1 << 20
        assert (other["agent"], other["entrypoint"], other["pid"]) == ("h1", None, process.pid)
        assert (other["address"], other["roles"]) == (ready["address"], ["window"])
        # Stopped, it is down as long as directories know it; nodes and entrypoints are what counts.
        process.send_signal(signal.SIGSTOP)
        waiting = ("status", "--cluster", cluster.cluster_path, "--wait-s", "0.5")
        said = cachalot_json(*waiting, code=0)
        assert [one["state"] for one in said["agents"]] == ["alive", "alive", "down"]
        assert said["agents"][2]["problem"].startswith("no answer within 0.50 s")
        # Directories give it up, and tell that they miss it.
        wait_until(lambda: any(one.silent_s is not None for one in ask(cluster, 0.5)))
        other = cachalot_json(*waiting, code=0)["agents"][2]
        assert (other["address"], other["state"]) == (ready["address"], "down")
        assert other["problem"].startswith("silent for ")
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: len(ask(cluster)) == 3 and ask(cluster)[2].silent_s is None)
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def test_entrypoint_that_is_down_is_named_and_ends_status_with_6(cluster: LocalCluster) -> None:
    words = ("status", "--cluster", cluster.cluster_path, "--wait-s", "0.5")
    cluster.agents.kill("a02", signal.SIGSTOP)
    try:
        said = cachalot_json(*words, code=6)
        shown = cachalot(*words, code=6).stdout
    finally:
        cluster.agents.kill("a02", signal.SIGCONT)
    assert said["nodes_alive"] == 1
    points = [one["state"] for one in said["agents"] if one["entrypoint"]]
    assert points == ["alive", "down"]
    assert "agent a02: no answer within 0.50 s" in shown
    assert "1 entrypoint down: a02" in shown
    cluster.agents.kill("a02")
    try:
        assert "Connection refused" in cachalot_json(*words, code=6)["agents"][1]["problem"]
    finally:
        cluster.agents.start("a02")
    assert cachalot_json(*words)["agents"][1]["pid"] == cluster.agents.pid("a02")
