"""The plans of all workers added up, and what a person is told of them."""

from typing import Any

import pytest

from kvstore.admin.control.changes import VerifyBody
from kvstore.admin.control_client import ControlEndpoint, ControlRefused, ControlUnreachable
from kvstore.admin.gc_command import count_evicted
from kvstore.admin.gc_preview import (
    COLUMNS,
    add_up_plans,
    describe_target,
    find_behind,
    format_ages,
    write_preview,
)
from kvstore.admin.verify_command import describe, explain_silence, plan_parts, sum_up
from kvstore.errors import StoreError


def group(shards: int, **changed: object) -> dict[str, Any]:
    values = {"class": "chat", "reason": "expired", "age_min_s": 604_800, "age_max_s": 1_209_600}
    return {**values, "shards": shards, "bytes": shards * 1024} | changed


def plan(node: str, *groups: dict[str, Any], is_cut: bool = False) -> dict[str, Any]:
    shards = sum(one["shards"] for one in groups)
    target = {
        "target": f"{node}-t0",
        "fill": 0.934,
        "decided_by": "file_system",
        "high": 0.9,
        "low": 0.85,
        "shards_held": 1_000,
        "shards": shards,
        "bytes": shards * 1024,
        "is_cut": is_cut,
        "groups": list(groups),
    }
    return {"node": node, "policy_version": 3, "targets": [target]}


def test_groups_of_all_nodes_are_added_up_by_class_reason_and_age() -> None:
    agent = group(5, **{"class": "agent", "reason": "least_used", "age_min_s": 0, "age_max_s": 600})
    found = add_up_plans(
        {"n01": plan("n01", group(10), agent), "n02": plan("n02", group(7)), "n03": plan("n03")}
    )
    assert (found.shards, found.bytes) == (22, 22 * 1024)
    assert found.rows() == [
        ["agent", "least used", "up to 10 min ago", "5", "5.0 KiB"],
        ["chat", "expired", "7 d to 14 d ago", "17", "17.0 KiB"],
    ]
    assert len(found.rows()[0]) == len(COLUMNS)
    assert found.describe() == "22 shards (22.0 KiB) would go from 2 nodes"
    values = found.render_json()
    assert values["shards"] == sum(one["shards"] for one in values["groups"])
    assert set(values["plans"]) == {"n01", "n02", "n03"}


def test_oldest_go_first_in_the_table() -> None:
    ages = [(0, 600), (604_800, None), (3_600, 86_400)]
    groups = [group(1, age_min_s=least, age_max_s=most) for least, most in ages]
    found = add_up_plans({"n01": plan("n01", *groups)})
    assert [row[2] for row in found.rows()] == [
        "more than 7 d ago",
        "1 h to 1 d ago",
        "up to 10 min ago",
    ]
    assert format_ages(0, None) == "more than 0 s ago"


def test_cut_plan_says_that_there_is_more() -> None:
    found = add_up_plans({"n01": plan("n01", group(9), is_cut=True)})
    assert found.describe().endswith("and more after that")


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"targets": None},
        {"targets": [1]},
        {"targets": [{"groups": [{}]}]},
        {"targets": [{"groups": [group(-1)]}]},
        {"targets": [{"groups": [group(1, bytes="x")]}]},
        {"targets": [{"groups": [group(1, age_max_s=float("nan"))]}]},
    ],
)
def test_plan_that_is_not_understood_is_a_problem_and_no_sum(answer: dict[str, Any]) -> None:
    found = add_up_plans({"n01": answer, "n02": plan("n02", group(2))})
    assert found.shards == 2
    assert found.problems == {"n01": "node n01: its plan is not understood"}


def test_worker_that_plans_by_an_older_policy_is_found() -> None:
    found = add_up_plans({"n01": plan("n01"), "n02": plan("n02") | {"policy_version": 4}})
    assert find_behind(found, 4) == ["n01"]
    assert find_behind(found, 3) == []


def test_silent_worker_is_named_beside_the_plans_of_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    silent = ControlUnreachable("n02", "x:1", "Connection refused", is_sent=False)
    found = add_up_plans({"n01": plan("n01", group(2)), "n02": silent})
    write_preview(found)
    said = capsys.readouterr()
    assert "chat   expired" in said.out
    assert said.err == "cachalot: node n02: control API at x:1: Connection refused\n"


