"""Changing the policy of real nodes: who has it when, and which of two changes wins."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore import wire
from kvstore.admin.control import spread
from kvstore.admin.control.problems import Conflict
from kvstore.admin.control.spread import PolicySpreader, contains
from kvstore.admin.local_cluster import LocalCluster
from kvstore.client.router import Router
from kvstore.cluster.map import load_cluster_map
from kvstore.errors import NodeError
from kvstore.retention import DEFAULT_POLICY, RetentionPolicy
from tests.kvstore.admin.control_host import ControlApi, HostedWorker, Reply, serve_worker
from tests.patience import PATIENCE_S


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster.start(
        tmp_path / "cluster", nodes=4, k=2, m=2, target_size_bytes=8 << 20
    ) as cluster:
        yield cluster


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a node that was started anew on a busy machine take its time to answer."""
    monkeypatch.setattr(spread, "ASK_DEADLINE_S", 10.0)


@asynccontextmanager
async def worker_of(cluster: LocalCluster) -> AsyncIterator[HostedWorker]:
    """A worker's side whose questions are asked from the test's own loop."""
    loop = asyncio.get_running_loop()
    router = Router(load_cluster_map(cluster.cluster_path), loop, time.monotonic)
    try:
        yield HostedWorker(node="n01", router=router, loop=loop)
    finally:
        router.close()


def set_ttl(api: ControlApi, ttl_s: int, *, who: str = "ada") -> Reply:
    change = {"kind": "ttl", "ttl_class": "agent", "ttl_s": ttl_s}
    return api.ask("PUT", "/api/policy", {"change": change, "who": who, "why": "a test"})


def read_policy(api: ControlApi) -> dict[str, Any]:
    reply = api.ask("GET", "/api/policy")
    assert reply.status == 200
    return reply.json


def read_policy_of_all(api: ControlApi, nodes: list[str]) -> dict[str, Any]:
    """The policy once every node says which it has: one may have been started a moment ago."""
    due_s = time.monotonic() + PATIENCE_S
    while set((found := read_policy(api))["nodes"]) != set(nodes):
        assert time.monotonic() < due_s, found
        time.sleep(0.05)
    return found


def with_ttl(policy: RetentionPolicy, ttl_s: int, *, who: str) -> RetentionPolicy:
    return policy.with_ttl("agent", ttl_s, who=who, why="", at_s=1)


def test_change_is_in_force_on_twelve_nodes_when_it_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spread, "ASK_DEADLINE_S", PATIENCE_S)
    with LocalCluster.start(tmp_path / "c", target_size_bytes=8 << 20) as twelve:
        with serve_worker(twelve.cluster_path, "n05") as api:
            said = set_ttl(api, 100)
        with serve_worker(twelve.cluster_path, "n11") as other:
            found = read_policy(other)
    assert said.status == 200
    assert said.json["nodes"] == twelve.node_names
    assert said.json["missing"] == {}
    assert found["nodes"] == dict.fromkeys(twelve.node_names, 1)
    assert found["policy"]["ttl_s"] == {"agent": 100, "chat": 604_800}
    assert found["policy"]["log"][0] | {"at_s": 0} == {
        "version": 1,
        "at_s": 0,
        "who": "ada",
        "what": "ttl_s.agent",
        "from": 259_200,
        "to": 100,
        "why": "a test",
    }


def test_dead_and_silent_nodes_cost_no_more_than_their_own_share(cluster: LocalCluster) -> None:
    cluster.kill("n02")
    cluster.kill("n03", signal.SIGSTOP)
    try:
        with serve_worker(cluster.cluster_path) as api:
            said = set_ttl(api, 100)
    finally:
        cluster.kill("n03", signal.SIGCONT)
    assert said.status == 200
    assert said.json["nodes"] == ["n01", "n04"]
    assert list(said.json["missing"]) == ["n02", "n03"]
    assert "refused" in said.json["missing"]["n02"]
    assert "no answer within" in said.json["missing"]["n03"]


@pytest.mark.usefixtures("patient")
def test_node_that_was_down_is_behind_until_it_is_told(cluster: LocalCluster) -> None:
    with serve_worker(cluster.cluster_path) as api:
        cluster.kill("n02")
        set_ttl(api, 100)
        cluster.restart_node("n02")
        found = read_policy_of_all(api, cluster.node_names)
        assert found["nodes"] == {"n01": 1, "n02": 0, "n03": 1, "n04": 1}
        # Read by way of the node that is behind, the newest document is shown and changed.
        with serve_worker(cluster.cluster_path, "n02") as behind:
            assert read_policy(behind)["policy"]["version"] == 1
            assert set_ttl(behind, 50).json["nodes"] == cluster.node_names
        assert read_policy(api)["nodes"] == dict.fromkeys(cluster.node_names, 2)


@pytest.mark.usefixtures("patient")
def test_policy_outlives_its_nodes(cluster: LocalCluster) -> None:
    with serve_worker(cluster.cluster_path) as api:
        assert set_ttl(api, 100).status == 200
    for node in cluster.node_names:
        cluster.kill(node)
    for node in cluster.node_names:
        cluster.restart_node(node)
    with serve_worker(cluster.cluster_path) as api:
        found = read_policy_of_all(api, cluster.node_names)
        assert found["nodes"] == dict.fromkeys(cluster.node_names, 1)


