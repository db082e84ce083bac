"""Lost shards of blocks of V4.1-Flash under 10+2: what a core of an agent takes to rebuild and
check them, and what a GPU takes, from parity in memory of the host to checksums there.

Prints a JSON line that tells the machine, and one for each number of blocks, of which each has lost
a data shard; what fails gives a line with its error and costs the others nothing. It is the
measurement by which an engine chooses when it starts; a minute at most.

    python -m benchmarks.rebuild_shards [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback

import torch

from engine.kv.rebuild_choice import choose_is_reader, measure, time_on_host
from kvstore.admin.machine import describe_machine

K, M = 10, 2
SHARD_BYTES = 11_392
COUNTS = (1, 8, 64, 600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("rebuild_shards: given no CUDA device, expected one (or --device cpu)")
    show(**machine(options.device))
    has_failed = False
    for blocks in COUNTS:
        try:
            row = row_of(blocks, options.device)
        except Exception as error:
            has_failed = True
            traceback.print_exc()
            row = {"error": repr(error)}
        show(blocks=blocks, **row)
    sys.exit(1 if has_failed else 0)


def show(**fields: object) -> None:
    print(json.dumps({"benchmark": "rebuild_shards", **fields}), flush=True)


def machine(device: str) -> dict[str, object]:
    described: dict[str, object] = {"row": "machine", "torch": torch.__version__}
    if device == "cuda":
        described |= {"card": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
    return described | describe_machine()


def row_of(blocks: int, device: str) -> dict[str, object]:
    """What both take; of a CPU the agent's part alone."""
    clock = time.perf_counter
    if device == "cpu":
        agent_s = time_on_host(K, M, SHARD_BYTES, blocks, clock=clock)
        return {"agent_us": round(agent_s * 1e6, 1)}
    from engine.kv.cuda_rebuild import ShardKernels

    kernels = ShardKernels(torch.device("cuda", 0), K * SHARD_BYTES, k=K, m=M)
    times = measure(kernels, blocks, clock=clock)
    return {
        "agent_us": round(times.agent_s * 1e6, 1),
        "reader_us": round(times.reader_s * 1e6, 1),
        "rebuilds": "reader" if choose_is_reader(times) else "agent",
    }


if __name__ == "__main__":
    main()
