"""Which workers run, and the redundancy of all blocks from what each of them counted."""

import asyncio
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.admin.control_client import ControlRefused, ControlUnreachable
from kvstore.admin.local_plan import LocalShape, plan_local_map
from kvstore.admin.quantities import make_code
from kvstore.admin.redundancy_health import Redundancy, add_up_redundancy, parse_redundancy
from kvstore.admin.worker_status import (
    TargetUsage,
    WorkerState,
    ask_workers,
    describe_relayed,
    describe_workers,
    parse_usage,
    parse_workers,
    render_workers,
)
from kvstore.cluster.entities import ClusterMap
from kvstore.errors import StoreError
from tests.kvstore.admin.test_control_client import peer
from tests.patience import PATIENCE_S, WELL_BEFORE_S

K, M = 4, 2


def make_map() -> ClusterMap:
    shape = LocalShape(nodes=6, code=make_code("code", K, M), target_size_bytes=1 << 30)
    return plan_local_map(shape, cluster="ab" * 16, ports=range(1, 7))


def answer(blocks_by_shards: list[int], **more: object) -> dict[str, Any]:
    report = {"blocks_by_shards": blocks_by_shards, "started_at_s": 100, "duration_s": 5.0, **more}
    return {"at_s": 165, "redundancy": report}


def test_silent_workers_are_given_up_when_the_command_is_interrupted(
    tmp_path: Path,
) -> None:
    is_over = threading.Event()

    def hold(connection: socket.socket) -> None:
        is_over.wait(PATIENCE_S)

    async def interrupted(port: int, is_asked: threading.Event) -> None:
        shape = LocalShape(nodes=1, code=make_code("code", 1, 0), target_size_bytes=1 << 30)
        one = plan_local_map(shape, cluster="ab" * 16, ports=[1], control_ports=[port])
        asking = asyncio.create_task(ask_workers(one, tmp_path / "cluster.toml", None, PATIENCE_S))
        while not is_asked.is_set():
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait([asking], timeout=WELL_BEFORE_S)
        assert asking.cancelled()

    with peer(hold) as silent:
        is_asked = threading.Event()
        silent.on_request = is_asked.set
        started_s = time.monotonic()
        asyncio.run(interrupted(int(silent.address.rpartition(":")[2]), is_asked))
        # The loop has waited for its threads.
        assert time.monotonic() - started_s < WELL_BEFORE_S
        is_over.set()


def test_counts_of_all_workers_are_added_up() -> None:
    answers = {
        "n01": answer([0, 1, 0, 0, 2, 3, 40], backlog=3),
        "n02": answer([0, 0, 0, 5, 0, 0, 60], started_at_s=40),
    }
    found = describe_workers(make_map(), answers).redundancy
    assert found.by_shards == {6: 100, 5: 3, 4: 2}
    assert (found.unreadable, found.backlog) == (6, 3)
    assert (found.nodes_counted, found.nodes_total, found.age_s) == (2, 6, 120.0)
    assert found.describe() == (
        "redundancy: 100 blocks with all 6 shards, 3 with 5, 2 with 4, 6 with fewer (unreadable);"
        " 3 wait for repair; counted by 2 of 6 nodes, not by n03, n04, n05, n06;"
        " as of up to 2 min ago"
    )


ALL_NODES = frozenset(f"n0{number}" for number in range(1, 7))


def test_count_of_a_node_that_is_down_is_left_out_as_others_count_its_blocks() -> None:
    answers = {
        # The worker of a node that was killed goes on to tell what it counted last.
        "n01": answer([0, 0, 0, 0, 0, 0, 9], silent_targets=[]),
        "n02": answer([0, 0, 0, 0, 0, 9, 0], silent_targets=["n01-t0"]),
    }
    found = describe_workers(make_map(), answers)
    assert found.redundancy.blocks == 18
    seen = found.seen_beside(ALL_NODES - {"n01"}, frozenset({"n01-t0"})).redundancy
    assert (seen.by_shards, seen.unreadable) == ({6: 0, 5: 9, 4: 0}, 0)
    assert seen.describe().startswith("redundancy: 0 blocks with all 6 shards, 9 with 5, ")
    assert "; counted by 1 of 6 nodes, not by n01, n03, n04, n05, n06; " in seen.describe()
    assert seen.describe().endswith(" ago"), "all of it is of the nodes as they are"
    assert seen.render_json()["nodes_uncounted"] == ["n01", "n03", "n04", "n05", "n06"]
    assert found.count_age_s("n01") == 60.0


