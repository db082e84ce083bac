"""Runners of both families, each with pools that were full of NaN at first."""

from collections.abc import Iterator

import pytest

from tests.engine.runners.runner_bench import RunnerBench, llama_bench, v41_bench, write_tiny

FAMILIES = ("llama float32", "llama bfloat16", "deepseek_v41")


def open_bench(family: str, folder: pytest.TempPathFactory) -> RunnerBench:
    if family == "deepseek_v41":
        return v41_bench()
    path = write_tiny(folder.mktemp("tiny"))
    return llama_bench(path, "bfloat16" if family == "llama bfloat16" else "float32")


@pytest.fixture(scope="session", params=FAMILIES)
def benches(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunnerBench, RunnerBench]:
    """Two engines with one model."""
    first, second = (open_bench(request.param, tmp_path_factory) for _ in range(2))
    return first, second


@pytest.fixture
def bench(benches: tuple[RunnerBench, RunnerBench]) -> Iterator[RunnerBench]:
    """One engine, of which everything is free again at the end."""
    bench = benches[0]
    runner = bench.runner
    before = runner.pool.free_blocks, runner.free_states
    yield bench
    assert (runner.pool.free_blocks, runner.free_states) == before
