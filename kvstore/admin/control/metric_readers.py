"""How a metric is read out of what a node and its worker say of themselves. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...layout import BLOCK_TOKENS
from ...metrics.readings import (
    LABEL_VALUES_MAX,
    Reading,
    Sample,
    cut_label,
    distribution_of,
    read_mapping,
    read_number,
    read_numbers,
    sample_of,
    samples_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSources:
    """What the metrics of one node are made from. Field names of the mappings are those of STAT.

    Every mapping may be empty and may lack any field.
    """

    node: str
    node_stat: Mapping[str, Any] | None
    """The STAT answer of the node; None: it did not answer."""
    policy: Mapping[str, Any] = field(default_factory=dict)
    """The policy document that the worker acts on."""
    worker: Mapping[str, Any] = field(default_factory=dict)
    """What the worker says of itself, its counters apart."""
    counters: Mapping[str, Any] = field(default_factory=dict)
    """What the worker has done since it started."""
    usage: Mapping[str, Any] = field(default_factory=dict)
    """How full each target is: name to `fraction`, and `limits` with `used` and `room` of each."""
    backlog: Mapping[str, Any] = field(default_factory=dict)
    """What waits to be done: kind to number."""
    reports: Mapping[str, Any] = field(default_factory=dict)
    """The worker's newest reports by kind: redundancy and scrub."""
    shards_per_fetch: int = 1
    """How many shards of a block a fetch asks for."""
    now_s: float = 0.0
    """Unix time, for the age of reports."""


Reader = Callable[[MetricSources], Iterable[Reading]]


