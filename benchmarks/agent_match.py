"""What an engine waits for before its first byte: the match of a long prompt, by the host's agent.

A prompt of 131,072 tokens (1,024 blocks of V4.1-Flash) is stored in three storage groups, 12 nodes
each; its window state is with another host's agent, which one of three entrypoints knows. A fresh
prompt is one that this client has not seen (its keys are hashed whole), a grown one has 128 tokens
more than the prompt before it. Prints JSON lines: benchmark, case, in milliseconds the median and
the 99th percentile of the whole call and of its parts: hashing, the answer of the storage nodes,
the look-up of the window state, and the socket (the rest); commit, machine.

    python -m benchmarks.agent_match [--rounds 200] [--tokens 131072]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.machine import describe_machine
from kvstore.client import AgentClient, BlockLayout, Namespace, PromptMatch, Section
from kvstore.cluster.entities import Group
from kvstore.cluster.map import write_cluster_map
from kvstore.layout import BLOCK_TOKENS

LAYOUT = BlockLayout(
    (Section("L2", 22_784), Section("L8", 22_784), Section("L14", 22_784), Section("L20", 45_568))
)
WINDOW = BlockLayout(tuple(Section(f"layer {layer}", 134 * 528) for layer in range(20)))
GROUPS, WIDTH, ENTRYPOINTS = 3, 12, 3
SAVE_BLOCKS = 128
SETTLE_S = 3.0
"""Agents look at the map each second; window state is announced within a few milliseconds."""
GOAL_MS, HASH_GOAL_MS = 5.0, 1.0


@dataclass
class Times:
    """Milliseconds of each round."""

    parts: dict[str, list[float]] = field(
        default_factory=lambda: {
            name: [] for name in ("whole", "hash", "store", "lookup", "socket")
        }
    )

    def add(self, whole_s: float, found: PromptMatch) -> None:
        """Takes down one match."""
        rest_s = whole_s - found.hash_s - found.match_s - found.lookup_s
        took_s = (whole_s, found.hash_s, found.match_s, found.lookup_s, rest_s)
        for times, seconds in zip(self.parts.values(), took_s, strict=True):
            times.append(seconds * 1e3)

    def describe(self) -> dict[str, object]:
        """Median and 99th percentile of each part."""
        return {
            f"{name}_ms": {
                "median": round(statistics.median(times), 3),
                "p99": round(float(np.percentile(times, 99)), 3),
            }
            for name, times in self.parts.items()
        }


def divide_into_groups(cluster: LocalCluster) -> None:
    """Replace the map's groups by three that have no node in common."""
    cluster_map = cluster.map
    names = [target.name for target in cluster_map.targets]
    groups = tuple(
        Group(name=f"g{number + 1}", targets=tuple(names[number * WIDTH : (number + 1) * WIDTH]))
        for number in range(GROUPS)
    )
    changed = dataclasses.replace(cluster_map, epoch=cluster_map.epoch + 1, groups=groups)
    write_cluster_map(changed, cluster.cluster_path)


async def store_prompt(
    cluster: LocalCluster, namespace: Namespace, tokens: NDArray[np.int32]
) -> None:
    """Save the prompt's blocks by the first agent; keep its window state with the second."""
    keys = namespace.block_keys(tokens)
    rng = np.random.default_rng(1)
    async with AgentClient.connect(cluster.agents.socket("a01")) as agent:
        for first in range(0, len(keys), SAVE_BLOCKS):
            chain = keys[: first + SAVE_BLOCKS]
            blocks = [rng.bytes(LAYOUT.block_bytes) for _ in chain[first:]]
            saved = await agent.save(namespace, chain, blocks, first_block=first)
            assert saved.failed == 0, saved
        plan = (await agent.match(namespace, tokens)).plan
    async with AgentClient.connect(cluster.agents.socket("a02")) as agent:
        await agent.open_namespace(namespace, window_layout=WINDOW)
        key = keys[plan.stored_blocks - 1]
        assert await agent.put_window(namespace, key, bytes(WINDOW.block_bytes))


async def timed_match(
    agent: AgentClient, namespace: Namespace, tokens: NDArray[np.int32], times: Times
) -> PromptMatch:
    begun_s = time.perf_counter()
    found = await agent.match(namespace, tokens)
    times.add(time.perf_counter() - begun_s, found)
    return found


async def measure(cluster: LocalCluster, tokens: NDArray[np.int32], rounds: int) -> None:
    """Prints the figures of a fresh and of a grown prompt."""
    namespace = Namespace(model="m", weights="w", tokenizer="t", layout=LAYOUT)
    await asyncio.sleep(SETTLE_S)
    await store_prompt(cluster, namespace, tokens)
    await asyncio.sleep(SETTLE_S)
    cases = {"fresh": Times(), "grown": Times()}
    socket = cluster.agents.socket("a01")
    for _ in range(rounds):
        # A client of its own each time: it remembers no prompt.
        async with AgentClient.connect(socket) as agent:
            await agent.open_namespace(namespace, window_layout=WINDOW)
            fresh = await timed_match(agent, namespace, tokens, cases["fresh"])
        async with AgentClient.connect(socket) as agent:
            await agent.open_namespace(namespace, window_layout=WINDOW)
            await agent.match(namespace, tokens[:-BLOCK_TOKENS])
            grown = await timed_match(agent, namespace, tokens, cases["grown"])
        for found in (fresh, grown):
            assert found.matched_blocks == len(tokens) // BLOCK_TOKENS, found
            assert found.window_anchor == found.hit_tokens, found
            assert found.window_host, found
    for case, times in cases.items():
        row = {
            "benchmark": "agent_match",
            "case": case,
            "tokens": len(tokens),
            "groups": GROUPS,
            "entrypoints": ENTRYPOINTS,
            "rounds": rounds,
            **times.describe(),
            "goal_ms": GOAL_MS,
            "hash_goal_ms": HASH_GOAL_MS,
            **describe_machine(),
        }
        print(json.dumps(row), flush=True)


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=131_072)
    options = parser.parse_args()
    tokens = np.random.default_rng(0).integers(0, 129_280, options.tokens, dtype=np.int32)
    with (
        # A short name: the agents' sockets lie in it.
        tempfile.TemporaryDirectory(prefix="am-", dir="/tmp") as folder,
        LocalCluster.start(
            Path(folder) / "c",
            nodes=GROUPS * WIDTH,
            k=10,
            m=2,
            target_size_bytes=64 << 20,
            segment_size_bytes=16 << 20,
            agents=ENTRYPOINTS,
        ) as cluster,
    ):
        divide_into_groups(cluster)
        asyncio.run(measure(cluster, tokens, options.rounds))


if __name__ == "__main__":
    main()
