"""Asks agents what they are and do: those of the map, and those that their directories know.

Over the data plane, at the address where other agents reach them. Where no entrypoint answers,
nobody knows of the other agents; each one's own socket tells of it all the same (`agent_socket`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from .. import wire
from ..client.inquiry import ask_node
from ..client.statistics import read_statistics
from ..cluster.entities import ClusterMap
from ..errors import NodeError
from ..metrics.readings import read_mapping, read_number
from ..window.messages import is_host
from ..window.peers import open_channel

HOSTS_ASKED_MAX = 512
"""Beside the entrypoints; more than so many are not asked."""
SILENT_ASKED_MAX = 64
"""The same of agents that directories have not heard of for a while."""
ASKED_AT_ONCE_MAX = 256
"""Each takes a descriptor."""
FIGURES_KEPT_MAX = 48
TEXT_KEPT_CHARACTERS_MAX = 128
LEVELS_KEPT = 2
"""What is kept of a document of an agent that is not in the map: enough for its status. Of so many
agents, documents as large as a frame allows would take all memory there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """One agent: `statistics` is its STAT answer, empty if it gave none; then `problem` says why.

    `entrypoint`: its name in the map, None for one that only a directory knows; of such a one only
    the figures are there (`keep_figures`).
    """

    address: str
    entrypoint: str | None
    is_alive: bool
    problem: str = ""
    silent_s: float | None = None
    """So long it has not spoken with the directories that knew it; None for one that does."""
    statistics: dict[str, Any] = field(default_factory=dict)


async def ask_agents(
    cluster_map: ClusterMap,
    *,
    deadline_s: float,
    loop: asyncio.AbstractEventLoop,
    clock: Callable[[], float],
) -> list[AgentReport]:
    """A report for each entrypoint in the map's order, then for the other agents by address.

    Two rounds of at most `deadline_s` each. Never raises because agents do not answer.
    """
    free = asyncio.Semaphore(ASKED_AT_ONCE_MAX)
    begun: set[str] = set()

    async def ask(address: str, entrypoint: str | None) -> AgentReport:
        async with free:
            begun.add(address)
            return await _ask_one(cluster_map, address, entrypoint, deadline_s, loop, clock)

    async def ask_all(wanted: Sequence[tuple[str, str | None]]) -> list[AgentReport]:
        tasks = [asyncio.ensure_future(ask(address, name)) for address, name in wanted]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=deadline_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [
            _silent(*one, deadline_s, is_asked=one[0] in begun)
            if task.cancelled()
            else task.result()
            for one, task in zip(wanted, tasks, strict=True)
        ]

    found = await ask_all([(point.address, point.name) for point in cluster_map.entrypoints])
    silent = find_silent_agents(found)
    others = [*find_other_agents(found)[:HOSTS_ASKED_MAX], *[*silent][:SILENT_ASKED_MAX]]
    answers = await ask_all([(address, None) for address in others])
    return found + [replace(one, silent_s=silent.get(one.address)) for one in answers]


def keep_figures(said: dict[str, Any], levels: int = LEVELS_KEPT) -> dict[str, Any]:
    """A copy of a status document with as much of it as a status needs, and of bounded size. Pure.

    Lists keep what is text in them, such as roles.
    """
    return {
        name[:TEXT_KEPT_CHARACTERS_MAX]: _keep(value, levels - 1)
        for name, value in islice(said.items(), FIGURES_KEPT_MAX)
    }


def _keep(value: object, levels: int) -> object:
    if isinstance(value, dict):
        return keep_figures(value, levels) if levels else {}
    if isinstance(value, list):
        return [_keep(one, 0) for one in value[:FIGURES_KEPT_MAX] if isinstance(one, str)]
    return value[:TEXT_KEPT_CHARACTERS_MAX] if isinstance(value, str) else value


def find_other_agents(reports: Sequence[AgentReport]) -> list[str]:
    """Addresses of agents that the directories of these know and that are none of these. Pure."""
    asked = _addresses_of(reports)
    said = [host for host, _ in _read_hosts(reports, "hosts_seen") if host not in asked]
    return sorted(set(said))


def find_silent_agents(reports: Sequence[AgentReport]) -> dict[str, float]:
    """Agents that fell silent lately without a farewell, and for how many seconds. Pure.

    One that is these, or that speaks with any directory, is not among them. The newest silence
    comes first.
    """
    heard = _addresses_of(reports) | {host for host, _ in _read_hosts(reports, "hosts_seen")}
    found: dict[str, float] = {}
    for host, said in _read_hosts(reports, "hosts_missed"):
        silent_s = read_number(said.get("silent_s"))
        if host not in heard and silent_s is not None:
            found[host] = min(silent_s, found.get(host, silent_s))
    return dict(sorted(found.items(), key=lambda item: (item[1], item[0])))


def _addresses_of(reports: Sequence[AgentReport]) -> set[str]:
    # The map may name a host where directories, which must make nobody ask for names, have its IP.
    addresses = {report.address for report in reports}
    return addresses | {str(report.statistics.get("address")) for report in reports}


def _read_hosts(
    reports: Sequence[AgentReport], field_name: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Addresses that directories name in a list, each with what is said of it there."""
    for report in reports:
        listed = read_mapping(report.statistics.get("directory")).get(field_name)
        for said in map(read_mapping, listed if isinstance(listed, list) else []):
            host = said.get("address")
            if isinstance(host, str) and is_host(host):
                yield host, said


async def _ask_one(
    cluster_map: ClusterMap,
    address: str,
    entrypoint: str | None,
    deadline_s: float,
    loop: asyncio.AbstractEventLoop,
    clock: Callable[[], float],
) -> AgentReport:
    name = entrypoint or address
    channel = open_channel(
        address, cluster=cluster_map.cluster_id, loop=loop, clock=clock, name=name
    )
    try:
        body = await ask_node(channel, wire.Op.STAT, deadline_s=deadline_s, loop=loop)
        statistics = read_statistics(name, body)
        if entrypoint is None:
            statistics = keep_figures(statistics)
    except NodeError as error:
        return AgentReport(
            address=address, entrypoint=entrypoint, is_alive=False, problem=error.detail
        )
    finally:
        channel.close()
    return AgentReport(address=address, entrypoint=entrypoint, is_alive=True, statistics=statistics)


def _silent(
    address: str, entrypoint: str | None, deadline_s: float, *, is_asked: bool
) -> AgentReport:
    problem = f"no answer within {deadline_s:.2f} s"
    if not is_asked:
        # It stood in line behind others: that says nothing about it.
        problem = f"not asked within {deadline_s:.2f} s: too many others do not answer"
    return AgentReport(address=address, entrypoint=entrypoint, is_alive=False, problem=problem)
