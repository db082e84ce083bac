"""Passes are measured as an engine runs them: borders are kept, and the time bound is."""

import json
import os
import pty
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import engine.fit_cost
from engine.load import load_runner
from engine.model_runner import ModelRunner
from engine.pass_times import (
    ANSWER_TOKENS,
    choose_clock,
    choose_prompt_tokens_max,
    measure_passes,
    plan_ends,
    plan_walks,
)
from engine.scheduler.cost import read_cost
from engine.scheduler.fit import fit_cost
from tests.engine.command_line import run_here

BLOCK = 128
V41_MINI = Path(__file__).parents[2] / "models/v41-mini"


@pytest.fixture
def runner(tiny_path: Path) -> ModelRunner:
    return load_runner(tiny_path, pool_blocks=9, state_slots=1, compute="float32").runner


@given(st.integers(1, 10_000))
def test_walks_cover_short_and_long_prompts_in_every_chunk_that_fits(tokens_max: int) -> None:
    walks = plan_walks(tokens_max)
    assert len(walks) == len(set(walks)) <= 12
    assert max(walk.prompt_tokens for walk in walks) == tokens_max
    assert {walk.prompt_tokens for walk in walks if walk.chunk_tokens == BLOCK} == {
        walk.prompt_tokens for walk in walks
    }
    assert [walk.prompt_tokens for walk in walks] == sorted(walk.prompt_tokens for walk in walks)


@given(
    st.integers(1, 5000),
    st.sampled_from([BLOCK, 4 * BLOCK]),
    st.lists(st.integers(0, 40).map(lambda block: block * BLOCK), max_size=2),
)
def test_passes_end_at_borders_and_cover_the_prompt_once(
    tokens: int, chunk: int, borders: list[int]
) -> None:
    ends = plan_ends(tokens, chunk, borders)
    assert ends[-1] == tokens
    assert all(first < end <= first + chunk for first, end in pairwise([0, *ends]))
    assert all(end % BLOCK == 0 for end in ends[:-1])
    assert {border for border in borders if 0 < border < tokens} <= set(ends)


def test_prompt_of_a_walk_fits_into_pool_and_context(runner: ModelRunner) -> None:
    assert choose_prompt_tokens_max(runner) == 1024 - ANSWER_TOKENS


class Clock:
    """A second for each look, so that each pass takes one."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_every_pass_is_a_sample_until_the_time_is_over(runner: ModelRunner) -> None:
    told: list[int] = []
    samples = measure_passes(
        runner, time_s=40.0, clock=Clock(), on_pass=lambda count, took_s: told.append(count)
    )
    assert told == list(range(1, len(samples) + 1))
    first = [(sample.tokens, sample.cached_tokens) for sample in samples[:5]]
    assert first == [(128, 0), (128, 128), (1, 256), (1, 257), (1, 258)]
    together = [(sample.cached_tokens, sample.sequences) for sample in samples[5:11]]
    # Two behind 128 and 129 tokens, then four behind 128 to 131; eight have no room.
    assert together == [(128, 2), (129, 2), (130, 2), (129, 4), (130, 4), (131, 4)]
    assert {sample.sequences for sample in samples[11:]} == {1}
    assert all(sample.took_s == 1.0 for sample in samples)
    assert 11 < len(samples) < 40
    assert runner.pool.free_blocks == runner.pool.capacity_blocks
    assert fit_cost(samples).residual_max < 1e-9


def test_time_that_is_too_short_still_gives_enough_to_fit(runner: ModelRunner) -> None:
    samples = measure_passes(runner, time_s=0.0, clock=Clock(), on_pass=lambda count, took_s: None)
    assert {sample.sequences for sample in samples} == {1, 2, 4}
    assert fit_cost(samples).residual_max < 1e-9
    assert runner.pool.free_blocks == runner.pool.capacity_blocks


def test_clock_of_a_gpu_is_read_when_the_gpu_has_done_what_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", happened.append)

    def clock() -> float:
        happened.append("read")
        return 5.0

    gpu = torch.device("cuda", 1)
    assert choose_clock(gpu, clock)() == 5.0
    assert happened == [gpu, "read"]
    assert choose_clock(torch.device("cpu"), clock) is clock


@pytest.mark.slow
def test_command_writes_a_file_that_engines_read_and_shows_how_far_off_it_is(
    tiny_path: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cost.json"
    done = run_here(engine.fit_cost, "--model", tiny_path, "--time", "1", "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    cost = read_cost(out).cost
    assert cost.cost_s(128, 0) > 0
    written = json.loads(out.read_text())
    assert (written["model"], written["device"]) == (tiny_path.name, "cpu")
    assert written["threads"] == 1
    assert 0 <= written["residuals"]["median"] <= written["residuals"]["max"]
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{written['passes']} passes of {tiny_path.name} in ")
    assert f"  a1 = {cost.a1_s * 1e6:.4g} us" in lines
    assert f"  a4 = {cost.a4_s * 1e3:.4g} ms" in lines
    assert lines[-1] == f"written to {out}"


def test_command_names_a_file_that_it_cannot_write_before_it_measures(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object, **__: object) -> NoReturn:
        raise AssertionError("it measures")

    monkeypatch.setattr("engine.pass_times.measure_passes", measure)
    for out in (tmp_path, tmp_path / "none" / "cost.json"):
        done = run_here(engine.fit_cost, "--model", tiny_path, "--time", "1", "--out", out)
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"engine.fit_cost: --out: given {out}: ")
        assert line.endswith(
            "expected a file in a folder that this user may write in, on a disk with room"
        )


@pytest.mark.slow
def test_command_shows_its_progress_to_a_person_and_prints_json_for_a_program(
    tiny_path: Path,
) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "engine.fit_cost", "--model", str(tiny_path)]
    command += ["--threads", "1", "--time", "1", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=100)
    os.close(theirs)
    with os.fdopen(ours, "rb") as terminal:
        shown = os.read(terminal.fileno(), 100_000).decode()
    found = json.loads(done.stdout)
    assert (found["format"], found["version"]) == ("cachalot prefill cost", 2)
    assert "\r1 passes measured, 0 of about 1 s " in shown


@pytest.mark.gpu
@pytest.mark.timeout(240)
def test_command_measures_what_passes_cost_a_gpu() -> None:
    words = ("--model", V41_MINI, "--device", "cuda", "--time", "5", "--json")
    done = run_here(engine.fit_cost, *words)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["device"] == "cuda:0"
    assert found["coefficients"]["a0_s"] > 0


@pytest.mark.parametrize("device", ["gpu", "cuda:999"])
def test_device_that_is_not_there_is_named_in_one_line(device: str) -> None:
    done = run_here(engine.fit_cost, "--model", V41_MINI, "--device", device)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"engine.fit_cost: device: given '{device}'")
    assert line.endswith("expected cpu, cuda, or cuda: and the number of a device that is there")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such-model"], "there is no such file"),
        (["--time", "0"], "'--time': Input should be greater than or equal to 1"),
    ],
)
def test_mistakes_of_a_user_end_with_2(arguments: list[str], message: str) -> None:
    done = run_here(engine.fit_cost, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
