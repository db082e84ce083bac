"""What /metrics says: names, kinds, labels and figures, and that documents know all of them."""

import math
import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gc_worker.counters import WorkerCounters
from kvstore.admin.control.metric_readers import MetricSources
from kvstore.admin.control.metric_table import METRICS
from kvstore.admin.control.metrics import render_metrics
from kvstore.metrics.readings import LABEL_VALUES_MAX, OTHERS
from kvstore.node.node import NodeCounters
from kvstore.node.statistics import TargetStatistics
from kvstore.retention import DEFAULT_POLICY
from tests.architecture.source_tree import ROOT

HISTOGRAM = {"bounds_s": [0.001, 0.01], "counts": [3, 2, 1], "sum_s": 0.5}
TARGET = {
    "name": "n01-t0",
    "blocks": 7,
    "used_bytes": 700,
    "capacity_bytes": 1000,
    "slots_used": 7,
    "slots_total": 10,
    "is_lost": False,
    "classes": {"chat": {"blocks": 4, "bytes": 400}, "agent": {"blocks": 3, "bytes": 300}},
    "evicted": {"expired": 5, "least_used": 6},
    "evicted_bytes": 1100,
    "evicted_age": HISTOGRAM,
    "misses_by_reason": {"never_stored": 8, "expired": 1},
    "hits_by_class": {"chat": 40},
}
STAT = {
    "node": "n01",
    "version": "0.1.0",
    "cluster": "ab" * 16,
    "uptime_s": 12.5,
    "draining": True,
    "latency": {"read": HISTOGRAM},
    "client_latency": {"decode": HISTOGRAM},
    "namespaces": {
        "m1": {
            "matched_tokens": 1280,
            "hit_tokens": 1152,
            "miss_tokens": {"not_stored": 256, "deadline": 128},
        }
    },
    "targets": [TARGET],
}
SOURCES = MetricSources(
    node="n01",
    node_stat=STAT,
    policy=DEFAULT_POLICY.to_values(),
    worker={"uptime_s": 4, "rate_factor": 0.5, "clock_is_settling": True},
    counters={"clock_jumps": 2, "evicted": {"orphaned": 9}},
    usage={
        "n01-t0": {
            "fraction": 0.75,
            "limits": {"slots": {"used": 7, "room": 3}, "file_system": {"used": 3, "room": 1}},
        }
    },
    backlog={"repair_blocks": 4},
    reports={
        "redundancy": {
            "blocks_by_shards": [0, 2, 30, 70],
            "k": 2,
            "width": 3,
            "started_at_s": 900,
            "duration_s": 40.0,
        },
        "scrub": {"targets": {"n01-t0": {"started_at_s": 700, "last_pass_s": 50}}},
    },
    shards_per_fetch=5,
    now_s=1000,
)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(sources: MetricSources) -> Samples:
    """Read the exposition as Prometheus would."""
    found: Samples = {}
    for family in text_string_to_metric_families(render_metrics(sources).decode()):
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"cachalot_{name}", frozenset({"node": "n01", **labels}.items())]


