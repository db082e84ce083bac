"""From a map and what nodes said of themselves to the figures of `cachalot status`."""

import json
from dataclasses import asdict
from itertools import combinations
from typing import Any

import pytest

from kvstore.admin.cluster_status import (
    FIGURE_MAX,
    ClassHeld,
    count_spare_nodes,
    describe_classes,
    describe_cluster,
    describe_node,
    describe_policy,
    render_json,
    summarise,
)
from kvstore.admin.local_plan import LocalShape, plan_local_map
from kvstore.admin.quantities import make_code
from kvstore.admin.status_command import render_row, render_target
from kvstore.admin.worker_status import describe_workers
from kvstore.client import NodeReport
from kvstore.cluster.entities import ClusterMap


def make_map(nodes: int, k: int, m: int) -> ClusterMap:
    shape = LocalShape(nodes=nodes, code=make_code("code", k, m), target_size_bytes=1 << 30)
    return plan_local_map(shape, cluster="ab" * 16, ports=range(1, nodes + 1))


def alive_report(node: str, **changed: object) -> NodeReport:
    target = {
        "name": f"{node}-t0",
        "blocks": 5,
        "used_bytes": 6000,
        "capacity_bytes": 1 << 30,
        "reads": 7,
        "shards_read": 70,
        "rejected_shards": 1,
        "quarantined": 3,
    }
    said: dict[str, Any] = {
        "node": node,
        "pid": 4711,
        "uptime_s": 12.5,
        "targets": [target, target],
    } | changed
    return NodeReport(node=node, address="127.0.0.1:1", is_alive=True, statistics=said)


def dead_report(node: str) -> NodeReport:
    return NodeReport(node=node, address="127.0.0.1:2", is_alive=False, problem="refused")


def test_what_is_held_of_each_class_is_added_up_over_all_targets() -> None:
    def target(**classes: object) -> dict[str, object]:
        return {"name": "t", "classes": classes}

    chat, agent = {"blocks": 2, "bytes": 2048}, {"blocks": 1, "bytes": 1 << 20}
    reports = [
        alive_report("n01", targets=[target(chat=chat, agent=agent), target(chat=chat)]),
        alive_report("n02", targets=[target(), {"name": "t"}]),
        dead_report("n03"),
    ]
    status = describe_cluster(make_map(3, 2, 1), reports)
    assert list(status.classes.items()) == [
        ("agent", ClassHeld(shards=1, bytes=1 << 20)),
        ("chat", ClassHeld(shards=4, bytes=4096)),
    ]
    assert describe_classes(status) == "stored: agent 1.0 MiB in 1 shard, chat 4.0 KiB in 4 shards"
    said = render_json(status, describe_workers(make_map(3, 2, 1), {}))
    assert said["classes"]["chat"] == {"shards": 4, "bytes": 4096}
    assert said["nodes"][0]["targets"][1]["classes"] == {"chat": {"shards": 2, "bytes": 2048}}
    strange = describe_node(alive_report("n01", targets=[target(chat={"blocks": -1})]))
    assert "not understood" in strange.problem


def test_nothing_is_known_of_what_is_stored_while_no_node_answers() -> None:
    reports = [dead_report(f"n0{number}") for number in (1, 2, 3)]
    status = describe_cluster(make_map(3, 2, 1), reports)
    assert describe_classes(status) == "stored: not known, no node answers"


def test_figures_of_a_node_are_sums_over_its_targets() -> None:
    status = describe_node(alive_report("n01"))
    assert (status.blocks, status.used_bytes, status.capacity_bytes) == (10, 12000, 2 << 30)
    assert (status.reads, status.shards_read, status.rejected_shards) == (14, 140, 2)
    assert (status.pid, status.uptime_s, status.is_alive, status.problem) == (4711, 12.5, True, "")


def test_dead_node_has_a_reason_and_no_figures() -> None:
    status = describe_node(dead_report("n01"))
    assert (status.is_alive, status.problem) == (False, "refused")
    assert status.blocks is status.pid is status.uptime_s is None


@pytest.mark.parametrize("targets", [None, 5, {}, [1], ["x"]])
def test_node_with_unknown_figures_counts_as_down_with_a_reason(targets: object) -> None:
    status = describe_node(alive_report("n01", targets=targets))
    assert not status.is_alive
    assert status.problem == "answers, but its figures are not understood"


