"""The numpy back end, which is harmless beside any ISA-L and so runs in this process."""

from __future__ import annotations

import numpy as np
import pytest

from erasure import table
from erasure.matrix import cauchy_generator
from erasure.multiplier import Multiplier
from erasure.table import TableMultiplier
from tests.erasure.multiplier_contract import MultiplierContract, expected_product, run_product


@pytest.fixture(scope="module")
def multiplier() -> Multiplier:
    return TableMultiplier()


class TestTableMultiplier(MultiplierContract):
    """The contract."""


def test_product_is_right_when_shards_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "PIECE_BYTES", 64)
    coefficients = cauchy_generator(4, 2)[4:]
    sources = np.random.default_rng(2).integers(0, 256, (3, 4, 200), dtype=np.uint8)
    made = run_product(TableMultiplier(), coefficients, sources)
    assert np.array_equal(made, expected_product(coefficients, sources))
