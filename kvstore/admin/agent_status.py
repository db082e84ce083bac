"""What `cachalot status` and the web page show of agents, as data. Pure.

The names here are those of the JSON output; they stay as they are, more may be added. Figures come
from the agents' status documents (docs/formats/agent-socket.md): one that is missing or strange is
None, so that an agent of another version is shown as far as it is understood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..metrics.readings import read_mapping, read_number
from .agent_inquiry import AgentReport
from .quantities import count_of, format_duration, format_ratio, format_size

TEXT_CHARACTERS_MAX = 64
PROBLEM_CHARACTERS_MAX = 300
ROLES_MAX = 8
COLUMNS = (
    "agent",
    "state",
    "pid",
    "address",
    "roles",
    "arena used",
    "arena",
    "runs",
    "fetch queue",
    "windows",
    "window hits",
    "directory",
    "uptime",
)
LEFT_COLUMNS = frozenset({"agent", "state", "address", "roles"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    """One agent. Figures are None where it did not give them; counts are since its start."""

    agent: str
    address: str
    entrypoint: str | None
    """Its name in the map; None for one that only directories know."""
    is_alive: bool
    """It answered in time, and as an agent of this cluster."""
    problem: str = ""
    """Why it counts as down; empty for one that is alive."""
    silent_s: float | None = None
    """Of one that is down: so long it has not spoken with the directories that knew it."""
    pid: int | None = None
    uptime_s: float | None = None
    roles: tuple[str, ...] = ()
    sessions: int | None = None
    """Engines and gateways that are connected."""
    arena_bytes: int | None = None
    arena_used_bytes: int | None = None
    runs: int | None = None
    """Runs that are leased, fetched into or saved from."""
    waiting: int | None = None
    """Requests for a run that wait for room."""
    fetch_queued: int | None = None
    fetch_running: int | None = None
    fetched_bytes: int | None = None
    store_queued: int | None = None
    store_dropped: int | None = None
    """Blocks that were handed over and not saved, for want of room in the queue."""
    store_failed: int | None = None
    """The same because nodes did not take them: down, full, or too slow."""
    window_records: int | None = None
    window_bytes: int | None = None
    window_memory_bytes: int | None = None
    window_hit_ratio: float | None = None
    """Of the keys whose window state was looked for: found on this host or another."""
    directory_entries: int | None = None
    """Entries of its part of the window directory; None where it holds none."""
    directory_share: float | None = None
    """Of the entries of all parts that are known."""

    @property
    def state(self) -> str:
        """One word for a table."""
        return "alive" if self.is_alive else "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsStatus:
    """All agents that are known: the map's entrypoints first."""

    agents: tuple[AgentStatus, ...] = ()
    unasked: int = 0
    """At least so many more are known to a directory, which names only some of many."""

    @property
    def entrypoints_down(self) -> list[str]:
        """Entrypoints of the map that do not answer."""
        return [one.agent for one in self.agents if one.entrypoint and not one.is_alive]

    def problems(self) -> list[str]:
        """A line for each agent that is down, or that could not save all it was given."""
        lines = [f"agent {one.agent}: {one.problem}" for one in self.agents if one.problem]
        for one in self.agents:
            failed, dropped = one.store_failed or 0, one.store_dropped or 0
            if failed or dropped:
                lines.append(
                    f"agent {one.agent}: {count_of(failed + dropped, 'block')} not saved since it"
                    f" started: {failed} failed, {dropped} dropped"
                )
        return lines

    def describe(self) -> str:
        """One line for a person."""
        alive = sum(one.is_alive for one in self.agents)
        line = f"{alive} of {count_of(len(self.agents), 'agent')} alive"
        down = self.entrypoints_down
        if down:
            # Their part of the directory is with the others as soon as those notice.
            line += f"; {count_of(len(down), 'entrypoint')} down: {', '.join(down)}"
        if self.unasked:
            line += f"; at least {self.unasked} more were not asked"
        return line

    def render_json(self) -> list[dict[str, Any]]:
        """For `cachalot status --json` and GET /api/agents."""
        return [asdict(one) | {"state": one.state} for one in self.agents]