@pytest.mark.parametrize(
    "figure",
    [float("inf"), float("nan"), -1, 10**401, 1 << 63, "12", True, [], {}, -0.5],
    ids=["inf", "nan", "-1", "401 digits", "2^63", "text", "true", "list", "object", "-0.5"],
)
@pytest.mark.parametrize("name", ["uptime_s", "pid", "blocks", "used_bytes", "rejected_shards"])
def test_node_with_an_impossible_figure_counts_as_down_with_a_reason(
    name: str, figure: object
) -> None:
    report = alive_report("n01")
    if name in ("uptime_s", "pid"):
        report.statistics[name] = figure
    else:
        report.statistics["targets"] = [report.statistics["targets"][0] | {name: figure}]
    status = describe_node(report)
    assert (status.is_alive, status.uptime_s, status.blocks) == (False, None, None)
    assert status.problem == "answers, but its figures are not understood"


def test_largest_figures_that_are_believed_can_be_shown() -> None:
    targets = [dict.fromkeys(("blocks", "used_bytes", "capacity_bytes", "reads"), FIGURE_MAX)] * 3
    status = describe_node(alive_report("n01", uptime_s=float(1 << 62), targets=targets))
    assert status.is_alive
    assert json.loads(json.dumps(asdict(status), allow_nan=False))["blocks"] == 3 * FIGURE_MAX
    assert render_row(status, "running")[1] == "alive"


def test_missing_figure_is_unknown_and_not_zero() -> None:
    status = describe_node(alive_report("n01", targets=[{"blocks": 4}, {"blocks": 5, "reads": 1}]))
    assert (status.blocks, status.reads, status.rejected_shards) == (9, None, None)


def test_answer_that_is_no_object_counts_as_down() -> None:
    report = NodeReport(node="n01", address="x:1", is_alive=True, statistics=[1])  # type: ignore[arg-type]
    assert not describe_node(report).is_alive


@pytest.mark.parametrize(("nodes", "k", "m"), [(1, 1, 0), (6, 4, 2), (8, 4, 2), (7, 2, 1)])
def test_spare_nodes_are_what_the_worst_choice_of_failures_allows(
    nodes: int, k: int, m: int
) -> None:
    cluster_map = make_map(nodes, k, m)
    names = [node.name for node in cluster_map.nodes]

    def is_readable(alive: set[str]) -> bool:
        return all(
            sum(cluster_map.node_of(target).name in alive for target in group.targets) >= k
            for group in cluster_map.groups
        )

    for down in range(min(nodes, m + 2) + 1):
        for dead in combinations(names, down):
            alive = set(names) - set(dead)
            spare = count_spare_nodes(cluster_map, alive)
            assert (spare >= 0) == is_readable(alive)
            if spare >= 0:
                assert all(
                    is_readable(alive - set(more))
                    for more in combinations(sorted(alive), min(spare, 1))
                )


@pytest.mark.parametrize(
    ("down", "line"),
    [
        (0, "6 of 6 nodes alive, code 4+2: 2 more may fail before blocks are unreadable"),
        (1, "5 of 6 nodes alive, code 4+2: 1 more may fail before blocks are unreadable"),
        (2, "4 of 6 nodes alive, code 4+2: none may fail any more, or blocks are unreadable"),
        (3, "3 of 6 nodes alive, code 4+2: blocks are unreadable until 1 more is back"),
        (6, "0 of 6 nodes alive, code 4+2: blocks are unreadable until 4 more are back"),
    ],
)
def test_summary_says_what_may_still_fail(down: int, line: str) -> None:
    cluster_map = make_map(6, 4, 2)
    reports = [
        dead_report(node.name) if index < down else alive_report(node.name)
        for index, node in enumerate(cluster_map.nodes)
    ]
    assert summarise(describe_cluster(cluster_map, reports)) == line


def test_json_has_its_documented_names() -> None:
    cluster_map = make_map(2, 1, 1)
    status = describe_cluster(cluster_map, [alive_report("n01"), dead_report("n02")])
    workers = describe_workers(cluster_map, {})
    found = render_json(status, workers)
    assert found["cluster"] == "ab" * 16
    assert found["epoch"] == 1
    assert found["code"] == {"k": 1, "m": 1}
    assert (found["nodes_total"], found["nodes_alive"], found["spare_nodes"]) == (2, 1, 0)
    assert found["summary"] == summarise(status)
    assert found["workers"].startswith("gc_worker: no control address")
    assert found["targets_lost"] == []
    assert found["redundancy"]["nodes_counted"] == 0
    for node in found["nodes"]:
        assert list(node) == [
            *("node", "address", "is_alive", "problem", "pid", "uptime_s", "blocks"),
            *("used_bytes", "capacity_bytes", "reads", "shards_read", "rejected_shards"),
            *("refused_shards", "policy_version", "is_draining", "targets", "fill_ratio", "worker"),
            "count_age_s",
        ]


