"""What an agent says of itself: one JSON object, for `cachalot status`, metrics and the web page.

The fields are in docs/formats/agent-socket.md. Nothing here counts; each part describes itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .arena_runs import ArenaRuns
from .counters import FetchCounters, MatchCounters
from .options import AgentOptions, role_names
from .parts import Jobs
from .store_queue import StoreQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusParts:
    """What there is to describe. None: this agent has none of it."""

    options: AgentOptions
    name: str
    instance: int
    address: str
    pid: int
    version: str
    uptime_s: Callable[[], float]
    map_epoch: Callable[[], int]
    server: Callable[[], dict[str, Any]]
    peers: Callable[[], dict[str, int]]
    fetches: FetchCounters
    matches: MatchCounters
    runs: ArenaRuns | None
    jobs: Jobs | None
    queue: StoreQueue | None
    offers: dict[str, Any]
    windows: Callable[[], dict[str, Any]]
    directory: Callable[[], dict[str, Any] | None]


def make_status(parts: StatusParts) -> dict[str, Any]:
    """The status document of now."""
    workers = {"fetch": {}, "store": {}} if parts.jobs is None else parts.jobs.describe()
    return {
        "agent": parts.name,
        "pid": parts.pid,
        "version": parts.version,
        "instance": parts.instance,
        "roles": role_names(parts.options.roles),
        "uptime_s": round(parts.uptime_s(), 3),
        "socket": str(parts.options.socket_path),
        "address": parts.address,
        "entrypoint": parts.options.entrypoint,
        "map_epoch": parts.map_epoch(),
        "arena": None if parts.runs is None else describe_arena(parts.runs),
        "sessions": parts.server(),
        "peers": parts.peers(),
        "fetch": {
            **parts.fetches.describe(),
            "queued": workers["fetch"].get("queued", 0),
            "lost": workers["fetch"].get("lost", 0),
            "workers": workers["fetch"].get("workers", []),
        },
        "store": {
            **({} if parts.queue is None else parts.queue.describe()),
            "lost": workers["store"].get("lost", 0),
            "workers": workers["store"].get("workers", []),
        },
        "offers": parts.offers,
        "match": parts.matches.describe(),
        "windows": parts.windows(),
        "directory": parts.directory(),
    }


def describe_arena(runs: ArenaRuns) -> dict[str, Any]:
    """How full the arena is, and who waits."""
    book = runs.book
    return {
        "size_bytes": book.size_bytes,
        "leased_bytes": book.leased_bytes,
        "largest_free_bytes": book.largest_free_bytes,
        "runs": book.runs,
        "runs_by_state": book.states(),
        "waiting": book.waiting,
    }
