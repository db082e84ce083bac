"""The table of the metrics of agents: name, kind, labels, unit, help, and source. Pure.

docs/metrics.md explains each; a test compares both ways. Every metric has the label `agent` before
its own ones. Figures are those of the agent's status document (docs/formats/agent-socket.md); one
that is missing gives no sample.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..metrics.readings import Reading, Sample, cut_label, read_mapping, sample_of
from ..metrics.status_table import (
    MetricMaker,
    Reader,
    Status,
    StatusMetric,
    at,
    by_label,
    find,
    pick,
)


def _workers(field: str) -> Reader:
    """A figure of the worker processes, summed over those of one kind."""

    def read(status: Status) -> Iterator[Reading]:
        for kind in ("fetch", "store"):
            rows = find(status, f"{kind}.workers")
            samples = [
                sample.value
                for row in (rows if isinstance(rows, list) else [])
                for sample in sample_of(read_mapping(row).get(field))
            ]
            if samples:
                yield Sample((kind,), sum(samples))

    return read


def _read_info(status: Status) -> Iterator[Sample]:
    version, roles = status.get("version", ""), status.get("roles")
    names = ",".join(map(str, roles)) if isinstance(roles, list) else ""
    yield Sample((cut_label(version), cut_label(names)), 1.0)


_make = MetricMaker("agent")

PROCESS_METRICS = (
    _make.gauge(
        "info", "always 1", "Version and roles of the agent.", _read_info, "version", "roles"
    ),
    _make.gauge("uptime_seconds", "seconds", "Time since the agent started.", at("uptime_s")),
    _make.gauge("sessions", "sessions", "Engines and gateways connected.", at("sessions.open")),
    _make.counter("sessions_accepted", "sessions", "Sessions accepted.", at("sessions.accepted")),
    _make.counter(
        "sessions_refused",
        "sessions",
        "Sessions closed at once: another user's, or too many.",
        at("sessions.refused"),
    ),
)

ARENA_METRICS = (
    _make.gauge("arena_bytes", "bytes", "Size of the arena.", at("arena.size_bytes")),
    _make.gauge("arena_leased_bytes", "bytes", "Bytes of runs in use.", at("arena.leased_bytes")),
    _make.gauge(
        "arena_largest_free_bytes",
        "bytes",
        "The longest free piece of the arena.",
        at("arena.largest_free_bytes"),
    ),
    _make.gauge("arena_runs", "runs", "Runs in use.", at("arena.runs")),
    _make.gauge("arena_waiting", "requests", "Requests for a run that wait.", at("arena.waiting")),
)

HANDOVER_METRICS = (
    _make.gauge("offers", "runs", "Runs that another engine may take.", at("offers.open")),
    _make.gauge("offers_bytes", "bytes", "Bytes of those.", at("offers.open_bytes")),
    _make.counter("offers_made", "runs", "Runs offered to other engines.", at("offers.made")),
    _make.counter(
        "offers_ended",
        "runs",
        "Offers by what became of them.",
        pick("offers", "taken", "sent", "withdrawn", "expired"),
        "ended",
    ),
    _make.counter(
        "offers_refused",
        "runs",
        "Runs not taken on offer, because too many were.",
        at("offers.refused"),
    ),
    _make.counter(
        "offers_sent_bytes", "bytes", "Bytes of runs sent to other hosts.", at("offers.sent_bytes")
    ),
    _make.counter(
        "offers_remote_takes",
        "runs",
        "Runs wanted from other hosts, by their end.",
        pick(
            "offers",
            "remote_found",
            "remote_absent",
            "remote_rejected",
            "remote_unreachable",
            "remote_late",
            "skipped",
        ),
        "ended",
    ),
    _make.counter(
        "offers_received_bytes",
        "bytes",
        "Bytes of runs taken from other hosts.",
        at("offers.received_bytes"),
    ),
)

FETCH_METRICS = (
    _make.gauge("fetch_queued", "jobs", "Pieces of fetches that wait.", at("fetch.queued")),
    _make.gauge("fetch_running", "fetches", "Fetches that run.", at("fetch.running")),
    _make.counter("fetches", "fetches", "Fetches by their end.", by_label("fetch.ended"), "ended"),
    _make.counter(
        "fetch_asked_blocks", "blocks", "Blocks asked for by fetches.", at("fetch.asked_blocks")
    ),
    _make.counter("fetch_blocks", "blocks", "Blocks fetched and verified.", at("fetch.blocks")),
    _make.counter("fetch_bytes", "bytes", "Bytes of those.", at("fetch.bytes")),
    _make.counter(
        "fetch_decoded_blocks",
        "blocks",
        "Of those, blocks put together from parity.",
        at("fetch.decoded"),
    ),
    _make.counter(
        "fetch_left_blocks",
        "blocks",
        "Of those, blocks that their reader is to rebuild and verify.",
        at("fetch.left"),
    ),
    _make.counter(
        "fetch_rejected_shards",
        "shards",
        "Shards that failed a check on arrival.",
        at("fetch.rejected"),
    ),
    _make.histogram(
        "fetch", "Time of a fetch, from its request to its last block.", "fetch.latency"
    ),
    _make.counter(
        "worker_cpu_seconds",
        "seconds",
        "CPU time of the worker processes, by what they do.",
        _workers("cpu_s"),
        "kind",
    ),
    _make.counter(
        "worker_restarts",
        "starts",
        "Worker processes that ended and were started again.",
        _workers("restarts"),
        "kind",
    ),
)

STORE_METRICS = (
    _make.gauge("store_queued", "runs", "Runs that wait to be saved.", at("store.queued")),
    _make.gauge("store_queued_bytes", "bytes", "Bytes of those.", at("store.queued_bytes")),
    _make.counter(
        "store_blocks",
        "blocks",
        "Blocks handed over, by what became of them.",
        pick("store", "stored", "known", "failed", "dropped"),
        "outcome",
    ),
    _make.counter(
        "store_degraded_blocks",
        "blocks",
        "Of those stored, blocks on fewer nodes than wanted.",
        at("store.degraded"),
    ),
    _make.counter(
        "store_dropped_runs",
        "runs",
        "Runs dropped because the queue was full.",
        at("store.dropped_runs"),
    ),
)

MATCH_METRICS = (
    _make.counter("matches", "requests", "Matches of keys and of prompts.", at("match.count")),
    _make.counter("match_prompts", "prompts", "Prompts that were matched.", at("match.prompts")),
    _make.counter("match_prompt_tokens", "tokens", "Tokens of those.", at("match.prompt_tokens")),
    _make.counter(
        "match_hit_tokens", "tokens", "Of those, tokens to be had.", at("match.hit_tokens")
    ),
    _make.counter(
        "match_replay_tokens",
        "tokens",
        "Of those, tokens to replay for want of a window state.",
        at("match.replay_tokens"),
    ),
    _make.counter(
        "match_windows",
        "prompts",
        "Prompts that could use a window state, and those for which it was found.",
        pick("match", "windows_wanted", "windows_found"),
        "kind",
    ),
    _make.histogram("match", "Time of a match, from its request to its answer.", "match.latency"),
)

WINDOW_METRICS = (
    _make.gauge("window_records", "records", "Window states kept.", at("windows.records")),
    _make.gauge("window_bytes", "bytes", "Bytes of those.", at("windows.used_bytes")),
    _make.gauge(
        "window_memory_bytes", "bytes", "The most they may take.", at("windows.memory_bytes")
    ),
    _make.counter("window_puts", "records", "Window states put.", at("windows.puts")),
    _make.counter("window_evicted", "records", "Evicted for room.", at("windows.evicted")),
    _make.counter(
        "window_expired", "records", "Gone because their time was up.", at("windows.expired")
    ),
    _make.counter(
        "window_rejected",
        "records",
        "Dropped because their bytes had changed in memory.",
        at("windows.rejected"),
    ),
    _make.counter("window_lookups", "keys", "Window states looked for.", at("windows.lookups")),
    _make.counter(
        "window_found",
        "keys",
        "Of those found: on this host, on another.",
        pick("windows", "found_here", "found_elsewhere"),
        "place",
    ),
    _make.counter("window_fetches", "records", "Fetches of window states.", at("windows.fetches")),
    _make.counter(
        "window_fetched_here", "records", "Of those, found here.", at("windows.fetched_here")
    ),
    _make.counter(
        "window_remote_fetches",
        "records",
        "Fetches from other hosts, by their end.",
        pick(
            "windows",
            *(f"remote_{end}" for end in ("found", "absent", "rejected", "unreachable", "late")),
        ),
        "ended",
    ),
    _make.counter(
        "window_fetched_bytes", "bytes", "Bytes from other hosts.", at("windows.fetched_bytes")
    ),
    _make.counter(
        "window_withdrawn",
        "entries",
        "Entries of the directory that a fetch found to be wrong.",
        at("windows.withdrawn"),
    ),
)

DIRECTORY_METRICS = (
    _make.gauge("directory_entries", "entries", "Entries of its part.", at("directory.entries")),
    _make.gauge("directory_hosts", "hosts", "Hosts that announce to it.", at("directory.hosts")),
    _make.counter(
        "directory_lookups", "keys", "Keys looked up in its part.", at("directory.lookups")
    ),
    _make.counter("directory_hits", "keys", "Of those, found.", at("directory.hits")),
    _make.counter(
        "directory_announced", "entries", "Entries announced.", at("directory.announced")
    ),
    _make.counter(
        "directory_crowded_out",
        "entries",
        "Entries that went before their time, for want of room.",
        at("directory.crowded_out"),
    ),
)

AGENT_METRICS: tuple[StatusMetric, ...] = (
    *PROCESS_METRICS,
    *ARENA_METRICS,
    *HANDOVER_METRICS,
    *FETCH_METRICS,
    *STORE_METRICS,
    *MATCH_METRICS,
    *WINDOW_METRICS,
    *DIRECTORY_METRICS,
)