def test_targets_of_a_node_are_described_one_by_one() -> None:
    targets = [
        {
            **{"name": "n01-t0", "blocks": 5, "slots_used": 3, "slots_total": 100},
            **{"quarantined": 1, "used_bytes": 85, "capacity_bytes": 100},
        },
        {"name": "n01-t1", "blocks": 97, "used_bytes": 10, "capacity_bytes": 100, "is_lost": True},
    ]
    status = describe_node(alive_report("n01", targets=targets))
    assert [one.target for one in status.targets] == ["n01-t0", "n01-t1"]
    assert [one.fill_ratio for one in status.targets] == [0.85, None]
    assert status.fill_ratio == 0.85, "of bytes, whatever the slots say"
    assert (status.blocks, status.used_bytes, status.lost_targets) == (5, 85, ["n01-t1"])
    assert render_row(status, "running")[1] == "1 of 2 lost"
    assert render_target("n01", status.targets[0]) == [
        *("n01-t0", "n01", "serving", "5", "85 B", "100 B", "85 %", "1"),
    ]
    assert render_target("n01", status.targets[1])[2:5] == ["lost", "0", "0 B"]


def test_fill_is_what_the_worker_acts_on_where_it_says_so() -> None:
    cluster_map = make_map(1, 1, 0)
    usage = {"n01-t0": {"fraction": 0.9, "decided_by": "file_system"}}
    workers = describe_workers(cluster_map, {"n01": {"worker": {"usage": usage}}})
    target = {"name": "n01-t0", "used_bytes": 10, "capacity_bytes": 100}
    status = describe_cluster(cluster_map, [alive_report("n01", targets=[target])])
    assert status.nodes[0].fill_ratio == 0.1
    told = status.with_usage(workers)
    assert told.nodes[0].fill_ratio == 0.9
    said = render_json(told, workers)["nodes"][0]["targets"][0]
    assert (said["fill_ratio"], said["decided_by"]) == (0.9, "file_system")


def test_lost_target_counts_as_one_on_a_node_that_is_down() -> None:
    cluster_map = make_map(6, 4, 2)
    lost = [{"name": "n03-t0", "blocks": 97, "is_lost": True}]
    reports = [
        alive_report(node.name, **({"targets": lost} if node.name == "n03" else {}))
        for node in cluster_map.nodes
    ]
    status = describe_cluster(cluster_map, reports)
    assert summarise(status) == (
        "6 of 6 nodes alive, 1 target lost, code 4+2: 1 more may fail before blocks are unreadable"
    )
    assert status.lost_targets == ["n03-t0"]
    assert status.silent_targets == {"n03-t0"}
    assert render_row(status.nodes[2], "running")[1:5:3] == ["lost", "0"]


def test_fill_is_unknown_where_nothing_says_it() -> None:
    status = describe_node(alive_report("n01", targets=[{"name": "n01-t0", "slots_used": 3}]))
    assert status.fill_ratio is None
    assert render_row(status, "running")[7] == "-"


def test_targets_are_silent_that_are_lost_or_on_a_node_that_is_down() -> None:
    lost = [{"name": "n02-t0", "is_lost": True}]
    reports = [dead_report("n01"), alive_report("n02", targets=lost), alive_report("n03")]
    status = describe_cluster(make_map(3, 2, 1), reports)
    assert status.alive == {"n02", "n03"}
    assert status.silent_targets == {"n01-t0", "n02-t0"}


def test_policy_line_names_the_nodes_that_are_behind() -> None:
    cluster_map = make_map(3, 2, 1)
    reports = [
        alive_report("n01", policy_version=4),
        alive_report("n02", policy_version=3),
        alive_report("n03", policy_version=4, draining=True),
    ]
    status = describe_cluster(cluster_map, reports)
    assert describe_policy(status) == "policy: version 4, older on n02"
    assert render_row(status.nodes[2], "running")[1] == "draining"
    silent = describe_cluster(cluster_map, [dead_report("n01")] * 3)
    assert describe_policy(silent) == "policy: no node says which it has"