def describe_agents(reports: Sequence[AgentReport]) -> AgentsStatus:
    """The status that follows from what agents said."""
    agents = [describe_agent(report) for report in reports]
    entries = sum(one.directory_entries or 0 for one in agents)
    if entries:
        agents = [
            one
            if one.directory_entries is None
            else replace(one, directory_share=one.directory_entries / entries)
            for one in agents
        ]
    known = max(
        (_integer(_directory_of(report).get("hosts")) or 0 for report in reports), default=0
    )
    heard = sum(one.silent_s is None for one in agents)
    return AgentsStatus(agents=tuple(agents), unasked=max(known - heard, 0))


def _directory_of(report: AgentReport) -> Mapping[str, Any]:
    return read_mapping(report.statistics.get("directory"))


def describe_agent(report: AgentReport) -> AgentStatus:
    """One agent's own figures."""
    said = report.statistics
    fallback = report.entrypoint or report.address
    if not report.is_alive:
        return AgentStatus(
            agent=fallback,
            address=report.address,
            entrypoint=report.entrypoint,
            is_alive=False,
            problem=_shown_text(_problem_of(report), PROBLEM_CHARACTERS_MAX),
            silent_s=report.silent_s,
        )
    arena, fetch, store, windows, directory = (
        read_mapping(said.get(name)) for name in ("arena", "fetch", "store", "windows", "directory")
    )
    name = said.get("agent")
    return AgentStatus(
        agent=_shown_text(name) if isinstance(name, str) and name else fallback,
        address=report.address,
        entrypoint=report.entrypoint,
        is_alive=True,
        pid=_integer(said.get("pid")),
        uptime_s=read_number(said.get("uptime_s")),
        roles=_read_roles(said.get("roles")),
        sessions=_integer(read_mapping(said.get("sessions")).get("open")),
        arena_bytes=_integer(arena.get("size_bytes")),
        arena_used_bytes=_integer(arena.get("leased_bytes")),
        runs=_integer(arena.get("runs")),
        waiting=_integer(arena.get("waiting")),
        fetch_queued=_integer(fetch.get("queued")),
        fetch_running=_integer(fetch.get("running")),
        fetched_bytes=_integer(fetch.get("bytes")),
        store_queued=_integer(store.get("queued")),
        store_dropped=_integer(store.get("dropped")),
        store_failed=_integer(store.get("failed")),
        window_records=_integer(windows.get("records")),
        window_bytes=_integer(windows.get("used_bytes")),
        window_memory_bytes=_integer(windows.get("memory_bytes")),
        window_hit_ratio=_hit_ratio(windows),
        directory_entries=_integer(directory.get("entries")),
    )


def _problem_of(report: AgentReport) -> str:
    if report.silent_s is None:
        return report.problem
    return f"silent for {format_duration(report.silent_s)}: {report.problem}"


def _integer(value: object) -> int | None:
    number = read_number(value)
    return None if number is None or isinstance(value, bool) else int(number)


def _read_roles(said: object) -> tuple[str, ...]:
    roles = said[:ROLES_MAX] if isinstance(said, list) else []
    return tuple(_shown_text(role) for role in roles if isinstance(role, str))


def _shown_text(said: str, characters_max: int = TEXT_CHARACTERS_MAX) -> str:
    """Text of another process, of bounded length, that does nothing to a terminal or a line."""
    return "".join(c if c.isprintable() else "?" for c in said[:characters_max])


def _hit_ratio(windows: Mapping[str, Any]) -> float | None:
    asked = read_number(windows.get("lookups"))
    here, elsewhere = (read_number(windows.get(name)) for name in ("found_here", "found_elsewhere"))
    if not asked or here is None or elsewhere is None:
        return None
    return min((here + elsewhere) / asked, 1.0)


def render_row(agent: AgentStatus) -> list[str]:
    """The cells of one agent, in the order of COLUMNS; "-" for what is not known."""
    return [
        agent.agent,
        agent.state,
        _shown(agent.pid),
        agent.address or "-",
        ",".join(agent.roles) or "-",
        "-" if agent.arena_used_bytes is None else format_size(agent.arena_used_bytes),
        "-" if agent.arena_bytes is None else format_size(agent.arena_bytes),
        _shown(agent.runs),
        _shown(agent.fetch_queued),
        _shown(agent.window_records),
        _ratio(agent.window_hit_ratio),
        _ratio(agent.directory_share),
        "-" if agent.uptime_s is None else format_duration(agent.uptime_s),
    ]


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)


def _ratio(value: float | None) -> str:
    return "-" if value is None else format_ratio(value)
