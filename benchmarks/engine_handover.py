"""Hand-over of a V4.1 sequence from one engine to another: how long it takes, and what is left of
that after the last pass.

    python -m benchmarks.engine_handover [--config v41-flash] [--tokens 131 8192] [--rounds 9]

Starts three storage nodes and two agents in a temporary folder, and ends them. Prints a JSON line
for each length; times in ms of wall clock, medians.

    engine_ms          the engine's thread, in `finish`: it packs state and open block
    send_ms            from `finish` to the ticket, if nothing was copied before
    send_overlapped_ms the same, if the complete blocks were copied while a pass was computed
    pass_ms            that pass: matrix products as long as all of it takes, alone
    pass_beside_ms     the same products while blocks are copied
    receive_ms         from the ticket to the sequence in the other engine, on the same host
    receive_engine_ms  of that, the engine's thread
    receive_remote_ms  as receive_ms, from another host's agent (over loopback)
    memcpy_ms, xxh3_ms a plain copy of the same bytes, and their checksum

Rows and entries are noise, and no model is run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from engine.block_pool import BlockPool
from engine.handover.receiver import HandoverReceiver
from engine.handover.sender import HandoverSender
from engine.models.deepseek_v41.config import DeepseekV41Config
from engine.models.deepseek_v41.layout import block_layout, handover_layout
from engine.models.deepseek_v41.model import DeepseekV41
from engine.models.deepseek_v41.shipped import SHIPPED_CONFIGS, shipped_config
from engine.models.deepseek_v41.state import StatePool
from engine.request import Request
from engine.request_checks import PreparedRequest
from engine.runners.v41_runner import V41Runner
from engine.sequence import Sequence
from engine.store_faults import StoreFaults
from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.machine import describe_machine
from kvstore.client import AgentClient, BlockingAgentClient
from kvstore.key import KeyChain, Namespace
from kvstore.layout import BLOCK_TOKENS

from .v41_handover import fill_state

WAIT_S = 30.0
PRODUCTS = 400
"""Of 192 x 192 numbers: as short as the calls of a small model, so that the interpreter has to be
asked for again and again."""


def median_ms(times_s: list[float]) -> float:
    return round(statistics.median(times_s) * 1e3, 3)


def timed(action: Callable[[], object]) -> float:
    """Seconds of one call."""
    begun_s = time.perf_counter()
    action()
    return time.perf_counter() - begun_s


class UnscheduledEngine:
    """A `ReceivingEngine` of one runner, and sequences that look computed."""

    def __init__(self, config: DeepseekV41Config, blocks: int) -> None:
        layout = block_layout(config)
        pool = BlockPool(block_bytes=layout.block_bytes, capacity_blocks=blocks)
        pool.memory.random_(generator=torch.Generator().manual_seed(2))
        self.config = config
        self.attached: list[Sequence] = []
        self.runner = V41Runner(
            cast(DeepseekV41, SimpleNamespace(config=config)),
            pool=pool,
            states=StatePool(config, 1),
            namespace=Namespace(model="noise", weights="w", tokenizer="t", layout=layout),
        )

    def open_for_handover(self, asked: PreparedRequest, /) -> Sequence:
        return self.open(asked.request)

    def open(self, request: Request) -> Sequence:
        sequence = Sequence(request)
        blocks = -(-len(sequence.token_ids) // BLOCK_TOKENS)
        sequence.block_ids = self.runner.pool.allocate(blocks)
        self.runner.open(sequence)
        return sequence

    def attach(self, sequence: Sequence, _chain: KeyChain, /) -> None:
        self.attached.append(sequence)

    def release(self, sequence: Sequence) -> None:
        self.runner.close(sequence)
        self.runner.pool.release(sequence.block_ids)

    def computed(self, tokens: int) -> Sequence:
        """A sequence of a prompt that is computed, and its first token."""
        request = Request(request_id="r", prompt_ids=[7] * tokens, max_tokens=9, answered_ids=(7,))
        sequence = self.open(request)
        fill_state(self.config, sequence.state, tokens)
        sequence.state.block_ids = sequence.block_ids
        sequence.computed_tokens = tokens
        return sequence


@dataclass(eq=False)
class Bench:
    """Two engines of one host, and the client of another host's agent."""

    config: DeepseekV41Config
    tokens: int
    client: BlockingAgentClient
    remote: BlockingAgentClient
    source: UnscheduledEngine = field(init=False)
    target: UnscheduledEngine = field(init=False)

    def __post_init__(self) -> None:
        blocks = self.tokens // BLOCK_TOKENS + 1
        self.source = UnscheduledEngine(self.config, blocks)
        self.target = UnscheduledEngine(self.config, blocks)
        self.sequence = self.source.computed(self.tokens)
        self.sender = HandoverSender(self.client, self.source.runner, faults=StoreFaults())
        self.receivers = [
            HandoverReceiver(client, self.target, on_change=lambda: None)
            for client in (self.client, self.remote)
        ]
        self.left = torch.randn(192, 192)

    def multiply(self) -> None:
        """As a pass of a model keeps its thread busy."""
        for _ in range(PRODUCTS):
            self.left @ self.left

    def send(self) -> tuple[bytes, float, float]:
        """The ticket; seconds until it came, and of the engine's thread."""
        begun_s = time.perf_counter()
        sent = self.sender.finish(self.sequence)
        engine_s = time.perf_counter() - begun_s
        ticket = sent.result(timeout=WAIT_S)
        assert ticket is not None, "the arena is full, or the agent is gone"
        return ticket, time.perf_counter() - begun_s, engine_s

    def begin(self) -> float:
        """Seconds of a pass, of which the last part of the prompt is computed, beside the copy."""
        tokens = self.tokens
        # As before that pass: all of the complete blocks are there, the open one is not.
        self.sequence.computed_tokens = tokens - tokens % BLOCK_TOKENS
        self.sequence.token_ids.pop()
        self.sender.begin(self.sequence)
        self.sequence.token_ids.append(7)
        self.sequence.computed_tokens = tokens
        return timed(self.multiply)

    def receive(self, receiver: HandoverReceiver, ticket: bytes) -> tuple[float, float]:
        """Seconds until the sequence was attached, and of the engine's thread."""
        begun_s = time.perf_counter()
        engine_s = timed(lambda: receiver.begin(ticket, "r"))
        while not self.target.attached:
            assert time.perf_counter() - begun_s < WAIT_S
            time.sleep(0.0002)
            engine_s += timed(lambda: check_arrivals(receiver))
        whole_s = time.perf_counter() - begun_s
        self.target.release(self.target.attached.pop())
        return whole_s, engine_s

    def close(self) -> None:
        assert self.sender.close(WAIT_S)
        for receiver in self.receivers:
            assert receiver.close(WAIT_S)


