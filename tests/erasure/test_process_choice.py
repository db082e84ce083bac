"""The contract for whatever back end this process uses by default.

test_backends_apart.py runs this file again in processes of their own, one for each fall-back.
"""

from __future__ import annotations

import os

import pytest

from erasure.choice import ENVIRONMENT_VARIABLE, choose_multiplier
from erasure.code import Code
from erasure.multiplier import Multiplier
from tests.erasure.multiplier_contract import MultiplierContract


@pytest.fixture(scope="module")
def multiplier() -> Multiplier:
    return choose_multiplier()


class TestProcessChoice(MultiplierContract):
    """The contract."""


def test_choice_is_the_one_the_environment_names(multiplier: Multiplier) -> None:
    assert multiplier.name == (os.environ.get(ENVIRONMENT_VARIABLE) or "isal")
    assert Code(2, 1).multiplier is multiplier
