"""The benchmark of hand-over starts what it needs, measures, and ends it."""

import pytest

from tests.benchmarks.test_engine_benchmarks import DEADLINE_S, run_benchmark

pytestmark = [pytest.mark.torture, pytest.mark.timeout(DEADLINE_S + 10)]


def test_handovers_are_measured_on_a_host_and_between_two() -> None:
    sizes = ("--config", "v41-nano", "--tokens", "131", "300", "--rounds", "1")
    lines = run_benchmark("engine_handover", *sizes)
    assert [line["tokens"] for line in lines] == [131, 300]
    for line in lines:
        assert 0 < line["engine_ms"] < line["send_ms"]
        assert 0 < line["receive_engine_ms"] < line["receive_ms"]
        assert line["send_overlapped_ms"] > 0
        assert line["receive_remote_ms"] > 0