def test_count_of_other_targets_than_answer_now_is_marked() -> None:
    answers = {
        "n01": answer([0, 0, 0, 0, 0, 0, 9], silent_targets=[]),
        # It counted while three nodes were down, which are back.
        "n02": answer([0, 0, 0, 9], silent_targets=["n04-t0", "n05-t0", "n06-t0"]),
        "n03": answer([0, 0, 0, 0, 0, 0, 9]),
    }
    found = describe_workers(make_map(), answers)
    assert found.redundancy.outdated == (), "nobody has looked"
    seen = found.seen_beside(ALL_NODES, frozenset()).redundancy
    assert seen.unreadable == 9
    assert seen.describe().endswith(" ago; counted before nodes came or went: n02")
    assert seen.render_json()["nodes_outdated"] == ["n02"], "of n03 it is not known"
    gone = found.seen_beside(ALL_NODES - {"n06"}, frozenset({"n06-t0"})).redundancy
    assert gone.outdated == ("n01", "n02")


def test_many_nodes_without_a_count_are_not_all_named() -> None:
    nodes = [f"n{number:02}" for number in range(1, 21)]
    count = Redundancy(by_shards={6: 1})
    line = add_up_redundancy({"n01": count}, k=K, m=M, nodes=nodes).describe()
    assert line.endswith(", not by n02, n03, n04, n05, n06, n07, n08, n09 and 11 more")


def test_without_any_count_nothing_is_said_to_be_whole() -> None:
    found = describe_workers(make_map(), {"n01": {"redundancy": None}})
    assert found.redundancy.describe() == "redundancy: not counted yet"
    assert found.state_of("n01") is WorkerState.RUNNING


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        {},
        {"blocks_by_shards": "x"},
        {"blocks_by_shards": {"6": 1}},
        {"blocks_by_shards": [0, -1]},
        {"blocks_by_shards": [0, 1.5]},
        {"blocks_by_shards": [0, True]},
        {"blocks_by_shards": [0] * 1000},
    ],
)
def test_report_that_is_not_understood_is_no_count(said: object) -> None:
    assert parse_redundancy(said, now_s=1) is None


@pytest.mark.parametrize("now_s", [None, "x", float("inf"), float("nan"), True])
def test_age_is_unknown_when_times_are_strange(now_s: object) -> None:
    found = parse_redundancy({"blocks_by_shards": [0, 1], "started_at_s": 3}, now_s=now_s)
    assert found is not None
    assert found.age_s is None


@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=12), max_size=5))
def test_no_block_is_lost_in_the_sum(counts: list[list[int]]) -> None:
    parsed = [parse_redundancy({"blocks_by_shards": one}) for one in counts]
    by_node = {f"n{number}": one for number, one in enumerate(parsed) if one}
    found = add_up_redundancy(by_node, k=K, m=M, nodes=[f"n{number}" for number in range(9)])
    assert sum(found.by_shards.values()) + found.unreadable == sum(sum(one[1:]) for one in counts)


def test_state_of_each_worker_follows_from_what_happened() -> None:
    answers: dict[str, dict[str, Any] | StoreError] = {
        "n01": answer([0]),
        "n02": ControlUnreachable("n02", "x:1", "Connection refused", is_sent=False),
        "n03": ControlUnreachable("n03", "x:1", "no answer in time", is_sent=True),
        "n04": ControlRefused("n04", 401, {}),
        "n05": ControlRefused("n05", 503, {"error": "stopping"}),
    }
    found = describe_workers(make_map(), answers)
    assert [found.state_of(f"n0{number}").value for number in range(1, 7)] == [
        *("running", "not running", "no answer", "no access", "no answer", "no address"),
    ]
    assert found.describe() == (
        "gc_worker: no control address in the map for n06, so they cannot be asked;"
        " not running on n02 (no eviction, repair or scrub there);"
        " they answer on n04, and give no access to more;"
        " no answer in time from n03, n05 (just started, or busy)"
    )


def test_missing_token_is_told_from_a_missing_worker() -> None:
    found = describe_workers(make_map(), {"n01": {"is_serving": True}}, remark="no token file")
    assert found.state_of("n01") is WorkerState.NO_ACCESS
    assert found.state_of("n02") is WorkerState.NO_ADDRESS


