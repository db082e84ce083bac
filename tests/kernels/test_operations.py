"""Operations: the reference is complete and the default, and a back end can replace any of them."""

import dataclasses
import importlib
import inspect
import pkgutil
from typing import Any

import pytest

import kernels.reference
from kernels.operations import REFERENCE, Operations

FIELDS = [field.name for field in dataclasses.fields(Operations)]

# Done once for a model or a pass, parts of other operations, or formats of stored weights.
NO_OPERATIONS = {
    "activations",
    "distinct_rows",
    "fp4",
    "fp8",
    "ordered_sum",
    "tiles",
    "weight_formats",
    "rope.rope_frequencies",
    "rope.rope_tables",
    "ngrams.plan_tables",
    "ngrams.ngram_multipliers",
    "norm.mean_square",
    "streams.flatten_streams",
    "streams.streams_of",
    # Of training, where quantisation is rounding that a gradient passes.
    "window_rows.round_window_rows",
    "main_entries.round_main_entries",
    # Of blocks on their way, not of a model.
    "block_sections",
    "gf256",
    "window_snapshot",
    "xxh3",
}


def reference_functions() -> dict[str, object]:
    """Every public function of the reference, as `module.name`."""
    found: dict[str, object] = {}
    for module in pkgutil.iter_modules(kernels.reference.__path__):
        source = importlib.import_module(f"kernels.reference.{module.name}")
        for name, function in inspect.getmembers(source, inspect.isfunction):
            if function.__module__ == source.__name__ and not name.startswith("_"):
                found[f"{module.name}.{name}"] = function
    return found


def test_every_operation_of_the_reference_can_be_replaced() -> None:
    operations = {
        name.partition(".")[2]: function
        for name, function in reference_functions().items()
        if name not in NO_OPERATIONS and name.partition(".")[0] not in NO_OPERATIONS
    }
    assert operations == {name: getattr(REFERENCE, name) for name in FIELDS}


@pytest.mark.parametrize("name", FIELDS)
def test_operation_is_documented_where_it_is_defined(name: str) -> None:
    function = getattr(REFERENCE, name)
    assert function.__name__ == name
    assert len(function.__doc__ or "") > 20


@pytest.mark.parametrize("name", FIELDS)
def test_back_end_replaces_one_operation_and_no_other(name: str) -> None:
    def faster() -> None: ...

    changes: dict[str, Any] = {name: faster}
    replaced = dataclasses.replace(REFERENCE, **changes)
    assert getattr(replaced, name) is faster
    kept = [other for other in FIELDS if other != name]
    assert all(getattr(replaced, other) is getattr(REFERENCE, other) for other in kept)
    assert getattr(Operations(), name) is getattr(REFERENCE, name)


def test_operations_do_not_change_once_made() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        REFERENCE.linear = REFERENCE.swiglu  # type: ignore[misc]
