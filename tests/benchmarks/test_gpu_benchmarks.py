"""The benchmarks of the GPU run on a CPU too, with a tiny model. No figure is judged here."""

import pytest

from tests.benchmarks.test_engine_benchmarks import DEADLINE_S, run_benchmark

TINY = ("--device", "cpu", "--size", "tiny", "--rounds", "1", "--threads", "1")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 10)]


def test_swap_in_beside_the_forward_gives_the_bits_of_the_cold_prompt() -> None:
    mover, line = run_benchmark("gpu_overlap", *TINY, "--lengths", "390")
    assert mover["mover"] == "memcpy"
    assert line["equal_bits"] == {"resident": True, "overlapped": True, "serial": True}
    assert line["hit_tokens"] == 256


def test_first_tokens_come_after_a_replay_and_with_a_window() -> None:
    sizes = ("--lengths", "646", "--workers", "1", "--storage", "disk")
    lines = run_benchmark("gpu_end_to_end", *TINY, *sizes)
    assert not [line for line in lines if "error" in line]
    found = [line for line in lines if "case" in line]
    assert [line["case"] for line in found] == ["cold", "replay", "window"]
    assert [line["rounds"] for line in found[1:]] == [1, 1]
