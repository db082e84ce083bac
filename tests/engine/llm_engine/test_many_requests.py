"""Thousands of requests of mixed lengths through small pools: nothing leaks, nobody starves."""

import random
from itertools import pairwise

import pytest

from tests.engine.llm_engine.engine_bench import EngineBench, prompt_of, request_of

QUEUE = 64
SPELL = 500
"""Requests over which throughput is compared."""

BASES = [prompt_of(400, seed) for seed in range(8)]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("requests", [1_500, pytest.param(10_000, marks=pytest.mark.torture)])
def test_requests_are_answered_in_bounded_time_and_leave_nothing(requests: int) -> None:
    rng = random.Random(5)
    bench = EngineBench(pool_blocks=40, sequences_max=24, queue_requests_max=QUEUE, loads_max=4)
    added_at: dict[str, int] = {}
    waits: list[int] = []
    ended_at: list[int] = []
    steps = 0
    while len(ended_at) < requests:
        while len(added_at) < requests and bench.engine.status.waiting < QUEUE:
            name = str(len(added_at))
            prompt = rng.choice(BASES)[: rng.choice((1, 20, 100, 128, 129, 200, 270, 390))]
            bench.add(request_of(name, prompt, rng.choice((1, 1, 2, 3, 8))))
            added_at[name] = steps
        for event in bench.engine.step():
            if event.finish_reason is not None:
                assert event.finish_reason == "length"
                ended_at.append(steps)
                waits.append(steps - added_at[event.request_id])
        steps += 1
        # What was stored long ago is forgotten, as by a store.
        if len(bench.kept.blocks) > 12:
            bench.kept.blocks.pop(next(iter(bench.kept.blocks)))
    status = bench.engine.status
    assert (status.counts.finished, status.counts.no_room, status.waiting) == (requests, 0, 0)
    # Nobody waits for longer than those who may be before it take.
    assert max(waits) < 4 * sorted(waits)[requests // 2]
    # The last go as fast as the first.
    spells = [end - begin for begin, end in pairwise([0, *ended_at[SPELL - 1 :: SPELL]])]
    assert max(spells) < 1.25 * min(spells)
    assert bench.engine.close()
    bench.assert_all_is_free()
    assert len(bench.engine._admission._prefixes.index) <= status.pool_blocks
