"""What it costs to choose which shards go: CPU and memory over the number of slots.

For each size three plans are made of random columns: `least_used` frees a twentieth of the slots,
`expired` takes what is older than its TTL, `both` does one after the other. Prints JSON lines:
benchmark, parameters, seconds of CPU (best of the rounds) and of that for each million slots, bytes
of memory that the plan took at most beside the columns (tracemalloc, which numpy tells of its
arrays), commit, machine.

    python -m benchmarks.gc_plan [--slots 100000 1000000 10000000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc

import numpy as np

from gc_worker.columns import TargetColumns
from gc_worker.plan import EvictionRules, Room, find_next_expiry_s, plan_eviction
from kvstore.admin.machine import describe_machine

NOW_S = 1_764_000_000
DAY_S = 86_400
SLOT_BYTES = 11_392 + 256
AGE_MAX_S = 6 * DAY_S
RULES = {
    "least_used": EvictionRules(ttl_s={}, ttl_s_else=7 * DAY_S),
    "expired": EvictionRules(ttl_s={"agent": 3 * DAY_S, "chat": 5 * DAY_S}, ttl_s_else=5 * DAY_S),
    "both": EvictionRules(ttl_s={"agent": 5 * DAY_S + DAY_S // 2}, ttl_s_else=7 * DAY_S),
}


def random_columns(slots: int) -> TargetColumns:
    """Uses spread evenly over six days, chains of up to 2,000 blocks, two classes."""
    rng = np.random.default_rng(slots)
    return TargetColumns(
        location=np.arange(slots, dtype=np.int64),
        generation=np.arange(slots, dtype=np.uint64),
        last_used_s=(NOW_S - rng.integers(0, AGE_MAX_S, slots)).astype(np.uint32),
        block_index=rng.integers(0, 2000, slots).astype(np.uint32),
        slot_bytes=np.full(slots, SLOT_BYTES, np.uint32),
        ttl_class=rng.integers(0, 2, slots).astype(np.uint8),
        shard=np.zeros(slots, np.uint8),
        class_names=("agent", "chat"),
    )


def measure(columns: TargetColumns, kind: str, rounds: int) -> dict[str, object]:
    """The figures of one kind of plan."""
    rules, room = RULES[kind], Room(0 if kind == "expired" else len(columns) // 20)
    spent_s = []
    for _ in range(rounds):
        begun_s = time.process_time()
        plan = plan_eviction(columns, rules, now_s=NOW_S, room=room)
        find_next_expiry_s(columns, rules, NOW_S)
        spent_s.append(time.process_time() - begun_s)
    tracemalloc.start()
    plan_eviction(columns, rules, now_s=NOW_S, room=room)
    find_next_expiry_s(columns, rules, NOW_S)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "benchmark": "gc_plan",
        "kind": kind,
        "slots": len(columns),
        "victims": len(plan),
        "value": round(min(spent_s), 4),
        "unit": "s CPU",
        "s_per_million_slots": round(min(spent_s) / len(columns) * 1e6, 4),
        "extra_bytes": peak_bytes,
    }


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--slots", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--rounds", type=int, default=3)
    found = parser.parse_args()
    about = describe_machine()
    for slots in found.slots:
        columns = random_columns(slots)
        for kind in RULES:
            print(json.dumps(measure(columns, kind, found.rounds) | about), flush=True)


if __name__ == "__main__":
    main()
