"""Failing assertions of the contract suite explain themselves as those of test files do."""

import pytest

pytest.register_assert_rewrite("tests.erasure.multiplier_contract")
