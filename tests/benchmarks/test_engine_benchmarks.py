"""The engine's benchmarks start what they need, measure, and end it. No figure is judged here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODEL = "models/v41-mini"
DEADLINE_S = 170
"""Many times what they take on a quiet machine."""

pytestmark = pytest.mark.timeout(DEADLINE_S + 10)

STORE = ("--k", "2", "--m", "1")


def run_benchmark(name: str, *options: str) -> list[dict[str, Any]]:
    """The lines that a program prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_steps_are_measured_with_few_answers_and_many() -> None:
    lines = run_benchmark("engine_step", "--steps", "3", "--sampled", "0", "--rounds", "0")
    assert [line["answers"] for line in lines] == [1, 8, 64]
    assert all(line["step_us"] > 0 for line in lines)


@pytest.mark.torture
def test_choosing_is_measured_greedy_and_sampled_from_a_large_vocabulary() -> None:
    lines = run_benchmark("engine_step", "--steps", "1", "--sampled", "1", "--rounds", "0")[3:]
    assert {line["benchmark"] for line in lines} == {"engine_sampled"}
    ways = [(line["logits"], line["temperature"], line["top_k"], line["top_p"]) for line in lines]
    assert ("spread", 0.0, 0, 1.0) in ways
    assert ("spread", 0.8, 0, 0.95) in ways
    assert ("flat", 0.8, 0, 0.95) in ways
    assert all((line["answers"], line["vocabulary"]) == (64, 129_280) for line in lines)
    assert all(line["choosing_us"] > 0 for line in lines)


@pytest.mark.torture
def test_first_tokens_are_measured_beside_a_store() -> None:
    sizes = ("--lengths", "400", "--rounds", "1", *STORE)
    lines = run_benchmark("engine_first_token", "--models", MODEL, *sizes)
    assert lines[0]["case"] == "cold"
    assert {line["case"] for line in lines} <= {"cold", "replay", "window"}
    assert all(line["first_token_ms"] >= line["compute_ms"] > 0 for line in lines)


@pytest.mark.torture
def test_turns_are_served_without_the_store_and_with_it() -> None:
    sizes = ("--sessions", "1", "--scale", "128", *STORE)
    without, with_store = run_benchmark("engine_turns", "--models", MODEL, *sizes)
    assert (without["store"], with_store["store"]) == (False, True)
    assert without["requests"] == with_store["requests"] > 1
    assert without["prompt_tokens"] == with_store["prompt_tokens"]
    assert with_store["computed_tokens"] + with_store["hit_tokens"] == without["prompt_tokens"]


@pytest.mark.torture
def test_the_delay_of_saving_is_measured_beside_a_control() -> None:
    options = ("--steps", "1", "--sampled", "0", "--rounds", "2", "--model", MODEL, *STORE)
    (line,) = run_benchmark("engine_step", *options)[3:]
    assert line["benchmark"] == "engine_save_delay"
    assert (line["rounds"], line["in_sink_share"] > 0) == (2, True)
    for name in ("of_without", "control_of_without"):
        assert line[f"{name}_low"] <= line[name] <= line[f"{name}_high"]