def check_arrivals(receiver: HandoverReceiver) -> None:
    for arrival in receiver.poll():
        assert arrival.refusal is None, arrival.refusal


def measure(bench: Bench, rounds: int) -> dict[str, float]:
    """One round of each more than `rounds`, of which the first, in fresh memory, does not count."""
    times: dict[str, list[float]] = {}

    def note(**seconds: float) -> None:
        for name, value in seconds.items():
            times.setdefault(name, []).append(value)

    for _ in range(rounds + 1):
        ticket, send_s, engine_s = bench.send()
        receive_s, receive_engine_s = bench.receive(bench.receivers[0], ticket)
        note(engine=engine_s, send=send_s, receive=receive_s, receive_engine=receive_engine_s)
        ticket, _, _ = bench.send()
        remote_s, _ = bench.receive(bench.receivers[1], ticket)
        note(receive_remote=remote_s, **{"pass": timed(bench.multiply)})
        beside_s = bench.begin()
        ticket, overlapped_s, _ = bench.send()
        bench.receive(bench.receivers[0], ticket)
        note(pass_beside=beside_s, send_overlapped=overlapped_s)
    return {f"{name}_ms": median_ms(seconds[1:]) for name, seconds in times.items()}


def baselines(byte_count: int) -> dict[str, float]:
    source, target = np.ones(byte_count, dtype=np.uint8), np.zeros(byte_count, dtype=np.uint8)
    data = source.data
    return {
        "bytes": byte_count,
        "memcpy_ms": median_ms([timed(lambda: np.copyto(target, source)) for _ in range(9)]),
        "xxh3_ms": median_ms([timed(lambda: xxh3_64_intdigest(data)) for _ in range(9)]),
    }


@contextmanager
def open_clients(folder: Path) -> Iterator[tuple[BlockingAgentClient, BlockingAgentClient]]:
    """Clients of the agents of two hosts."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster.start(folder, nodes=3, k=2, m=1, agents=2))
        sockets = [cluster.agents.socket(name) for name in ("a01", "a02")]
        first, second = (stack.enter_context(AgentClient.open(socket)) for socket in sockets)
        yield first, second


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", choices=SHIPPED_CONFIGS, default="v41-flash")
    parser.add_argument("--tokens", type=int, nargs="+", default=[131, 8_192])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    config = shipped_config(options.config)
    for tokens in options.tokens:
        if not 1 <= tokens < config.positions_max:
            parser.error(f"--tokens: given {tokens}, expected 1 to {config.positions_max - 1}")
    torch.set_num_threads(1)
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder, open_clients(Path(folder) / "c") as clients:
        for tokens in options.tokens:
            bench = Bench(config, tokens, *clients)
            block_bytes = block_layout(config).block_bytes
            state_bytes = handover_layout(config).block_bytes
            figures = {
                **baselines(-(-tokens // BLOCK_TOKENS) * block_bytes + state_bytes),
                **measure(bench, options.rounds),
            }
            bench.close()
            facts = {"benchmark": "engine_handover", "config": options.config, "tokens": tokens}
            print(json.dumps({**facts, **figures, "machine": machine}), flush=True)


if __name__ == "__main__":
    main()