def test_workers_without_access_are_not_said_to_run() -> None:
    answers = {node.name: {"is_serving": True} for node in make_map().nodes}
    found = describe_workers(make_map(), answers, remark="no token file")
    assert found.describe() == "gc_worker: they answer on all nodes, and give no access to more"


@pytest.mark.parametrize(
    ("answer_of_one", "said"),
    [
        (
            ControlUnreachable("h:9", "h:9", "Connection refused", is_sent=False),
            ", as the control API at h:9 (--control) does not answer: Connection refused",
        ),
        (
            ControlRefused("h:9", 404, {}),
            ", as the control API at h:9 (--control) does not answer as one: HTTP status 404",
        ),
        (ControlRefused("h:9", 401, {}), ""),
    ],
)
def test_workers_are_not_asked_where_the_one_that_tells_of_them_does_not(
    answer_of_one: StoreError, said: str
) -> None:
    found = describe_relayed(make_map(), "h:9", answer_of_one)
    assert found.nodes_in(WorkerState.NOT_ASKED) == [node.name for node in make_map().nodes]
    assert found.describe() == f"gc_worker: not asked{said}"
    assert ("refuses the token" in found.remark) == (not said)


def test_line_is_short_when_all_run_or_none() -> None:
    cluster_map = make_map()
    names = [node.name for node in cluster_map.nodes]
    assert describe_workers(cluster_map, {name: {} for name in names}).describe() == (
        "gc_worker: running on all nodes"
    )
    refused = {name: ControlUnreachable(name, "x:1", "no", is_sent=False) for name in names}
    assert describe_workers(cluster_map, refused).describe() == (
        "gc_worker: not running (no eviction, repair or scrub there)"
    )
    assert describe_workers(cluster_map, {}).describe() == (
        "gc_worker: no control address in the map, so they cannot be asked"
    )


def test_counts_without_any_block_are_no_count_yet() -> None:
    # As after a start: the first passes are over before anything is stored.
    found = describe_workers(make_map(), {"n01": answer([0] * 7), "n02": answer([])})
    assert found.redundancy.describe() == (
        "redundancy: not counted yet (the last counts, up to 1 min ago, found no blocks)"
    )


def test_workers_are_the_same_after_they_were_relayed_by_one_of_them() -> None:
    usage = {"n01-t0": {"fraction": 0.85, "decided_by": "capacity", "limits": {}}}
    answers: dict[str, dict[str, Any] | StoreError] = {
        "n01": answer([0, 1, 0, 0, 2, 3, 40], backlog=3, silent_targets=["n02-t0"])
        | {"worker": {"usage": usage}},
        "n02": ControlUnreachable("n02", "x:1", "Connection refused", is_sent=False),
        "n03": answer([0, 0, 0]),
    }
    found = describe_workers(make_map(), answers)
    assert found.usage_of("n01")["n01-t0"] == TargetUsage(fraction=0.85, decided_by="capacity")
    relayed = parse_workers(make_map(), json.loads(json.dumps(render_workers(found))))
    assert relayed.redundancy == found.redundancy
    assert relayed.describe() == found.describe()
    for node in ("n01", "n02", "n03", "n04"):
        assert relayed.state_of(node) is found.state_of(node)
        assert relayed.usage_of(node) == found.usage_of(node)
        assert relayed.count_age_s(node) == found.count_age_s(node)
    for silent in (frozenset({"n02-t0"}), frozenset[str]()):
        assert relayed.seen_beside(ALL_NODES, silent) == found.seen_beside(ALL_NODES, silent)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(["state", "blocks_by_shards", "count_age_s", "silent_targets", "usage"]),
        JSON,
    )
)
def test_anything_that_is_relayed_is_understood_or_left_out(row: dict[str, Any]) -> None:
    found = parse_workers(make_map(), {"workers": [{"node": "n01", **row}, 5, {"node": [1]}]})
    assert len(found.workers) == 6
    assert found.redundancy.describe()


@pytest.mark.parametrize("fraction", [None, -0.1, 1.5, True, "x", float("nan")])
def test_fill_that_cannot_be_is_not_known(fraction: object) -> None:
    assert parse_usage({"t": {"fraction": fraction}}) == {}


def test_shards_beyond_the_code_count_as_whole() -> None:
    count = Redundancy(by_shards={7: 2, 6: 1})
    found = add_up_redundancy({"n01": count}, k=K, m=M, nodes=["n01"])
    assert found.by_shards[6] == 3