def documented() -> dict[str, tuple[str, str, str]]:
    """Kind, labels and unit of each metric that docs/metrics.md lists in a table."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(cachalot_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \| [^|]+ \|$", text, re.MULTILINE
    )
    assert len(rows) == len({row[0] for row in rows}), "a metric is listed twice"
    return {row[0]: (row[1], row[2].strip(), row[3].strip()) for row in rows}


def test_every_metric_is_documented_and_every_documented_one_exists() -> None:
    expected = {
        metric.name: (
            metric.kind,
            ", ".join(f"`{label}`" for label in metric.labels) or "-",
            metric.unit,
        )
        for metric in METRICS
    }
    others = ("cachalot_agent_", "cachalot_engine_")
    of_nodes = {name: row for name, row in documented().items() if not name.startswith(others)}
    assert of_nodes == expected


def test_names_are_unique_and_end_in_their_unit() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        stem = metric.name.removesuffix("_total")
        if metric.unit in ("seconds", "bytes"):
            assert stem.endswith(f"_{metric.unit}"), metric.name
        assert set(metric.labels).isdisjoint({"node", "le", "job", "instance"}), metric.name


@pytest.mark.parametrize(
    ("counters", "prefix"),
    [(NodeCounters, ""), (TargetStatistics, ""), (WorkerCounters, "worker_")],
)
def test_every_number_that_the_code_counts_is_a_metric(counters: type, prefix: str) -> None:
    # Named differently because they are only a part of their word's meaning, or have labels.
    renamed = {"misses": "read_misses"}
    names = {metric.name for metric in METRICS}
    for one in fields(counters):
        if one.type in ("int", int, "Counter[str]"):
            expected = f"cachalot_{prefix}{renamed.get(one.name, one.name)}_total"
            assert expected in names, one.name


def test_figures_arrive_with_their_labels() -> None:
    found = scrape(SOURCES)
    assert value(found, "up") == 1
    assert value(found, "node_info", version="0.1.0", cluster="ab" * 16) == 1
    assert value(found, "draining") == 1
    assert value(found, "blocks", target="n01-t0") == 7
    assert value(found, "class_bytes", target="n01-t0", **{"class": "agent"}) == 300
    assert value(found, "evicted_shards_total", target="n01-t0", reason="least_used") == 6
    assert value(found, "missed_keys_total", target="n01-t0", reason="expired") == 1
    of_chat = {"target": "n01-t0", "class": "chat"}
    assert value(found, "class_hit_shards_total", **of_chat) == 40
    assert value(found, "class_hit_tokens_total", **of_chat) == 40 * 128 / 5
    assert value(found, "hit_tokens_total", namespace="m1") == 1152
    assert value(found, "miss_tokens_total", namespace="m1", reason="deadline") == 128
    assert value(found, "fill_ratio", target="n01-t0", limit="slots") == 0.7
    assert value(found, "fill_ratio", target="n01-t0", limit="file_system") == 0.75
    assert value(found, "watermark_ratio", level="high") == 0.9
    assert value(found, "ttl_seconds", **{"class": "agent"}) == 259_200
    assert value(found, "redundancy_blocks", shards="2") == 30
    assert value(found, "health_blocks", health="whole") == 70
    assert value(found, "health_blocks", health="reduced") == 30
    assert value(found, "health_blocks", health="unreadable") == 2
    assert value(found, "redundancy_age_seconds") == 60
    assert value(found, "scrub_pass_age_seconds", target="n01-t0") == 300
    assert value(found, "scrub_pass_duration_seconds", target="n01-t0") == 50
    assert value(found, "backlog", kind="repair_blocks") == 4
    assert value(found, "worker_uptime_seconds") == 4
    assert value(found, "worker_rate_factor") == 0.5
    assert value(found, "clock_settling") == 1
    assert value(found, "worker_evicted_total", reason="orphaned") == 9
    assert value(found, "worker_clock_jumps_total") == 2


def test_histogram_is_cumulative_and_ends_at_infinity() -> None:
    found = scrape(SOURCES)
    buckets = [
        value(found, "operation_latency_seconds_bucket", op="read", le=bound)
        for bound in ("0.001", "0.01", "+Inf")
    ]
    assert buckets == [3, 5, 6]
    assert value(found, "operation_latency_seconds_count", op="read") == 6
    assert value(found, "operation_latency_seconds_sum", op="read") == 0.5
    assert value(found, "client_latency_seconds_count", stage="decode") == 6
    assert value(found, "evicted_age_seconds_count", target="n01-t0") == 6


def test_node_that_does_not_answer_is_down_and_its_worker_still_speaks() -> None:
    silent = MetricSources(node="n01", node_stat=None, counters={"scans": 3})
    found = scrape(silent)
    assert value(found, "up") == 0
    assert value(found, "worker_scans_total") == 3
    assert not [name for name, _ in found if name.startswith("cachalot_blocks")]


def test_figure_that_is_missing_gives_no_sample_rather_than_a_zero() -> None:
    found = scrape(MetricSources(node="n01", node_stat={"targets": [{"name": "t", "blocks": 1}]}))
    assert value(found, "blocks", target="t") == 1
    assert "cachalot_used_bytes" not in {name for name, _ in found}


@pytest.mark.parametrize("strange", [math.nan, math.inf, -1, "7", None, [1], {"a": 1}])
def test_strange_figure_gives_no_sample(strange: object) -> None:
    stat = {"uptime_s": strange, "targets": [{"name": "t", "blocks": strange}]}
    names = {name for name, _ in scrape(MetricSources(node="n01", node_stat=stat))}
    assert names.isdisjoint({"cachalot_uptime_seconds", "cachalot_blocks"})


@pytest.mark.parametrize(
    "strange",
    [
        {"bounds_s": [1.0], "counts": [1], "sum_s": 1.0},
        {"bounds_s": [2.0, 1.0], "counts": [1, 1, 1], "sum_s": 1.0},
        {"bounds_s": [1.0], "counts": [1, -1], "sum_s": 1.0},
        {"bounds_s": "12", "counts": [1, 1, 1], "sum_s": 1.0},
        [],
    ],
)
def test_strange_histogram_gives_no_sample(strange: object) -> None:
    found = scrape(MetricSources(node="n01", node_stat={"latency": {"read": strange}}))
    assert not [name for name, _ in found if name.startswith("cachalot_operation_latency")]


def test_labels_from_outside_are_bounded_and_no_figure_is_lost() -> None:
    count = LABEL_VALUES_MAX + 50
    namespaces = {f"ns{number}": {"hit_tokens": number} for number in range(count)}
    found = scrape(MetricSources(node="n01", node_stat={"namespaces": namespaces}))
    hits = {labels: number for (name, labels), number in found.items() if "hit_tokens" in name}
    assert len(hits) == LABEL_VALUES_MAX + 1
    assert sum(hits.values()) == sum(range(count))
    assert value(found, "hit_tokens_total", namespace=OTHERS) == sum(range(50))
    assert value(found, "hit_tokens_total", namespace=f"ns{count - 1}") == count - 1


def test_hostile_label_cannot_add_lines() -> None:
    name = 'x"} 1\ncachalot_up{node="n02"} 1\n' + "y" * 500
    found = scrape(MetricSources(node="n01", node_stat={"namespaces": {name: {"hit_tokens": 5}}}))
    (labels,) = [labels for metric, labels in found if metric == "cachalot_hit_tokens_total"]
    assert dict(labels)["namespace"] == name[:64]
    assert ("cachalot_up", frozenset({("node", "n02")})) not in found


MORE_NAMES = ("bounds_s", "counts", "sum_s", "blocks_by_shards", "k", "width", "started_at_s")
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from([*STAT, *TARGET, *MORE_NAMES]),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@given(
    st.none() | st.dictionaries(st.sampled_from(list(STAT)), anything, max_size=8),
    st.dictionaries(st.sampled_from(["redundancy", "scrub"]), anything, max_size=2),
)
def test_whatever_a_node_says_is_rendered_or_left_out(
    stat: dict[str, Any] | None, reports: dict[str, Any]
) -> None:
    sources = MetricSources(
        node="n01", node_stat=stat, policy=stat or {}, counters=stat or {}, reports=reports
    )
    found = scrape(sources)
    assert value(found, "up") == float(stat is not None)
    assert all(math.isfinite(number) and number >= 0 for number in found.values())