def test_target_is_shown_against_its_watermarks() -> None:
    (target,) = plan("n01", group(7))["targets"]
    assert describe_target(target) == (
        "n01-t0: 93.4 % full (by file system; high 90 %, low 85 %): 7 of 1,000 shards would go"
    )


def test_evicted_shards_are_counted_by_reason_over_all_nodes() -> None:
    runs: dict[str, dict[str, Any]] = {
        "n01": {"evicted": {"expired": 3, "least_used": 4}},
        "n02": {"evicted": {"expired": 2}},
        "n03": {"evicted": None},
    }
    assert count_evicted(runs) == {"expired": 5, "least_used": 4}


# Verify -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "sample"), [(1, 1), (3, 2), (12, 100), (12, 1_000_000), (1, 1_000_000), (2, 129)]
)
def test_sample_is_shared_out_over_the_nodes_in_one_request_each(nodes: int, sample: int) -> None:
    endpoints = [ControlEndpoint(node=f"n{n:02}", address="x:1") for n in range(nodes)]
    parts = plan_parts(endpoints, sample)
    for part in parts:
        assert VerifyBody(sample=part.sample), "which the API takes"
    assert sum(part.sample for part in parts) == min(sample, 100_000 * nodes)
    assert all(part.sample > 0 for part in parts)
    asked = [part.endpoint.node for part in parts]
    assert len(asked) == len(set(asked)), "two requests would draw the same block twice"
    shares = [part.sample for part in parts] + [0] * (nodes - len(parts))
    assert max(shares) - min(shares) <= 1


def test_verify_adds_up_what_the_workers_found() -> None:
    problem = {"key": "ab" * 32, "shard": 3, "node": "n04", "what": "damaged"}
    answers: list[dict[str, Any] | StoreError] = [
        {
            "asked": 10, "verified": 10, "good": 10, "whole": 9, "bytes": 1 << 20,
            "shards": {"good": 59, "damaged": 1}, "problems": [problem], "is_complete": True,
            "keys": [f"{n:016x}" for n in range(10)],
        },
        {
            "asked": 10, "verified": 4, "good": 3, "whole": 3, "bytes": 1 << 20,
            "shards": {"good": 20, "absent": 4}, "problems": [], "is_complete": False,
            "keys": [f"{n:016x}" for n in range(9, 13)],
        },
        ControlUnreachable("n03", "x:1", "no answer in time", is_sent=True),
    ]  # fmt: skip
    found, silent = sum_up(answers)
    assert (found["asked"], found["verified"], found["whole"]) == (20, 14, 12)
    assert found["problems"] == [problem]
    assert len(silent) == 1
    assert describe(found) == [
        "14 blocks verified (13 distinct, others by several nodes), 2.0 MiB read:"
        " 12 whole, 1 readable but not whole, 1 unreadable",
        "shards that are not good: 4 absent, 1 damaged",
        "not complete: the time was up, and 1 worker did not answer",
    ]


def test_verify_says_which_of_the_two_left_it_incomplete() -> None:
    late, _ = sum_up([{"verified": 1, "is_complete": False}])
    assert describe(late)[-1] == "not complete: the time was up"
    silent = [ControlUnreachable(f"n0{n}", "x:1", "refused", is_sent=False) for n in (1, 2)]
    alone, _ = sum_up([{"verified": 1, "is_complete": True}, *silent])
    assert describe(alone)[-1] == "not complete: 2 workers did not answer"


def test_verify_does_not_say_that_no_worker_answers_where_some_were_not_asked() -> None:
    late = ControlUnreachable("n03", "x:1", "no answer in time", is_sent=True)
    assert explain_silence([late], are_all_asked=False) is late
    assert str(explain_silence([late], are_all_asked=True)).startswith("no gc_worker answers: node")
    refused = ControlRefused("n04", 401, {})
    assert explain_silence([late, refused], are_all_asked=True) is refused


def test_verify_of_an_empty_cluster_says_so() -> None:
    found, _ = sum_up([{"asked": 5, "verified": 0}])
    assert describe(found) == ["no block was found to verify"]