def read_targets(stat: Mapping[str, Any] | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and figures of each target of a STAT answer."""
    targets = read_mapping(stat).get("targets")
    for target in targets if isinstance(targets, list) else []:
        name = read_mapping(target).get("name")
        if isinstance(name, str):
            yield name, target


def node_field(name: str) -> Reader:
    """A figure of the node."""
    return lambda sources: sample_of(read_mapping(sources.node_stat).get(name))


def worker_field(name: str) -> Reader:
    """A figure of the worker as it is now."""
    return lambda sources: sample_of(sources.worker.get(name))


def worker_counter(name: str) -> Reader:
    """A counter of the worker."""
    return lambda sources: sample_of(sources.counters.get(name))


def worker_map(name: str) -> Reader:
    """Counters of the worker, one for each value of a label."""
    return lambda sources: samples_of((), read_mapping(sources.counters.get(name)))


def policy_field(name: str) -> Reader:
    """A figure of the policy document."""
    return lambda sources: sample_of(sources.policy.get(name))


def policy_map(name: str) -> Reader:
    """Figures of the policy document, one for each value of a label."""
    return lambda sources: samples_of((), read_mapping(sources.policy.get(name)))


def read_redundancy(sources: MetricSources) -> Iterator[Reading]:
    """Blocks by the number of shards that were found."""
    for shards, blocks in count_by_shards(sources.reports.get("redundancy")).items():
        yield Sample((str(shards),), blocks)


def read_health(sources: MetricSources) -> Iterator[Reading]:
    """Blocks by whether they are whole, reduced or unreadable."""
    for health, blocks in count_by_health(sources.reports.get("redundancy")).items():
        yield Sample((health,), blocks)


def count_by_health(report: object) -> dict[str, float]:
    """Blocks that are whole, that lack shards, and that cannot be read; nothing if unknown."""
    found = read_mapping(report)
    k, width = read_number(found.get("k")), read_number(found.get("width"))
    if k is None or width is None:
        return {}
    health = {"whole": 0.0, "reduced": 0.0, "unreadable": 0.0}
    for shards, blocks in count_by_shards(report).items():
        kind = "whole" if shards >= width else "reduced" if shards >= k else "unreadable"
        health[kind] += blocks
    return health


def count_by_shards(report: object) -> dict[int, float]:
    """Number of shards to blocks that have so many, from a redundancy report; 0 shards left out."""
    counts = read_numbers(read_mapping(report).get("blocks_by_shards"))
    return dict(list(enumerate(counts or []))[1 : LABEL_VALUES_MAX + 1])


def redundancy_age(sources: MetricSources) -> Iterator[Reading]:
    """Seconds since the count of shards was finished."""
    report = read_mapping(sources.reports.get("redundancy"))
    started_at_s, duration_s = (
        read_number(report.get(name)) for name in ("started_at_s", "duration_s")
    )
    if started_at_s is not None and duration_s is not None:
        yield from _age(sources, started_at_s + duration_s)


def scrub_pass_age(sources: MetricSources) -> Iterator[Reading]:
    """Seconds since the scrub pass of each target began."""
    for target, report in _scrub_targets(sources):
        started_at_s = read_number(read_mapping(report).get("started_at_s"))
        if started_at_s:
            yield from _age(sources, started_at_s, target)


def scrub_pass_duration(sources: MetricSources) -> Iterator[Reading]:
    """Seconds that the last whole scrub of each target took."""
    for target, report in _scrub_targets(sources):
        yield from sample_of(read_mapping(report).get("last_pass_s"), target)


def _scrub_targets(sources: MetricSources) -> Iterator[tuple[str, Any]]:
    yield from read_mapping(read_mapping(sources.reports.get("scrub")).get("targets")).items()


def _age(sources: MetricSources, at_s: float, *labels: str) -> Iterator[Sample]:
    """Seconds since `at_s`; 0 where the clock went back since."""
    return sample_of(max(0.0, sources.now_s - at_s), *labels)


def read_backlog(sources: MetricSources) -> Iterator[Reading]:
    """What waits, by kind."""
    return samples_of((), sources.backlog)


def read_fill(sources: MetricSources) -> Iterator[Reading]:
    """How full each target is by each limit that was read."""
    for target, usage in sources.usage.items():
        for limit, figures in read_mapping(read_mapping(usage).get("limits")).items():
            used = read_number(read_mapping(figures).get("used"))
            room = read_number(read_mapping(figures).get("room"))
            if used is not None and room is not None and used + room > 0:
                yield from sample_of(used / (used + room), target, limit)


def target_field(name: str) -> Reader:
    """A figure of each target."""

    def read(sources: MetricSources) -> Iterator[Reading]:
        for target, figures in read_targets(sources.node_stat):
            yield from sample_of(figures.get(name), target)

    return read


def target_map(name: str, inner: str | None = None) -> Reader:
    """Figures of each target by the value of a label; `inner` picks one of several for each."""

    def read(sources: MetricSources) -> Iterator[Reading]:
        for target, figures in read_targets(sources.node_stat):
            by_label = read_mapping(figures.get(name))
            if inner is not None:
                by_label = {key: read_mapping(one).get(inner) for key, one in by_label.items()}
            yield from samples_of((target,), by_label)

    return read


def class_hit_tokens(sources: MetricSources) -> Iterator[Reading]:
    """Tokens by class that the shards sent by each target stand for."""
    tokens_per_shard = BLOCK_TOKENS / sources.shards_per_fetch
    for target, figures in read_targets(sources.node_stat):
        for sample in samples_of((target,), read_mapping(figures.get("hits_by_class"))):
            yield Sample(sample.labels, sample.value * tokens_per_shard)


def target_distribution(name: str) -> Reader:
    """A histogram of each target."""

    def read(sources: MetricSources) -> Iterator[Reading]:
        for target, figures in read_targets(sources.node_stat):
            found = distribution_of((target,), figures.get(name))
            if found is not None:
                yield found

    return read


def node_distributions(name: str) -> Reader:
    """Histograms of the node, one for each value of a label."""

    def read(sources: MetricSources) -> Iterator[Reading]:
        for label, value in read_mapping(read_mapping(sources.node_stat).get(name)).items():
            found = distribution_of((cut_label(label),), value)
            if found is not None:
                yield found

    return read


def namespace_tokens(name: str) -> Reader:
    """A number of tokens of each namespace."""

    def read(sources: MetricSources) -> Iterable[Reading]:
        return samples_of((), {label: one.get(name) for label, one in _namespaces(sources)})

    return read


def namespace_misses(sources: MetricSources) -> Iterator[Reading]:
    """Missed tokens of each namespace by reason, in the order (namespace, reason)."""
    by_reason: dict[str, dict[str, Any]] = {}
    for label, figures in _namespaces(sources):
        for reason, tokens in read_mapping(figures.get("miss_tokens")).items():
            by_reason.setdefault(reason, {})[label] = tokens
    for reason, by_namespace in by_reason.items():
        for sample in samples_of((), by_namespace):
            yield Sample((*sample.labels, cut_label(reason)), sample.value)


def _namespaces(sources: MetricSources) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for label, figures in read_mapping(read_mapping(sources.node_stat).get("namespaces")).items():
        yield label, read_mapping(figures)
