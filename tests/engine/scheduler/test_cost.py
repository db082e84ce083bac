"""A cost is checked where it is made and where it is read, and its file keeps every digit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.scheduler.cost import (
    COEFFICIENT_MAX_S,
    COST_FILE_BYTES_MAX,
    DEFAULT_COST,
    PrefillCost,
    encode_cost,
    read_cost,
)

COST = PrefillCost(a0_s=0.0237, a1_s=1.08e-5, a2_s=2e-11, a3_s=1e-11)

coefficients = st.floats(0, COEFFICIENT_MAX_S)
costs = st.builds(PrefillCost, coefficients, coefficients, coefficients, coefficients)


def test_cost_is_a_polynomial_of_new_and_cached_tokens() -> None:
    cost = PrefillCost(a0_s=1000.0, a1_s=100.0, a2_s=10.0, a3_s=1.0)
    assert cost.added_s(3, 5) == 3 * 100 + 3 * 5 * 10 + 9
    assert cost.cost_s(3, 5) == 1000 + cost.added_s(3, 5)
    assert cost.cost_s(0, 5) == 1000


@given(costs, st.integers(0, 2**20), st.integers(0, 2**20))
def test_cost_never_falls_as_tokens_grow(cost: PrefillCost, tokens: int, cached: int) -> None:
    assert cost.added_s(tokens + 1, cached) >= cost.added_s(tokens, cached)


@pytest.mark.parametrize("name", ["a0_s", "a1_s", "a2_s", "a3_s"])
@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf"), 3601.0, "1", None, True])
def test_cost_refuses_a_coefficient_that_is_no_time(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"prefill cost {name}: given .*, expected seconds"):
        replace(COST, **{name: value})  # type: ignore[arg-type]


def test_default_cost_is_that_of_one_core_of_a_small_machine() -> None:
    assert DEFAULT_COST.cost_s(128, 0) > 0.1
    assert DEFAULT_COST.added_s(128, 100_000) > DEFAULT_COST.added_s(128, 0)


@given(cost=costs)
def test_cost_file_gives_back_the_cost_it_was_made_of(
    tmp_path_factory: pytest.TempPathFactory, cost: PrefillCost
) -> None:
    path = tmp_path_factory.getbasetemp() / "cost.json"
    path.write_text(encode_cost(cost, {"model": "a model", "threads": 1}))
    assert read_cost(path) == cost


def test_cost_file_is_as_it_was() -> None:
    assert json.loads(encode_cost(COST, {"model": "m"})) == {
        "format": "cachalot prefill cost",
        "version": 1,
        "coefficients": {"a0_s": 0.0237, "a1_s": 1.08e-5, "a2_s": 2e-11, "a3_s": 1e-11},
        "model": "m",
    }


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
        (changed(version=2), "version 2"),
        (changed(version=None), "version None"),
        (changed(coefficients=[1, 2, 3, 4]), "other coefficients than a0_s, a1_s, a2_s, a3_s"),
        (changed(coefficients={"a0_s": 1}), "other coefficients"),
        (changed(coefficients={"a0_s": 1, "a1_s": 1, "a2_s": 1, "b_s": 1}), "other coefficients"),
        (changed(coefficients={"a0_s": 1, "a1_s": -1, "a2_s": 1, "a3_s": 1}), "a1_s: given -1"),
        (changed(coefficients={"a0_s": "1", "a1_s": 1, "a2_s": 1, "a3_s": 1}), "a0_s: given '1'"),
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
