"""The table of all metrics: name, kind, labels, unit, help, and where the figure comes from. Pure.

docs/metrics.md explains each; a test compares both ways. Every metric has the label `node` before
its own ones; those of agents and of engines have tables of their own. A name is never given another
meaning: what it means changes only with its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...metrics.readings import MetricHead, Sample
from .metric_readers import (
    MetricSources,
    Reader,
    class_hit_tokens,
    namespace_misses,
    namespace_tokens,
    node_distributions,
    node_field,
    policy_field,
    policy_map,
    read_backlog,
    read_fill,
    read_health,
    read_redundancy,
    redundancy_age,
    scrub_pass_age,
    scrub_pass_duration,
    target_distribution,
    target_field,
    target_map,
    worker_counter,
    worker_field,
    worker_map,
)


@dataclass(frozen=True, slots=True)
class Metric(MetricHead):
    """One metric of a node, and how it is read."""

    read: Reader


def _gauge(name: str, unit: str, text: str, read: Reader, *labels: str) -> Metric:
    return Metric(f"cachalot_{name}", "gauge", labels, unit, text, read)


def _counter(name: str, unit: str, text: str, read: Reader, *labels: str) -> Metric:
    return Metric(f"cachalot_{name}", "counter", labels, unit, text, read)


def _histogram(name: str, text: str, read: Reader, *labels: str) -> Metric:
    return Metric(f"cachalot_{name}", "histogram", labels, "seconds", text, read)


def _node_counter(field: str, unit: str, text: str) -> Metric:
    return _counter(f"{field}_total", unit, text, node_field(field))


def _target_counter(field: str, unit: str, text: str) -> Metric:
    return _counter(f"{field}_total", unit, text, target_field(field), "target")


def _target_gauge(field: str, unit: str, text: str) -> Metric:
    return _gauge(field, unit, text, target_field(field), "target")


def _read_up(sources: MetricSources) -> Iterator[Sample]:
    yield Sample((), float(sources.node_stat is not None))


def _read_info(sources: MetricSources) -> Iterator[Sample]:
    if sources.node_stat is not None:
        version, cluster = (str(sources.node_stat.get(key, "")) for key in ("version", "cluster"))
        yield Sample((version[:64], cluster[:64]), 1.0)


def _worker_counter(field: str, unit: str, text: str) -> Metric:
    return _counter(f"worker_{field}_total", unit, text, worker_counter(field))


NODE_METRICS = (
    _gauge("up", "1 or 0", "Whether kvstored answered its worker just now.", _read_up),
    _gauge(
        "node_info",
        "always 1",
        "Version of kvstored and id of the cluster.",
        _read_info,
        *("version", "cluster"),
    ),
    _gauge("uptime_seconds", "seconds", "Time since kvstored started.", node_field("uptime_s")),
    _gauge("map_epoch", "number", "Epoch of the cluster map in use.", node_field("epoch")),
    _gauge("connections", "connections", "Open connections.", node_field("connections")),
    _gauge(
        "requests_per_second",
        "requests/second",
        "Requests in the second before.",
        node_field("requests_last_s"),
    ),
    _gauge(
        "buffer_memory_bytes", "bytes", "Memory of kvstored's buffers.", node_field("memory_bytes")
    ),
    _gauge(
        "buffer_memory_limit_bytes",
        "bytes",
        "The most memory that kvstored's buffers may take.",
        node_field("memory_limit_bytes"),
    ),
    _gauge(
        "draining", "1 or 0", "Whether the node is asked to take no writes.", node_field("draining")
    ),
    _node_counter("connections_accepted", "connections", "Connections accepted."),
    _node_counter(
        "connections_refused", "connections", "Connections closed because there were too many."
    ),
    _node_counter(
        "bad_frames", "connections", "Connections closed because of bytes that are no frame."
    ),
    _node_counter("slow_peers", "connections", "Connections closed because the peer was too slow."),
    _node_counter(
        "cut_answers",
        "connections",
        "Connections closed within an answer because stored bytes could not be read.",
    ),
    _node_counter("busy_refusals", "requests", "Requests answered BUSY."),
    _node_counter(
        "expired_requests", "requests", "Requests whose deadline had passed when they came up."
    ),
    _histogram(
        "operation_latency_seconds",
        "Time kvstored took for a request, from its arrival to the end of the answer.",
        node_distributions("latency"),
        "op",
    ),
    _histogram(
        "client_latency_seconds",
        "Time a client took for a stage, as clients report it.",
        node_distributions("client_latency"),
        "stage",
    ),
)

HIT_METRICS = (
    _counter(
        "matched_tokens_total",
        "tokens",
        "Tokens that match found stored, as clients report them.",
        namespace_tokens("matched_tokens"),
        "namespace",
    ),
    _counter(
        "hit_tokens_total",
        "tokens",
        "Tokens fetched and verified, as clients report them.",
        namespace_tokens("hit_tokens"),
        "namespace",
    ),
    _counter(
        "miss_tokens_total",
        "tokens",
        "Tokens asked for and not given, as clients report them.",
        namespace_misses,
        *("namespace", "reason"),
    ),
    _counter(
        "missed_keys_total",
        "keys",
        "Keys asked for that the node does not hold, by why it does not.",
        target_map("misses_by_reason"),
        *("target", "reason"),
    ),
    _counter(
        "class_hit_tokens_total",
        "tokens",
        "Tokens read, by TTL class: the share that the node sent.",
        class_hit_tokens,
        *("target", "class"),
    ),
    _counter(
        "class_hit_shards_total",
        "shards",
        "Shards read, by TTL class.",
        target_map("hits_by_class"),
        *("target", "class"),
    ),
    _target_counter("match_keys", "keys", "Keys asked for by MATCH."),
    _target_counter("match_hits", "keys", "Keys asked for by MATCH that were here."),
)

TARGET_METRICS = (
    _target_gauge("blocks", "blocks", "Blocks of which a shard is held."),
    _target_gauge("used_bytes", "bytes", "Bytes of slots in use."),
    _target_gauge("capacity_bytes", "bytes", "The most bytes that the target may store."),
    _target_gauge("slots_used", "slots", "Slots in use."),
    _target_gauge("slots_free", "slots", "Free slots in segments."),
    _gauge(
        "slots_possible",
        "slots",
        "Slots that the capacity can have with the slot sizes of now.",
        target_field("slots_total"),
        "target",
    ),
    _gauge(
        "free_slots_bytes",
        "bytes",
        "Preallocated bytes of free slots.",
        target_field("slot_bytes_free"),
        "target",
    ),
    _target_gauge("segments", "files", "Segment files."),
    _gauge(
        "quarantined_slots",
        "slots",
        "Slots out of use because their shard was damaged.",
        target_field("quarantined"),
        "target",
    ),
    _gauge(
        "target_lost",
        "1 or 0",
        "Whether the target's folder was removed or replaced.",
        target_field("is_lost"),
        "target",
    ),
    _gauge(
        "class_blocks",
        "blocks",
        "Blocks of which a shard is held, by TTL class.",
        target_map("classes", "blocks"),
        *("target", "class"),
    ),
    _gauge(
        "class_bytes",
        "bytes",
        "Bytes of slots in use, by TTL class.",
        target_map("classes", "bytes"),
        *("target", "class"),
    ),
    _counter(
        "evicted_shards_total",
        "shards",
        "Shards evicted, by reason.",
        target_map("evicted"),
        *("target", "reason"),
    ),
    _target_counter("evicted_bytes", "bytes", "Bytes of slots freed by eviction."),
    _target_counter(
        "evictions_refused",
        "shards",
        "Shards kept although a worker wanted them gone: used since, or another one.",
    ),
    _target_counter("touched", "shards", "Shards made younger because a peer saw a use."),
    _target_counter("scanned_slots", "slots", "Slots described to workers."),
    _target_counter("cut_slots", "slots", "Slots lost because their file had been cut short."),
    _histogram(
        "evicted_age_seconds",
        "Time since the last use of evicted shards.",
        target_distribution("evicted_age"),
        "target",
    ),
    _target_counter("reads", "requests", "READ requests."),
    _target_counter("shards_read", "shards", "Shards sent."),
    _target_counter("read_bytes", "bytes", "Bytes sent."),
    _counter(
        "read_misses_total",
        "keys",
        "Keys of READ requests that were not here.",
        target_field("misses"),
        "target",
    ),
    _target_counter("heads_told", "shards", "Shards described to reads of their heads only."),
    _target_counter("pooled_reads", "reads", "Runs of slots read from the disk by a thread."),
    _target_counter("read_races", "shards", "Shards replaced or dropped while they were read."),
    _target_counter("writes", "requests", "WRITE requests."),
    _target_counter("shards_written", "shards", "Shards stored."),
    _target_counter("written_bytes", "bytes", "Bytes stored."),
    _target_counter("shards_known", "shards", "Shards of a WRITE that were here already."),
    _target_counter("shards_kept", "shards", "Shards of a WRITE that lost to the version here."),
    _target_counter("shards_replaced", "shards", "Shards that made way for another version."),
    _target_counter("bad_payloads", "shards", "Shards of a WRITE that failed their checksum."),
    _target_counter("full_refusals", "shards", "Shards not stored because there was no room."),
    _target_counter("io_errors", "calls", "System calls on stored bytes that failed."),
    _target_counter("forgotten", "shards", "Shards dropped by FORGET."),
    _target_counter("rejected_shards", "shards", "Stored shards found damaged, out of use since."),
    _target_counter("false_reports", "shards", "Shards reported as damaged that were good."),
)

POLICY_METRICS = (
    _gauge("policy_version", "number", "Version of the policy in use.", policy_field("version")),
    _gauge("ttl_seconds", "seconds", "TTL by class.", policy_map("ttl_s"), "class"),
    _gauge(
        "watermark_ratio",
        "0 to 1",
        "Fill at which eviction starts (high) and stops (low).",
        policy_map("watermarks"),
        "level",
    ),
    _gauge(
        "setting",
        "its own",
        "Settings that are not at their default.",
        policy_map("settings"),
        "name",
    ),
    _gauge(
        "fill_ratio",
        "0 to 1",
        "Share in use by each limit; eviction acts on the largest.",
        read_fill,
        *("target", "limit"),
    ),
)

WORKER_METRICS = (
    _gauge(
        "redundancy_blocks",
        "blocks",
        "Blocks by the number of shards found in the last full count.",
        read_redundancy,
        "shards",
    ),
    _gauge(
        "health_blocks",
        "blocks",
        "The same by health: whole, reduced (readable), unreadable.",
        read_health,
        "health",
    ),
    _gauge(
        "redundancy_age_seconds",
        "seconds",
        "Time since the last full count of shards.",
        redundancy_age,
    ),
    _gauge(
        "scrub_pass_age_seconds",
        "seconds",
        "Time since the scrub that is going on began.",
        scrub_pass_age,
        "target",
    ),
    _gauge(
        "scrub_pass_duration_seconds",
        "seconds",
        "How long the last whole scrub took; 0 before the first one.",
        scrub_pass_duration,
        "target",
    ),
    _gauge(
        "worker_uptime_seconds",
        "seconds",
        "Time since the worker started.",
        worker_field("uptime_s"),
    ),
    _gauge(
        "worker_rate_factor",
        "0 to 1",
        "By what background work is slowed down because the node is busy.",
        worker_field("rate_factor"),
    ),
    _gauge(
        "clock_settling",
        "1 or 0",
        "Whether blocks do not expire because the wall clock has just jumped.",
        worker_field("clock_is_settling"),
    ),
    _gauge("backlog", "by kind", "What waits to be done.", read_backlog, "kind"),
    _worker_counter("scans", "targets", "Targets whose slots were all looked at."),
    _worker_counter("scanned_slots", "slots", "Slots looked at."),
    _counter(
        "worker_evicted_total",
        "shards",
        "Shards that the worker evicted from its node, by reason.",
        worker_map("evicted"),
        "reason",
    ),
    _worker_counter("evicted_bytes", "bytes", "Bytes of their slots."),
    _worker_counter("spared", "shards", "Victims that stayed because of a later use."),
    _worker_counter("gone_before", "shards", "Victims that were gone when their turn came."),
    _worker_counter("withdrawn", "shards", "Shards of peers that went because ours did."),
    _worker_counter("withdrawals_refused", "shards", "Shards that peers kept: used, or other."),
    _worker_counter("withdrawals_failed", "shards", "Shards of peers that did not answer."),
    _worker_counter("passes_skipped", "passes", "Passes left out because the clock had jumped."),
    _worker_counter("clock_jumps", "jumps", "Jumps of the wall clock."),
    _worker_counter("node_errors", "requests", "Requests to nodes that failed."),
    _worker_counter("scrubbed_slots", "slots", "Slots whose checksums were verified."),
    _worker_counter("scrubbed_bytes", "bytes", "Bytes of those."),
    _worker_counter("scrub_passes", "passes", "Finished scrubs of a whole node."),
    _worker_counter("damaged_found", "shards", "Shards that scrub found damaged."),
    _worker_counter("quarantined", "shards", "Of those, taken out of use."),
    _worker_counter("redundancy_passes", "passes", "Finished counts of the shards of all blocks."),
    _worker_counter("repaired_shards", "shards", "Shards made again from others."),
    _worker_counter("repaired_bytes", "bytes", "Bytes of those."),
    _worker_counter("repairs_failed", "blocks", "Repairs that failed and are tried again."),
    _worker_counter("repairs_refused", "blocks", "Repairs given up: shards failed their checksum."),
    _worker_counter("orphaned_blocks", "blocks", "Blocks with too few shards that were removed."),
    _worker_counter("policy_changes", "changes", "Newer policies taken over."),
)

METRICS: tuple[Metric, ...] = (
    *NODE_METRICS,
    *HIT_METRICS,
    *TARGET_METRICS,
    *POLICY_METRICS,
    *WORKER_METRICS,
)
