"""The real model gives the logits that an independent program gives from the same file.

What differs: we keep K and V in bfloat16 (measured: up to 0.04 in these logits, which spread over
20), and the bfloat16 engine multiplies matrices in bfloat16 (up to 0.18). The limits leave room for
other CPUs. Greedy tokens have to be equal: the reference's two best logits are never closer than
twice the larger limit.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.models.gguf_file import GgufFile
from engine.sampling import FloatArray
from kvstore.layout import BLOCK_TOKENS
from tests.engine.runners.runner_bench import RunnerBench, llama_bench

pytestmark = pytest.mark.slow

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parent / "golden/logits.json").read_text(encoding="utf-8")
)
ERROR_MAX: dict[str, float] = {"float32": 0.08, "bfloat16": 0.27}


@dataclass(frozen=True, eq=False)
class Answer:
    """What the model says behind a prompt, and how far its logits may be off."""

    prompt: dict[str, Any]
    logits: FloatArray
    greedy_ids: list[int]
    error_max: float


def cases() -> Iterator[object]:
    """Types of numbers and prompts. The long one takes half a minute: in one type is enough."""
    for compute, prompt in product(ERROR_MAX, GOLDEN["prompts"]):
        is_long = len(prompt["prompt_ids"]) > BLOCK_TOKENS
        marks = [pytest.mark.torture] if is_long and compute != "float32" else []
        yield pytest.param((compute, prompt), marks=marks, id=f"{compute}-{prompt['name']}")


@pytest.fixture(scope="module")
def load_bench(smollm_path: Path) -> Callable[[str], RunnerBench]:
    """The real model in a type of numbers, loaded once."""
    return cache(partial(llama_bench, smollm_path))


@pytest.fixture(scope="module", params=cases())
def answer(request: pytest.FixtureRequest, load_bench: Callable[[str], RunnerBench]) -> Answer:
    compute, prompt = request.param
    bench = load_bench(compute)
    count = len(prompt["greedy_ids"])
    sequence = bench.begin(prompt["prompt_ids"], room_tokens=count)
    logits = bench.run(sequence)
    given = [int(logits.argmax())]
    while len(given) < count:
        given.append(int(bench.append(sequence, given[-1:])[-1].argmax()))
    bench.end(sequence)
    return Answer(prompt, logits, given, ERROR_MAX[compute])


def test_golden_numbers_are_of_the_file_that_is_installed(smollm_path: Path) -> None:
    assert GgufFile.open(smollm_path).content_sha256() == GOLDEN["model_sha256"]


def test_logits_are_those_of_the_reference(answer: Answer) -> None:
    error = np.abs(answer.logits[GOLDEN["checked_ids"]] - np.array(answer.prompt["logits"]))
    assert error.max() < answer.error_max


def test_greedy_tokens_are_those_of_the_reference(answer: Answer) -> None:
    assert answer.prompt["greedy_margin_min"] > 2 * max(ERROR_MAX.values())
    assert answer.greedy_ids == answer.prompt["greedy_ids"]
