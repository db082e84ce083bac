"""Nodes that are lost, or stand still: their kernel takes what is sent, and nobody answers."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from kvstore.admin.local_cluster import LocalCluster
from kvstore.client.store_client import StoreClient
from kvstore.cluster.entities import ClusterMap
from kvstore.cluster.placement import Placement


@contextmanager
def stopped(cluster: LocalCluster, names: Sequence[str]) -> Iterator[None]:
    """SIGSTOP for these nodes, and SIGCONT at the end."""
    try:
        for name in names:
            cluster.kill(name, signal.SIGSTOP)
        yield
    finally:
        for name in names:
            cluster.kill(name, signal.SIGCONT)


@asynccontextmanager
async def client_of(cluster_map: ClusterMap) -> AsyncIterator[StoreClient]:
    """A client that is closed without waiting for nodes that are still busy."""
    client = StoreClient(cluster_map)
    try:
        yield client
    finally:
        client.close()


def without_nodes(cluster_map: ClusterMap, lost: set[int], port: int) -> ClusterMap:
    """The map with the addresses of some nodes replaced by one that refuses."""
    nodes = tuple(
        dataclasses.replace(node, address=f"127.0.0.{i + 1}:{port}") if i in lost else node
        for i, node in enumerate(cluster_map.nodes)
    )
    return dataclasses.replace(cluster_map, nodes=nodes)


def nodes_by_shard(cluster_map: ClusterMap, keys: Sequence[bytes]) -> list[str]:
    """Names of the nodes that hold the shards of a chain's first span, in shard order."""
    targets = Placement(cluster_map).place(keys[0]).targets_by_shard()
    return [cluster_map.node_of(target).name for target in targets]


def count_descriptors() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
