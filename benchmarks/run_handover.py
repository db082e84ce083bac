"""What it takes to hand a run of blocks to another engine, on one host and from host to host.

Starts a node and two agents on this machine, with blocks of V4.1-Flash (113,920 B). Prints JSON
lines: microseconds of `offer_run`, of `take_run` at the same agent and at the other one, and of a
bare copy of as many bytes from one process to another over loopback; medians, and bests.
`of_socket_copy` is the ratio of the medians. Agents, engines and node share the machine's cores.

    python -m benchmarks.run_handover [--rounds 30]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.local_folder import LocalAgentOptions
from kvstore.admin.machine import describe_machine
from kvstore.client import AgentClient, BlockingAgentClient, BlockLayout, Namespace, Section

SECTIONS = (22_784, 22_784, 22_784, 45_568)
LAYOUT = BlockLayout(tuple(Section(f"s{index}", size) for index, size in enumerate(SECTIONS)))
NAMESPACE = Namespace(model="handover", weights="w", tokenizer="t", layout=LAYOUT)
BLOCKS = (1, 8, 64, 512)
ARENA_BYTES = 256 << 20
DEADLINE_S = 20.0


class Times:
    """Microseconds, by name."""

    def __init__(self) -> None:
        self.us: dict[str, list[float]] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        begun_s = time.perf_counter()
        yield
        self.us.setdefault(name, []).append((time.perf_counter() - begun_s) * 1e6)


@contextmanager
def sending_process(length: int) -> Iterator[socket.socket]:
    """A connection to a process that sends `length` bytes for each byte it gets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = os.fork()
        if child == 0:
            try:
                _send_on_demand(listener.getsockname(), length)
            finally:
                os._exit(0)  # whatever happens: what is behind this is the parent's
        connection, _ = listener.accept()
    try:
        with connection:
            yield connection
    finally:
        os.waitpid(child, 0)


def _send_on_demand(address: tuple[str, int], length: int) -> None:
    with socket.create_connection(address) as connection:
        content = bytes(length)
        while connection.recv(1):
            connection.sendall(content)


def copy_over_socket(connection: socket.socket, into: memoryview) -> None:
    connection.sendall(b"x")
    at = 0
    while at < len(into):
        at += connection.recv_into(into[at:])


def measure(
    giver: BlockingAgentClient, takers: dict[str, BlockingAgentClient], blocks: int, rounds: int
) -> Times:
    times = Times()
    length = blocks * LAYOUT.block_bytes
    into = memoryview(bytearray(length))
    with sending_process(length) as connection:
        for _ in range(rounds):
            for name, taker in takers.items():
                run = giver.lease_run(NAMESPACE, blocks, deadline_s=DEADLINE_S)
                assert run is not None
                assert run.blocks == blocks
                run.section(0)[:8] = bytes(8)
                with times.measure("offer"):
                    offer = giver.offer_run(run)
                with times.measure(name):
                    taken = taker.take_run(NAMESPACE, offer, deadline_s=DEADLINE_S)
                assert taken is not None
                taken.release()
            with times.measure("socket_copy"):
                copy_over_socket(connection, into)
    return times


def report(times: Times, blocks: int) -> None:
    medians = {name: statistics.median(us) for name, us in times.us.items()}
    line = {
        "benchmark": "run_handover",
        "blocks": blocks,
        "bytes": blocks * LAYOUT.block_bytes,
        **{f"{name}_us": round(us) for name, us in medians.items()},
        **{f"{name}_best_us": round(min(us)) for name, us in times.us.items()},
        "of_socket_copy": round(medians["take_from_other_host"] / medians["socket_copy"], 2),
        "gb_per_s": round(blocks * LAYOUT.block_bytes / medians["take_from_other_host"] / 1e3, 2),
        "rounds": len(times.us["socket_copy"]),
        "machine": describe_machine(),
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ca-") as folder:
        options = LocalAgentOptions(arena_bytes=ARENA_BYTES, window_memory_bytes=1 << 20)
        with (
            LocalCluster.start(
                Path(folder) / "c",
                nodes=1,
                k=1,
                m=0,
                target_size_bytes=8 << 20,
                agents=2,
                agent_options=options,
            ) as cluster,
            AgentClient.open(cluster.agents.socket("a01")) as giver,
            AgentClient.open(cluster.agents.socket("a01")) as same,
            AgentClient.open(cluster.agents.socket("a02")) as other,
        ):
            takers = {"take_on_same_host": same, "take_from_other_host": other}
            for blocks in BLOCKS:
                report(measure(giver, takers, blocks, rounds), blocks)


if __name__ == "__main__":
    main()
