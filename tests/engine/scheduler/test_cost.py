"""A cost is checked where it is made and where it is read, and its file keeps every digit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.scheduler.cost import (
    COEFFICIENT_MAX_S,
    COST_FILE_BYTES_MAX,
    DEFAULT_COST,
    MeasuredCost,
    PrefillCost,
    describe_mismatch,
    encode_cost,
    read_cost,
)

COST = PrefillCost(a0_s=0.0237, a1_s=1e-5, a2_s=2e-11, a3_s=1e-11, a4_s=0.01)

coefficients = st.floats(0, COEFFICIENT_MAX_S)
costs = st.builds(PrefillCost, coefficients, coefficients, coefficients, coefficients, coefficients)
RESULTS = Path(__file__).parents[3] / "benchmarks/results"


def test_cost_is_a_polynomial_of_new_and_cached_tokens() -> None:
    cost = PrefillCost(a0_s=1000.0, a1_s=100.0, a2_s=10.0, a3_s=1.0)
    assert cost.added_s(3, 5) == 3 * 100 + 3 * 5 * 10 + 9
    assert cost.cost_s(3, 5) == 1000 + cost.added_s(3, 5)
    assert cost.cost_s(0, 5) == 1000


@given(costs, st.integers(0, 2**20), st.integers(0, 2**20))
def test_cost_never_falls_as_tokens_grow(cost: PrefillCost, tokens: int, cached: int) -> None:
    assert cost.added_s(tokens + 1, cached) >= cost.added_s(tokens, cached)


@pytest.mark.parametrize("name", ["a0_s", "a1_s", "a2_s", "a3_s", "a4_s"])
@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf"), 3601.0, "1", None, True])
def test_cost_refuses_a_coefficient_that_is_no_time(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"prefill cost {name}: given .*, expected seconds"):
        replace(COST, **{name: value})  # type: ignore[arg-type]


def cold_prompts() -> list[tuple[str, int, float]]:
    """Model, tokens and seconds of all that were computed cold for the published figures."""
    texts = [path.read_text() for path in RESULTS.glob("*-engine.jsonl")]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    cold = [row for row in rows if row["benchmark"] == "engine_first_token"]
    return [
        (row["model"], row["prompt_tokens"], row["compute_ms"] / 1e3)
        for row in cold
        if row["case"] == "cold"
    ]


def test_default_cost_is_more_than_models_here_took_on_the_machines_that_were_measured() -> None:
    prompts = cold_prompts()
    assert len({model for model, _, _ in prompts}) > 1
    for model, tokens, took_s in prompts:
        # In one pass, which is less than by chunks.
        assert DEFAULT_COST.cost_s(tokens, 0) > took_s, (model, tokens)
    assert DEFAULT_COST.added_s(128, 100_000) > DEFAULT_COST.added_s(128, 0)
    assert DEFAULT_COST.a4_s == DEFAULT_COST.a0_s


@given(cost=costs)
def test_cost_file_gives_back_the_cost_it_was_made_of(
    tmp_path_factory: pytest.TempPathFactory, cost: PrefillCost
) -> None:
    path = tmp_path_factory.getbasetemp() / "cost.json"
    path.write_text(encode_cost(cost, {"model": "a model", "threads": 1, "device": "cuda:0"}))
    assert read_cost(path) == MeasuredCost(cost, path, model="a model", threads=1, device="cuda:0")


def test_cost_file_is_as_it_was() -> None:
    assert json.loads(encode_cost(COST, {"model": "m"})) == {
        "format": "cachalot prefill cost",
        "version": 2,
        "coefficients": {"a0_s": 0.0237, "a1_s": 1e-5, "a2_s": 2e-11, "a3_s": 1e-11, "a4_s": 0.01},
        "model": "m",
    }


def test_cost_file_without_a_term_for_further_sequences_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(
        '{"format": "cachalot prefill cost", "version": 1, "coefficients": {"a0_s": 0.0237,'
        ' "a1_s": 1e-05, "a2_s": 2e-11, "a3_s": 1e-11}, "residuals": {"median": 0.03, "p90": 0.1,'
        ' "max": 0.2}, "model": "v41-mini", "compute": "float32", "threads": 1, "passes": 90,'
        ' "took_s": 30.1}'
    )
    expected = MeasuredCost(replace(COST, a4_s=0.0), path, model="v41-mini", threads=1)
    assert read_cost(path) == expected


@pytest.mark.parametrize(
    ("measured", "worker", "said"),
    [
        ({}, {}, None),
        ({"model": None, "threads": None, "device": None}, {"device": "cuda", "threads": 7}, None),
        ({"model": "v41-mini"}, {}, "model 'v41-mini', not model.gguf"),
        ({"threads": 8}, {}, "threads 8, not 2"),
        ({"device": "cuda:0"}, {}, "device 'cuda:0', not cpu"),
        ({"device": "cuda:0", "threads": 8}, {"device": "cuda:1"}, None),
        ({"model": "x", "threads": 1}, {}, "model 'x', not model.gguf; threads 1, not 2"),
    ],
)
def test_cost_of_another_model_device_or_number_of_threads_is_told_in_one_line(
    measured: dict[str, Any], worker: dict[str, Any], said: str | None
) -> None:
    alike: dict[str, Any] = {"model": "model.gguf", "device": "cpu", "threads": 2}
    cost = MeasuredCost(COST, Path("cost.json"), **(alike | measured))
    here: dict[str, Any] = {"model": Path("some/model.gguf"), "device": "cpu", "threads": 2}
    found = describe_mismatch(cost, **(here | worker))
    if said is None:
        assert found is None
    else:
        assert found == (
            f"cost file cost.json was measured with {said}:"
            " chunks of prompts may be too long or too short"
        )


OLD = {"a0_s": 1, "a1_s": 1, "a2_s": 1, "a3_s": 1}


def changed(**members: object) -> str:
    return json.dumps(json.loads(encode_cost(COST, {})) | members)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[" * 50_000, "no JSON"),
        ("[]", "another format"),
        ("{}", "another format"),
        (changed(version=3), "version 3"),
        (changed(version=True), "version True"),
        (changed(version=1), "other coefficients than a0_s, a1_s, a2_s, a3_s, expected a file"),
        (changed(version=None), "version None"),
        (changed(coefficients=[1, 2, 3, 4]), "other coefficients than a0_s, a1_s, a2_s, a3_s, a4"),
        (changed(coefficients={"a0_s": 1}), "other coefficients"),
        (changed(coefficients=OLD), "other coefficients"),
        (changed(coefficients=OLD | {"b_s": 1}), "other coefficients"),
        (changed(coefficients=OLD | {"a4_s": -1}), "a4_s: given -1"),
        (changed(coefficients=OLD | {"a4_s": "1"}), "a4_s: given '1'"),
        (changed(filler="x" * COST_FILE_BYTES_MAX), "more than 65536 bytes"),
    ],
)
def test_read_cost_refuses_a_file_with_anything_else_in_it(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "cost.json"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=message):
        read_cost(path)


def test_read_cost_names_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InvalidRequest, match=f"cost file {path}: given {reason}"):
            read_cost(path)


def test_read_cost_refuses_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(b"\xff\xfe{}\x00")
    with pytest.raises(InvalidRequest, match="no JSON"):
        read_cost(path)