@pytest.mark.usefixtures("patient")
def test_half_written_policy_file_costs_a_node_nothing(cluster: LocalCluster) -> None:
    with serve_worker(cluster.cluster_path) as api:
        assert set_ttl(api, 100).status == 200
        # Of the last one, only the brace that ends it is missing.
        for node, kept_bytes in (("n02", 0), ("n03", 40), ("n04", -len("}\n"))):
            cluster.kill(node)
            path = cluster.target_folder(node) / "policy.json"
            path.write_bytes(path.read_bytes()[:kept_bytes])
            cluster.restart_node(node)
            assert "policy cannot be used" in cluster.log_path(node).read_text()
        found = read_policy_of_all(api, cluster.node_names)
        assert found["policy"]["version"] == 1
        assert found["nodes"] == {"n01": 1, "n02": 0, "n03": 0, "n04": 0}
        assert set_ttl(api, 200).json["nodes"] == cluster.node_names


def test_changes_at_one_time_leave_one_document_that_has_every_change_that_was_granted(
    cluster: LocalCluster,
) -> None:
    granted: list[int] = []
    with (
        serve_worker(cluster.cluster_path, "n01") as first,
        serve_worker(cluster.cluster_path, "n02") as second,
        ThreadPoolExecutor(2) as pool,
    ):
        for number in range(1, 9):
            asked = {
                ttl_s: pool.submit(set_ttl, api, ttl_s, who=f"to {ttl_s}")
                for api, ttl_s in ((first, 2 * number), (second, 2 * number + 1))
            }
            statuses = {ttl_s: reply.result(PATIENCE_S).status for ttl_s, reply in asked.items()}
            assert set(statuses.values()) <= {200, 409}
            assert 200 in statuses.values(), "one of the two must win"
            granted += [ttl_s for ttl_s, status in statuses.items() if status == 200]
        found = [read_policy(api) for api in (first, second)]
    assert found[0] == found[1]
    assert len(set(found[0]["nodes"].values())) == 1
    assert sorted(entry["to"] for entry in found[0]["policy"]["log"]) == sorted(granted)


async def test_lost_race_is_a_conflict_that_names_the_winner(cluster: LocalCluster) -> None:
    async with worker_of(cluster) as worker:
        mine = with_ttl(DEFAULT_POLICY, 100, who="ada")
        rival = next(
            policy
            for ttl_s in range(1, 1000)
            if (policy := with_ttl(DEFAULT_POLICY, ttl_s, who="bob")).is_newer_than(mine)
        )

        async def settle(_: float) -> None:
            document = rival.to_json()
            for node in cluster.node_names:
                await worker.ask(
                    node, wire.Op.POLICY, body=document, count=len(document), deadline_s=PATIENCE_S
                )

        with pytest.raises(Conflict) as caught:
            await PolicySpreader(worker, sleep=settle).change(lambda _: mine)
        assert "version 1 by ada was not taken over" in str(caught.value)
        assert "ttl_s.agent by bob" in str(caught.value)
        assert worker.policy == rival


async def test_change_that_others_went_on_from_is_not_lost(cluster: LocalCluster) -> None:
    async with worker_of(cluster) as worker:

        async def settle(_: float) -> None:
            answer = await worker.ask("n01", wire.Op.POLICY, deadline_s=PATIENCE_S)
            later = with_ttl(RetentionPolicy.parse(answer), 7, who="bob").to_json()
            for node in cluster.node_names:
                await worker.ask(
                    node, wire.Op.POLICY, body=later, count=len(later), deadline_s=PATIENCE_S
                )

        spread = await PolicySpreader(worker, sleep=settle).change(
            lambda policy: with_ttl(policy, 100, who="ada")
        )
        assert spread.nodes == tuple(cluster.node_names)
        assert worker.policy.version == 2
        assert contains(worker.policy, spread.policy)


async def test_change_without_any_node_is_a_fault_of_the_cluster(cluster: LocalCluster) -> None:
    async with worker_of(cluster) as worker:
        cluster.stop()
        with pytest.raises(NodeError, match="no node took the policy"):
            await PolicySpreader(worker).change(lambda policy: with_ttl(policy, 1, who="ada"))


def test_drain_and_its_end_are_known_to_the_node(cluster: LocalCluster) -> None:
    def is_draining(api: ControlApi) -> list[bool]:
        nodes = api.ask("GET", "/api/nodes").json["nodes"]
        return [bool(node["statistics"]["draining"]) for node in nodes]

    with serve_worker(cluster.cluster_path) as api:
        assert api.ask("POST", "/api/drain/n03", {"who": "ada"}).status == 200
        assert api.ask("GET", "/api/drain").json["draining"] == ["n03"]
        assert is_draining(api) == [False, False, True, False]
        again = api.ask("POST", "/api/drain/n03", {"who": "ada"})
        assert (again.status, again.json["is_changed"]) == (200, False)
        assert again.json["policy"]["version"] == 1
        assert again.json["nodes"] == ["n01", "n02", "n03", "n04"]
        assert api.ask("DELETE", "/api/drain/n03", {"who": "ada"}).json["is_changed"] is True
        assert is_draining(api) == [False] * 4
        log = read_policy(api)["policy"]["log"]
    assert [entry["what"] for entry in log] == ["draining.n03"] * 2


def test_undo_brings_back_what_was(cluster: LocalCluster) -> None:
    with serve_worker(cluster.cluster_path) as api:
        set_ttl(api, 100)
        change = {"kind": "watermarks", "high": 0.5, "low": 0.4}
        api.ask("PUT", "/api/policy", {"change": change, "who": "ada"})
        api.ask("PUT", "/api/settings", {"name": "scrub_is_on", "value": False, "who": "ada"})
        for number in range(3):
            reply = api.ask("POST", "/api/policy/undo", {"who": "bob", "why": "a mistake"})
            assert reply.json["policy"]["log"][-1]["undoes"] == 3 - number
        policy = RetentionPolicy.parse(json.dumps(reply.json["policy"]).encode())
    assert policy.version == 6
    assert (policy.ttl_s, policy.watermarks) == (DEFAULT_POLICY.ttl_s, DEFAULT_POLICY.watermarks)
    assert policy.settings == {}
