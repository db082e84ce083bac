"""Connections to the agents of other hosts: a bounded number, least used out.

An agent is reached at an address that the directory told, or an offer of a run. Each has a circuit
breaker, so that a host which does not answer costs one deadline and not one for each question.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from ..client.channel import NodeChannel
from ..client.health import Breaker, NodeHealth
from ..cluster.address import host_of, port_of

PEERS_MAX = 256
AGENT_TARGET = "agent"
"""The name that an agent has in HELLO, where a storage node has that of a target."""


def open_channel(
    address: str,
    *,
    cluster: bytes,
    loop: asyncio.AbstractEventLoop,
    clock: Callable[[], float],
    name: str = "",
) -> NodeChannel:
    """A channel to the agent at `address`, "host:port"; `name` is for the log."""
    return NodeChannel(
        node=name or f"agent {address}",
        address=(host_of(address), port_of(address)),
        cluster=cluster,
        target=AGENT_TARGET,
        target_index=0,
        epoch=0,  # an agent looks at no epoch: its answers do not depend on the map
        health=NodeHealth(clock, Breaker(clock)),
        loop=loop,
        clock=clock,
    )


class Peers:
    """Channels by address. Belongs to one event loop."""

    def __init__(
        self,
        *,
        cluster: bytes,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        count_max: int = PEERS_MAX,
    ) -> None:
        self._cluster = cluster
        self._loop = loop
        self._clock = clock
        self._count_max = count_max
        self._channels: OrderedDict[str, NodeChannel] = OrderedDict()

    def __len__(self) -> int:
        return len(self._channels)

    def channel(self, address: str) -> NodeChannel:
        """The channel to the agent at `address`, which `is_host` has accepted."""
        channel = self._channels.get(address)
        if channel is not None:
            self._channels.move_to_end(address)
            return channel
        if len(self._channels) >= self._count_max:
            self._close_one()
        channel = open_channel(address, cluster=self._cluster, loop=self._loop, clock=self._clock)
        self._channels[address] = channel
        return channel

    def _close_one(self) -> None:
        """Closes the one that was used longest ago, of those that wait for nothing if any does."""
        idle = (address for address, channel in self._channels.items() if channel.is_idle)
        address = next(idle, next(iter(self._channels)))
        self._channels.pop(address).close()

    def close(self) -> None:
        """Closes all; fetches that wait fail."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
