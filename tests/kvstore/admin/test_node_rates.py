"""From two answers of each node to what happened in between."""

from typing import Any

import pytest

from kvstore.admin.cluster_status import describe_cluster
from kvstore.admin.local_plan import LocalShape, plan_local_map
from kvstore.admin.node_rates import add_up_rates, rate_between, total_of
from kvstore.admin.quantities import make_code
from kvstore.admin.top_view import (
    COLUMNS,
    Look,
    compare_looks,
    render_json,
    render_lines,
    render_rows,
)
from kvstore.admin.worker_status import describe_workers
from kvstore.client import NodeReport


def report(node: str, *, pid: int = 7, **figures: object) -> NodeReport:
    target: dict[str, Any] = {"name": f"{node}-t0", "blocks": 5, **figures}
    said = {"pid": pid, "uptime_s": 3.0, "targets": [target]}
    return NodeReport(node=node, address="x:1", is_alive=True, statistics=said)


def dead(node: str) -> NodeReport:
    return NodeReport(node=node, address="x:1", is_alive=False, problem="refused")


def test_rates_are_differences_over_time() -> None:
    before = total_of(report("n01", match_keys=100, match_hits=50, read_bytes=0, evicted={}))
    after = total_of(
        report(
            "n01",
            match_keys=300,
            match_hits=200,
            read_bytes=4_000,
            shards_read=8,
            evicted={"expired": 6, "least_used": 4},
        )
    )
    rates = rate_between(before, after, 2.0)
    assert rates is not None
    assert (rates.match_keys_per_s, rates.match_hit_ratio) == (100.0, 0.75)
    assert (rates.read_bytes_per_s, rates.shards_read_per_s) == (2_000.0, 4.0)
    assert rates.evicted_per_s == 5.0


def test_hit_ratio_is_unknown_when_nothing_was_asked() -> None:
    same = total_of(report("n01", match_keys=5))
    rates = rate_between(same, same, 1.0)
    assert rates is not None
    assert rates.match_hit_ratio is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (report("n01", reads=5), dead("n01")),
        (dead("n01"), report("n01")),
        (report("n01", shards_read=5), report("n01", shards_read=4)),
        (report("n01"), report("n01", pid=8, shards_read=900)),
    ],
    ids=["died", "came", "fell", "restarted"],
)
def test_there_is_no_rate_across_a_restart(before: NodeReport, after: NodeReport) -> None:
    assert rate_between(total_of(before), total_of(after), 1.0) is None


@pytest.mark.parametrize("figure", [-1, True, "5", 2**70, None, 1.5])
def test_strange_figures_count_as_nothing(figure: object) -> None:
    found = total_of(report("n01", shards_read=figure, evicted={"expired": figure}))
    assert found is not None
    assert (found.shards_read, found.evicted) == (0, 0)


@pytest.mark.parametrize("said", [{}, {"targets": 5}, {"targets": [1]}])
def test_answer_that_is_not_understood_has_no_totals(said: dict[str, Any]) -> None:
    assert total_of(NodeReport(node="n", address="x", is_alive=True, statistics=said)) is None


def test_sum_counts_only_nodes_that_have_a_rate() -> None:
    pairs = [
        (total_of(report("n01")), total_of(report("n01", shards_read=10))),
        (total_of(report("n02", shards_read=50)), total_of(report("n02", shards_read=10))),
        (None, total_of(report("n03", shards_read=99))),
    ]
    total = add_up_rates(pairs, 1.0)
    assert total is not None
    assert total.shards_read_per_s == 10.0
    assert add_up_rates(pairs[1:], 1.0) is None


def test_frame_has_a_row_for_each_node_and_one_for_all() -> None:
    shape = LocalShape(nodes=3, code=make_code("code", 2, 1), target_size_bytes=1 << 30)
    cluster_map = plan_local_map(shape, cluster="ab" * 16, ports=[1, 2, 3])

    def look(at_s: float, reports: list[NodeReport]) -> Look:
        return Look(
            at_s=at_s,
            reports=reports,
            status=describe_cluster(cluster_map, reports),
            workers=describe_workers(cluster_map, {}),
        )

    frame = compare_looks(
        look(10.0, [report("n01"), report("n02"), dead("n03")]),
        look(
            12.0,
            [
                report("n01", read_bytes=8 << 20, used_bytes=3, capacity_bytes=4),
                dead("n02"),
                report("n03"),
            ],
        ),
    )
    rows = render_rows(frame)
    assert [row[:3] for row in rows] == [
        ["n01", "alive", "75 %"],
        ["n02", "down", "-"],
        ["n03", "alive", "-"],
        ["all", "", ""],
    ]
    assert all(len(row) == len(COLUMNS) for row in rows)
    read = COLUMNS.index("read/s")
    assert [row[read] for row in rows] == ["4.0 MiB", "-", "-", "4.0 MiB"]
    assert [row[-1] for row in rows] == ["no address"] * 3 + [""]
    assert render_lines(frame)[0] == "redundancy: not counted yet"
    values = render_json(frame)
    assert values["elapsed_s"] == 2.0
    assert [node["rates"] is None for node in values["nodes"]] == [False, True, True]
