"""The table of the metrics of agents: name, kind, labels, unit, help, and source. Pure.

docs/metrics.md explains each; a test compares both ways. Every metric has the label `agent` before
its own ones. Figures are those of the agent's status document (docs/formats/agent-socket.md); one
that is missing gives no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from .control.metric_readers import (
    Reading,
    Sample,
    cut_label,
    distribution_of,
    read_mapping,
    sample_of,
    samples_of,
)
from .control.metric_table import MetricHead

Status: TypeAlias = Mapping[str, Any]
Reader: TypeAlias = Callable[[Status], Iterable[Reading]]


@dataclass(frozen=True, slots=True)
class AgentMetric(MetricHead):
    """One metric of an agent, and how it is read from its status document."""

    read: Reader


def _find(status: Status, path: str) -> object:
    """The value at "a.b.c" of nested objects; None if there is none."""
    found: object = status
    for name in path.split("."):
        found = read_mapping(found).get(name)
    return found


def _at(path: str) -> Reader:
    return lambda status: sample_of(_find(status, path))


def _by_label(path: str) -> Reader:
    """Figures by the value of a label."""
    return lambda status: samples_of((), read_mapping(_find(status, path)))


def _pick(path: str, *names: str) -> Reader:
    """Of the figures at `path` those called `names`, which are the values of a label."""

    def read(status: Status) -> Iterator[Reading]:
        found = read_mapping(_find(status, path))
        for name in names:
            yield from sample_of(found.get(name), name)

    return read


def _histogram_at(path: str) -> Reader:
    def read(status: Status) -> Iterator[Reading]:
        found = distribution_of((), _find(status, path))
        if found is not None:
            yield found

    return read


def _workers(field: str) -> Reader:
    """A figure of the worker processes, summed over those of one kind."""

    def read(status: Status) -> Iterator[Reading]:
        for kind in ("fetch", "store"):
            rows = _find(status, f"{kind}.workers")
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


def _gauge(name: str, unit: str, text: str, read: Reader, *labels: str) -> AgentMetric:
    return AgentMetric(f"cachalot_agent_{name}", "gauge", labels, unit, text, read)


def _counter(name: str, unit: str, text: str, read: Reader, *labels: str) -> AgentMetric:
    return AgentMetric(f"cachalot_agent_{name}_total", "counter", labels, unit, text, read)


def _histogram(name: str, text: str, path: str) -> AgentMetric:
    name = f"cachalot_agent_{name}_seconds"
    return AgentMetric(name, "histogram", (), "seconds", text, _histogram_at(path))


PROCESS_METRICS = (
    _gauge("info", "always 1", "Version and roles of the agent.", _read_info, "version", "roles"),
    _gauge("uptime_seconds", "seconds", "Time since the agent started.", _at("uptime_s")),
    _gauge("sessions", "sessions", "Engines and gateways connected.", _at("sessions.open")),
    _counter("sessions_accepted", "sessions", "Sessions accepted.", _at("sessions.accepted")),
    _counter(
        "sessions_refused",
        "sessions",
        "Sessions closed at once: another user's, or too many.",
        _at("sessions.refused"),
    ),
)

ARENA_METRICS = (
    _gauge("arena_bytes", "bytes", "Size of the arena.", _at("arena.size_bytes")),
    _gauge("arena_leased_bytes", "bytes", "Bytes of runs in use.", _at("arena.leased_bytes")),
    _gauge(
        "arena_largest_free_bytes",
        "bytes",
        "The longest free piece of the arena.",
        _at("arena.largest_free_bytes"),
    ),
    _gauge("arena_runs", "runs", "Runs in use.", _at("arena.runs")),
    _gauge("arena_waiting", "requests", "Requests for a run that wait.", _at("arena.waiting")),
)

HANDOVER_METRICS = (
    _gauge("offers", "runs", "Runs that another engine may take.", _at("offers.open")),
    _gauge("offers_bytes", "bytes", "Bytes of those.", _at("offers.open_bytes")),
    _counter("offers_made", "runs", "Runs offered to other engines.", _at("offers.made")),
    _counter(
        "offers_ended",
        "runs",
        "Offers by what became of them.",
        _pick("offers", "taken", "sent", "withdrawn", "expired"),
        "ended",
    ),
    _counter(
        "offers_refused",
        "runs",
        "Runs not taken on offer, because too many were.",
        _at("offers.refused"),
    ),
    _counter(
        "offers_sent_bytes", "bytes", "Bytes of runs sent to other hosts.", _at("offers.sent_bytes")
    ),
    _counter(
        "offers_remote_takes",
        "runs",
        "Runs wanted from other hosts, by their end.",
        _pick(
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
    _counter(
        "offers_received_bytes",
        "bytes",
        "Bytes of runs taken from other hosts.",
        _at("offers.received_bytes"),
    ),
)

FETCH_METRICS = (
    _gauge("fetch_queued", "jobs", "Pieces of fetches that wait.", _at("fetch.queued")),
    _gauge("fetch_running", "fetches", "Fetches that run.", _at("fetch.running")),
    _counter("fetches", "fetches", "Fetches by their end.", _by_label("fetch.ended"), "ended"),
    _counter(
        "fetch_asked_blocks", "blocks", "Blocks asked for by fetches.", _at("fetch.asked_blocks")
    ),
    _counter("fetch_blocks", "blocks", "Blocks fetched and verified.", _at("fetch.blocks")),
    _counter("fetch_bytes", "bytes", "Bytes of those.", _at("fetch.bytes")),
    _counter(
        "fetch_decoded_blocks",
        "blocks",
        "Of those, blocks put together from parity.",
        _at("fetch.decoded"),
    ),
    _counter(
        "fetch_rejected_shards",
        "shards",
        "Shards that failed a check on arrival.",
        _at("fetch.rejected"),
    ),
    _histogram("fetch", "Time of a fetch, from its request to its last block.", "fetch.latency"),
    _counter(
        "worker_cpu_seconds",
        "seconds",
        "CPU time of the worker processes, by what they do.",
        _workers("cpu_s"),
        "kind",
    ),
    _counter(
        "worker_restarts",
        "starts",
        "Worker processes that ended and were started again.",
        _workers("restarts"),
        "kind",
    ),
)

STORE_METRICS = (
    _gauge("store_queued", "runs", "Runs that wait to be saved.", _at("store.queued")),
    _gauge("store_queued_bytes", "bytes", "Bytes of those.", _at("store.queued_bytes")),
    _counter(
        "store_blocks",
        "blocks",
        "Blocks handed over, by what became of them.",
        _pick("store", "stored", "known", "failed", "dropped"),
        "outcome",
    ),
    _counter(
        "store_degraded_blocks",
        "blocks",
        "Of those stored, blocks on fewer nodes than wanted.",
        _at("store.degraded"),
    ),
    _counter(
        "store_dropped_runs",
        "runs",
        "Runs dropped because the queue was full.",
        _at("store.dropped_runs"),
    ),
)

MATCH_METRICS = (
    _counter("matches", "requests", "Matches of keys and of prompts.", _at("match.count")),
    _counter("match_prompts", "prompts", "Prompts that were matched.", _at("match.prompts")),
    _counter("match_prompt_tokens", "tokens", "Tokens of those.", _at("match.prompt_tokens")),
    _counter("match_hit_tokens", "tokens", "Of those, tokens to be had.", _at("match.hit_tokens")),
    _counter(
        "match_replay_tokens",
        "tokens",
        "Of those, tokens to replay for want of a window state.",
        _at("match.replay_tokens"),
    ),
    _counter(
        "match_windows",
        "prompts",
        "Prompts that could use a window state, and those for which it was found.",
        _pick("match", "windows_wanted", "windows_found"),
        "kind",
    ),
    _histogram("match", "Time of a match, from its request to its answer.", "match.latency"),
)

WINDOW_METRICS = (
    _gauge("window_records", "records", "Window states kept.", _at("windows.records")),
    _gauge("window_bytes", "bytes", "Bytes of those.", _at("windows.used_bytes")),
    _gauge("window_memory_bytes", "bytes", "The most they may take.", _at("windows.memory_bytes")),
    _counter("window_puts", "records", "Window states put.", _at("windows.puts")),
    _counter("window_evicted", "records", "Evicted for room.", _at("windows.evicted")),
    _counter(
        "window_expired", "records", "Gone because their time was up.", _at("windows.expired")
    ),
    _counter(
        "window_rejected",
        "records",
        "Dropped because their bytes had changed in memory.",
        _at("windows.rejected"),
    ),
    _counter("window_lookups", "keys", "Window states looked for.", _at("windows.lookups")),
    _counter(
        "window_found",
        "keys",
        "Of those found: on this host, on another.",
        _pick("windows", "found_here", "found_elsewhere"),
        "place",
    ),
    _counter("window_fetches", "records", "Fetches of window states.", _at("windows.fetches")),
    _counter(
        "window_fetched_here", "records", "Of those, found here.", _at("windows.fetched_here")
    ),
    _counter(
        "window_remote_fetches",
        "records",
        "Fetches from other hosts, by their end.",
        _pick(
            "windows",
            *(f"remote_{end}" for end in ("found", "absent", "rejected", "unreachable", "late")),
        ),
        "ended",
    ),
    _counter(
        "window_fetched_bytes", "bytes", "Bytes from other hosts.", _at("windows.fetched_bytes")
    ),
    _counter(
        "window_withdrawn",
        "entries",
        "Entries of the directory that a fetch found to be wrong.",
        _at("windows.withdrawn"),
    ),
)

DIRECTORY_METRICS = (
    _gauge("directory_entries", "entries", "Entries of its part.", _at("directory.entries")),
    _gauge("directory_hosts", "hosts", "Hosts that announce to it.", _at("directory.hosts")),
    _counter("directory_lookups", "keys", "Keys looked up in its part.", _at("directory.lookups")),
    _counter("directory_hits", "keys", "Of those, found.", _at("directory.hits")),
    _counter("directory_announced", "entries", "Entries announced.", _at("directory.announced")),
    _counter(
        "directory_crowded_out",
        "entries",
        "Entries that went before their time, for want of room.",
        _at("directory.crowded_out"),
    ),
)

AGENT_METRICS: tuple[AgentMetric, ...] = (
    *PROCESS_METRICS,
    *ARENA_METRICS,
    *HANDOVER_METRICS,
    *FETCH_METRICS,
    *STORE_METRICS,
    *MATCH_METRICS,
    *WINDOW_METRICS,
    *DIRECTORY_METRICS,
)
