"""The benchmark of handed-over runs starts what it needs, measures, and ends it."""

import pytest

from benchmarks.run_handover import BLOCKS, LAYOUT
from tests.benchmarks.test_engine_benchmarks import DEADLINE_S, run_benchmark

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)


def test_runs_are_handed_over_on_a_host_and_between_two() -> None:
    lines = run_benchmark("run_handover", "--rounds", "1")
    assert [line["bytes"] for line in lines] == [count * LAYOUT.block_bytes for count in BLOCKS]
    for line in lines:
        for name in ("offer", "take_on_same_host", "take_from_other_host", "socket_copy"):
            assert line[f"{name}_us"] > 0
