"""The benchmarks of the GPU run on a CPU too, with a tiny model. No figure is judged here."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.page_cache import IN_MEMORY, file_system_of
from tests.benchmarks.test_engine_benchmarks import DEADLINE_S, run_benchmark

TINY = ("--device", "cpu", "--size", "tiny", "--rounds", "1", "--threads", "1")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 10)]


@pytest.mark.torture
def test_swap_in_beside_the_forward_gives_the_bits_of_the_cold_prompt() -> None:
    mover, line = run_benchmark("gpu_overlap", *TINY, "--lengths", "390")
    assert mover["mover"] == "memcpy"
    assert line["equal_bits"] == {"resident": True, "overlapped": True, "serial": True}
    assert line["hit_tokens"] == 256


@pytest.mark.torture
def test_first_tokens_come_after_a_replay_and_with_a_window() -> None:
    is_disk = file_system_of(Path("/tmp")) not in IN_MEMORY
    storage = ("disk",) if is_disk else ("memory", "--memory", "/tmp")
    sizes = ("--lengths", "646", "--workers", "1", "--storage", *storage)
    lines = run_benchmark("gpu_end_to_end", *TINY, *sizes)
    assert not [line for line in lines if "error" in line]
    found = [line for line in lines if "case" in line]
    assert [line["case"] for line in found] == ["cold", "replay", "window"]
    assert [line["rounds"] for line in found[1:]] == [1, 1]
    assert {line["page_cache"] for line in found} == {"dropped" if is_disk else "kept"}
    assert all(line["file_system"] == file_system_of(Path("/tmp")) for line in found)


def test_folder_in_memory_is_no_disk() -> None:
    command = ["-m", "benchmarks.gpu_end_to_end", "--device", "cpu", "--disk", "/dev/shm"]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 2
    assert "--disk: given /dev/shm, which is tmpfs, expected a folder on a disk" in done.stderr
