"""The dashboard and the alert rules speak of metrics that exist, in expressions that are right."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from engine.worker.metric_table import ENGINE_METRICS
from kvstore.admin.agent_metric_table import AGENT_METRICS
from kvstore.admin.control.metric_table import METRICS
from kvstore.metrics.readings import MetricHead
from tests.architecture.source_tree import ROOT
from tests.architecture.test_docs import find_anchors
from tests.kvstore.admin.promql import KnownMetric, PromqlError, find_mistakes, parse

GRAFANA = ROOT / "deploy" / "grafana" / "cachalot.json"
PROMETHEUS = ROOT / "deploy" / "prometheus"
GRID_COLUMNS = 24

DASHBOARD: dict[str, Any] = json.loads(GRAFANA.read_text(encoding="utf-8"))
ALERTS: dict[str, Any] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]


def known_series() -> dict[str, KnownMetric]:
    """Return all time series by name: ours, and the one that Prometheus adds for each scrape."""
    found = {"up": KnownMetric("gauge", frozenset())}
    every: tuple[MetricHead, ...] = (*METRICS, *AGENT_METRICS, *ENGINE_METRICS)
    for metric in every:
        labels = frozenset(metric.labels)
        labels |= {"agent"} if metric in AGENT_METRICS else set()
        labels |= {"engine"} if metric in ENGINE_METRICS else set()
        if metric.kind != "histogram":
            found[metric.name] = KnownMetric(metric.kind, labels)
            continue
        for part in ("bucket", "sum", "count"):
            more = {"le"} if part == "bucket" else set()
            found[f"{metric.name}_{part}"] = KnownMetric("counter", labels | more)
    return found


SERIES = known_series()


def expand(expression: str) -> str:
    """Put a value in place of Grafana's variables, as Grafana does before it asks Prometheus."""
    return (
        expression.replace("$__rate_interval", "5m")
        .replace("$node", ".*")
        .replace("$namespace", ".*")
    )


def panel_expressions() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def expressions() -> list[tuple[str, str]]:
    annotations = [(one["name"], one["expr"]) for one in DASHBOARD["annotations"]["list"]]
    rules = [(rule["alert"], rule["expr"]) for rule in RULES]
    return [*panel_expressions(), *annotations, *rules]


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_expression_is_right_and_speaks_of_what_exists(where: str, expression: str) -> None:
    assert find_mistakes(parse(expand(expression)), SERIES) == [], where


@pytest.mark.parametrize(
    ("expression", "mistake"),
    [
        ("cachalot_upp == 0", "no metric cachalot_upp"),
        ('cachalot_up{nodes="a"} == 0', "no label nodes"),
        ("sum by (reason) (rate(cachalot_hit_tokens_total[5m]))", "no label reason"),
        ("sum(cachalot_hit_tokens_total)", "is a counter, under sum"),
        ("rate(cachalot_up[5m])", "is a gauge, under rate"),
        ("rate(cachalot_hit_tokens_total)", "a range belongs"),
        (
            "histogram_quantile(0.9, sum by (op) (rate("
            "cachalot_operation_latency_seconds_bucket[5m])))",
            "without le",
        ),
    ],
)
def test_mistake_is_found_when_planted(expression: str, mistake: str) -> None:
    (found,) = find_mistakes(parse(expression), SERIES)
    assert mistake in found


@pytest.mark.parametrize(
    "text",
    ["", "sum(", "cachalot_up ==", "a b", "rate(a[5m)", "a{b}", "f(1, 2", "a[5]", "sum(a, b)"],
)
def test_broken_expression_is_refused(text: str) -> None:
    with pytest.raises(PromqlError):
        parse(text)


def test_dashboard_has_what_grafana_needs_of_every_panel() -> None:
    assert DASHBOARD["schemaVersion"] >= 39
    assert DASHBOARD["uid"] == "cachalot"
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"]
        if panel["type"] not in ("row", "text"):
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            refs = [target["refId"] for target in panel["targets"]]
            assert refs
            assert len(set(refs)) == len(refs)
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_panels_lie_within_the_grid_and_do_not_overlap() -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in DASHBOARD["panels"]]
    for title, place in places:
        assert place["x"] >= 0, title
        assert place["x"] + place["w"] <= GRID_COLUMNS, title
    for (title, one), (other_title, other) in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_above, (title, other_title)


def test_variables_that_are_used_are_defined() -> None:
    names = {one["name"] for one in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", GRAFANA.read_text(encoding="utf-8")))
    assert used - names == {"__rate_interval", "__all"}
    for one in DASHBOARD["templating"]["list"]:
        if one["type"] == "query":
            metric, label = re.fullmatch(
                r"label_values\((\w+), (\w+)\)", one["query"]["query"]
            ).groups()  # type: ignore[union-attr]
            assert metric in SERIES
            assert label in SERIES[metric].labels | {"node"}


def test_dashboard_answers_why_the_hit_rate_fell() -> None:
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    first = titles.index("Why did my hit rate fall?")
    after = next(panel for panel in DASHBOARD["panels"][first + 1 :] if panel["type"] == "row")
    panels = DASHBOARD["panels"][first : DASHBOARD["panels"].index(after)]
    asked = " ".join(target["expr"] for panel in panels for target in panel.get("targets", ()))
    for metric in (
        "cachalot_hit_tokens_total",
        "cachalot_miss_tokens_total",
        "cachalot_missed_keys_total",
        "cachalot_evicted_shards_total",
        "cachalot_evicted_age_seconds_bucket",
        "cachalot_fill_ratio",
        "cachalot_watermark_ratio",
        "cachalot_ttl_seconds",
        "cachalot_policy_version",
        "cachalot_up",
    ):
        assert metric in asked, metric


def test_alert_says_what_is_wrong_how_bad_it_is_and_what_to_do() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule["alert"].startswith("Cachalot")
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_alert_has_a_runbook(rule: dict[str, Any]) -> None:
    path, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor == rule["alert"].lower()
    assert anchor in find_anchors((ROOT / path).read_text(encoding="utf-8"))


def test_example_configuration_loads_the_rules_and_sends_the_token() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    assert config["rule_files"] == ["alerts.yml"]
    scrape, *others = config["scrape_configs"]
    assert scrape["job_name"] == "cachalot"
    assert [one["job_name"] for one in others] == ["cachalot-agents", "cachalot-engines"]
    assert all("authorization" not in one for one in others)
    assert scrape["authorization"]["type"] == "Bearer"
    # Rates need two scrapes in their shortest range.
    assert config["global"]["scrape_interval"] == "15s"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Prometheus) is missing")
@pytest.mark.parametrize(
    "words", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")]
)
def test_prometheus_itself_agrees(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *words],
        cwd=PROMETHEUS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
