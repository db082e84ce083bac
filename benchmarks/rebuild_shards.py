"""Lost shards of blocks of V4.1-Flash under 10+2: what a core of an agent takes to rebuild and
check them, and what a GPU takes, from parity in memory of the host to checksums there.

Prints a JSON line for each number of blocks, of which each has lost a data shard. It is the
measurement by which an engine chooses when it starts; a minute at most.

    python -m benchmarks.rebuild_shards [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch

from engine.kv.rebuild_choice import choose_is_reader, measure, time_on_host

K, M = 10, 2
SHARD_BYTES = 11_392
COUNTS = (1, 8, 64, 600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("rebuild_shards: given no CUDA device, expected one (or --device cpu)")
    for blocks in COUNTS:
        print(json.dumps(row_of(blocks, options.device)), flush=True)


def row_of(blocks: int, device: str) -> dict[str, object]:
    """What both take; of a CPU the agent's part alone."""
    row: dict[str, object] = {"benchmark": "rebuild_shards", "blocks": blocks}
    clock = time.perf_counter
    if device == "cpu":
        agent_s = time_on_host(K, M, SHARD_BYTES, blocks, clock=clock)
        return row | {"agent_us": round(agent_s * 1e6, 1)}
    from engine.kv.cuda_rebuild import ShardKernels

    kernels = ShardKernels(torch.device("cuda", 0), K * SHARD_BYTES, k=K, m=M)
    times = measure(kernels, blocks, clock=clock)
    return row | {
        "agent_us": round(times.agent_s * 1e6, 1),
        "reader_us": round(times.reader_s * 1e6, 1),
        "rebuilds": "reader" if choose_is_reader(times) else "agent",
    }


if __name__ == "__main__":
    main()
