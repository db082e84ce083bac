"""The table of the metrics of engines: name, kind, labels, unit, help, and source. Pure.

docs/metrics.md explains each; a test compares both ways. Every metric has the label `engine` before
its own ones. Figures are those of the worker's status document, which an engine adds up by passes
and requests: asking for them costs it nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.metrics.readings import Sample, cut_label
from kvstore.metrics.server import MetricTable
from kvstore.metrics.status_table import MetricMaker, Status, StatusMetric, at, pick


def _read_info(status: Status) -> Iterator[Sample]:
    yield Sample((cut_label(status.get("role", "")),), 1.0)


_make = MetricMaker("engine")

WORKER_METRICS = (
    _make.gauge("info", "always 1", "Role of the worker.", _read_info, "role"),
    _make.gauge("uptime_seconds", "seconds", "Time since it serves.", at("uptime_s")),
    _make.gauge(
        "draining", "1 or 0", "Whether it takes no new requests because it ends.", at("is_draining")
    ),
    _make.gauge("connections", "connections", "Open connections.", at("connections.open")),
    _make.counter(
        "connections_accepted", "connections", "Connections accepted.", at("connections.accepted")
    ),
    _make.counter(
        "connections_turned_away",
        "connections",
        "Connections closed at once because there were too many.",
        at("connections.turned_away"),
    ),
    _make.counter(
        "abandoned",
        "requests",
        "Requests whose client went away, or did not read.",
        at("connections.abandoned"),
    ),
)

REQUEST_METRICS = (
    _make.gauge(
        "requests_now",
        "requests",
        "Requests by where they are.",
        pick("engine", "waiting", "entering", "prefilling", "decoding", "held"),
        "phase",
    ),
    _make.counter("requests", "requests", "Requests taken.", at("engine.counts.requests")),
    _make.counter(
        "requests_refused",
        "requests",
        "Requests refused because the queue was full.",
        at("engine.counts.refused"),
    ),
    _make.counter(
        "requests_ended",
        "requests",
        "Requests by their end here.",
        pick("engine.counts", "finished", "detached", "aborted", "no_room"),
        "ended",
    ),
    _make.counter(
        "preemptions",
        "preemptions",
        "Sequences that lost their blocks to others and began anew.",
        at("engine.counts.preemptions"),
    ),
    _make.histogram(
        "first_token",
        "Time from the arrival of a request until its first token.",
        "times.first_token",
    ),
)

TOKEN_METRICS = (
    _make.counter(
        "matched_tokens",
        "tokens",
        "Tokens of prompts that the store said it has.",
        at("engine.counts.matched_tokens"),
    ),
    _make.counter(
        "hit_tokens", "tokens", "Tokens that were not computed.", at("engine.counts.hit_tokens")
    ),
    _make.counter(
        "shared_tokens",
        "tokens",
        "Tokens of hits, and of what was replayed behind them, that were in the pool already.",
        at("engine.counts.shared_tokens"),
    ),
    _make.counter(
        "replay_tokens",
        "tokens",
        "Tokens computed again for want of a window state.",
        at("engine.counts.replay_tokens"),
    ),
    _make.counter(
        "prefill_tokens",
        "tokens",
        "Tokens computed in prefill.",
        at("engine.counts.prefill_tokens"),
    ),
    _make.counter(
        "answer_tokens", "tokens", "Tokens of answers.", at("engine.counts.answer_tokens")
    ),
    _make.counter("steps", "steps", "Steps that computed something.", at("engine.counts.steps")),
    _make.histogram("step", "Time of a step.", "times.step"),
)

LOAD_METRICS = (
    _make.counter(
        "fetch_seconds",
        "seconds",
        "Time until what was wanted of the store had come, added up over requests.",
        at("engine.counts.fetch_s"),
    ),
    _make.counter(
        "swap_in_seconds",
        "seconds",
        "Time of copying what came into the pool.",
        at("engine.counts.swap_in_s"),
    ),
    _make.counter(
        "arrival_wait_seconds",
        "seconds",
        "Time that passes stood still for a prefix that was still coming.",
        at("engine.counts.arrival_wait_s"),
    ),
    _make.counter(
        "short_loads",
        "loads",
        "Prefixes of which less came than was planned.",
        at("engine.counts.short_loads"),
    ),
    _make.counter(
        "rejected_shards",
        "shards",
        "Shards that failed a check on arrival.",
        at("engine.counts.rejected_shards"),
    ),
    _make.counter(
        "changed_prefixes",
        "requests",
        "Answers that went on from a prefix not known to have the bits they were begun with.",
        at("engine.counts.changed_prefixes"),
    ),
)

SAVE_METRICS = (
    _make.counter(
        "saved_blocks",
        "blocks",
        "Blocks that were given to be saved, by what became of them.",
        pick("engine.saves", "stored", "known", "failed", "dropped"),
        "outcome",
    ),
    _make.gauge("saves_pending", "blocks", "Blocks on their way.", at("engine.saves.pending")),
    _make.counter(
        "windows_dropped",
        "records",
        "Window states that were not kept.",
        at("engine.dropped_windows"),
    ),
    _make.counter(
        "store_errors",
        "errors",
        "Errors of the agent, for whatever was asked of it.",
        at("store_errors"),
    ),
    _make.counter(
        "transfer_errors",
        "errors",
        "Errors of the GPU while blocks were moved into the pool or out of it.",
        at("transfer_errors"),
    ),
)

HANDOVER_METRICS = (
    _make.counter(
        "handed_over",
        "sequences",
        "Sequences that were to leave, by what became of them.",
        pick("hand_overs.out", "sent", "failed", "refused"),
        "outcome",
    ),
    _make.counter(
        "taken_over",
        "sequences",
        "Sequences that were to come, by what became of them.",
        pick("hand_overs.in", "received", "refused", "busy", "cancelled"),
        "outcome",
    ),
)

POOL_METRICS = (
    _make.gauge("pool_blocks", "blocks", "Size of the pool.", at("engine.pool_blocks")),
    _make.gauge("pool_free_blocks", "blocks", "Free blocks of it.", at("engine.free_blocks")),
    _make.gauge(
        "free_states", "sequences", "Sequences that may still begin.", at("engine.free_states")
    ),
)

ENGINE_METRICS: tuple[StatusMetric, ...] = (
    *WORKER_METRICS,
    *REQUEST_METRICS,
    *TOKEN_METRICS,
    *LOAD_METRICS,
    *SAVE_METRICS,
    *HANDOVER_METRICS,
    *POOL_METRICS,
)

ENGINE_TABLE = MetricTable("engine", "name", ENGINE_METRICS)
