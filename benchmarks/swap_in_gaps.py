"""What stands between the DMAs of a load's sections: the same bytes as one copy and in other ways.

    python -m benchmarks.swap_in_gaps [--blocks 64 128] [--rounds 60]

Needs a GPU. Prints a JSON line for each number of V4.1-Flash blocks: `us` of the bus, medians, from
a moment when all is queued, and `of_one`, the rate against that of one copy. The ways:

    one          one copy
    sections     a copy for each of the four sections, in one stream
    two          a copy for two sections, and one for the other two
    events       as `sections`, with an event behind each that another stream waits for
    in turn      as `sections`, by two streams in turn, each behind the other's event
    graph        `sections`, captured in a graph
    batch        `sections` in one call (cudaMemcpyBatchAsync)
"""

# The tensor library reads its environment as it is loaded, so that is prepared between imports.
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from statistics import median

from engine.threads import prepare_environment

prepare_environment()

import numpy as np
import torch

from engine.kv.cuda_runtime import CudaRuntime, open_runtime
from engine.kv.cuda_streams import make_stream
from kvstore.admin.machine import describe_machine

from .swap_in_ways import make_timer

WIDTHS = (22_784, 22_784, 22_784, 45_568)
RUNS = 8
"""Places in the host's memory that are taken in turn, so that no cache holds one."""
GATE_CYCLES = 2_000_000
"""A millisecond of a GPU: by then all is queued."""


class Copies:
    """All ways to copy one run of sections to the device."""

    def __init__(self, runtime: CudaRuntime, device: torch.device, blocks: int) -> None:
        self._runtime = runtime
        self._sizes = [blocks * width for width in WIDTHS]
        self.run_bytes = sum(self._sizes)
        self._host = torch.empty(RUNS * self.run_bytes, dtype=torch.uint8, pin_memory=True).zero_()
        self._there = torch.empty(self.run_bytes, dtype=torch.uint8, device=device)
        self.stream, self._other, self._waiting = (make_stream(device) for _ in range(3))
        self._graphs = [self._capture(run) for run in range(RUNS)]

    def _parts(self, run: int, sizes: list[int]) -> Iterator[tuple[int, int, int]]:
        """Target, source and size of each part."""
        at = 0
        for size in sizes:
            source = self._host.data_ptr() + run * self.run_bytes + at
            yield self._there.data_ptr() + at, source, size
            at += size

    def _copy(self, run: int, sizes: list[int], stream: torch.cuda.Stream) -> None:
        for part in self._parts(run, sizes):
            self._runtime.copy(*part, stream.cuda_stream)

    def _capture(self, run: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._waiting, capture_error_mode="thread_local"):
            self._copy(run, self._sizes, self._waiting)
        return graph

    def one(self, run: int) -> None:
        self._copy(run, [self.run_bytes], self.stream)

    def sections(self, run: int) -> None:
        self._copy(run, self._sizes, self.stream)

    def two(self, run: int) -> None:
        first = sum(self._sizes[:2])
        self._copy(run, [first, self.run_bytes - first], self.stream)

    def events(self, run: int) -> None:
        for part in self._parts(run, self._sizes):
            self._runtime.copy(*part, self.stream.cuda_stream)
            self._waiting.wait_event(self.stream.record_event())
        self.stream.wait_stream(self._waiting)

    def in_turn(self, run: int) -> None:
        self._other.wait_event(self.stream.record_event())
        pair = (self.stream, self._other)
        for number, part in enumerate(self._parts(run, self._sizes)):
            mine, next_one = pair[number % 2], pair[1 - number % 2]
            self._runtime.copy(*part, mine.cuda_stream)
            next_one.wait_event(mine.record_event())

    def graph(self, run: int) -> None:
        self._graphs[run].replay()

    def batch(self, run: int) -> None:
        columns = np.array(list(self._parts(run, self._sizes)), np.uint64).T
        targets, sources, sizes = (np.ascontiguousarray(column) for column in columns)
        self._runtime.copy_batch(targets, sources, sizes, self.stream.cuda_stream)

    def time_s(self, way: Callable[[int], None], run: int) -> float:
        """Seconds of the stream, behind a gate."""
        begin, end = make_timer(), make_timer()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(GATE_CYCLES)  # type: ignore[no-untyped-call]
            begin.record()
            way(run)
            end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def measure(copies: Copies, rounds: int) -> dict[str, dict[str, float]]:
    """All ways take turns; the first round warms up."""
    ways = {
        "one": copies.one,
        "sections": copies.sections,
        "two": copies.two,
        "events": copies.events,
        "in turn": copies.in_turn,
        "graph": copies.graph,
        "batch": copies.batch,
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            seconds = copies.time_s(way, number % RUNS)
            if number:
                took[name].append(seconds)
    base_s = median(took["one"])
    return {
        "us": {name: round(median(times) * 1e6, 1) for name, times in took.items()},
        "of_one": {name: round(base_s / median(times), 3) for name, times in took.items()},
    }


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("swap_in_gaps: given no CUDA device, expected one")
    device, runtime = torch.device("cuda", 0), open_runtime()
    for blocks in options.blocks:
        found = measure(Copies(runtime, device, blocks), options.rounds)
        line = {"benchmark": "swap_in_gaps", "blocks": blocks, **found, **describe_machine()}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
