"""The tree of errors: what callers may catch, and what they are told."""

from __future__ import annotations

import pickle

import pytest

from erasure import errors
from erasure.errors import ErasureError

ALL = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, ErasureError) and value is not ErasureError
]


@pytest.mark.parametrize("error_type", ALL)
def test_error_says_what_was_given_and_expected_also_after_pickling(
    error_type: type[ErasureError],
) -> None:
    for error in (error_type("k", 3, "4"), pickle.loads(pickle.dumps(error_type("k", 3, "4")))):
        assert str(error) == "k: given 3, expected 4"
        assert (error.what, error.given, error.expected) == ("k", 3, "4")


@pytest.mark.parametrize("error_type", ALL)
def test_error_is_also_a_built_in_and_stands_in_the_docstring(
    error_type: type[ErasureError],
) -> None:
    built_in = error_type.__bases__[1]
    assert built_in.__module__ == "builtins"
    assert errors.__doc__ is not None
    assert f"{error_type.__name__} ({built_in.__name__})" in errors.__doc__
