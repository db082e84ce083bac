"""The ISA-L back end as the pyeclib wheel brings it, in this process."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from itertools import combinations

import numpy as np
import pytest

from erasure import isal
from erasure.choice import choose_multiplier
from erasure.code import Code
from erasure.errors import (
    MultiplierConflictError,
    MultiplierRefusedError,
    MultiplierUnavailableError,
)
from erasure.isal import IsalMultiplier, find_wheel_library
from erasure.matrix import cauchy_generator, invert
from erasure.multiplier import Multiplier
from tests.erasure.multiplier_contract import MultiplierContract, expected_product, run_product


@pytest.fixture(scope="module")
def multiplier() -> Multiplier:
    try:
        return choose_multiplier("isal")
    except MultiplierConflictError as error:
        pytest.skip(str(error))


class TestWheelMultiplier(MultiplierContract):
    """The contract."""


def test_wheel_library_is_where_we_look_for_it() -> None:
    # A private path of somebody else's wheel: a new release may move it.
    path = find_wheel_library()
    assert path.is_file()
    assert path.is_absolute()


def test_wheel_library_is_unavailable_when_the_distribution_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isal, "WHEEL_DISTRIBUTION", "no-such-distribution-at-all")
    with pytest.raises(MultiplierUnavailableError, match="no-such-distribution-at-all"):
        find_wheel_library()


def test_wheel_library_is_unavailable_when_the_distribution_lacks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isal, "WHEEL_DISTRIBUTION", "pytest")
    with pytest.raises(MultiplierUnavailableError, match="exactly one libisal"):
        find_wheel_library()


def test_debian_library_is_unavailable_when_the_loader_does_not_find_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isal, "DEBIAN_LIBRARY", "libisal-that-is-not-here.so.2")
    with pytest.raises(MultiplierUnavailableError, match=r"libisal-that-is-not-here\.so\.2"):
        isal.load_debian_multiplier()


def test_multiplier_is_refused_when_the_library_lacks_the_functions() -> None:
    c_library = ctypes.CDLL(None)
    with pytest.raises(MultiplierRefusedError, match="ec_init_tables and ec_encode_data"):
        IsalMultiplier(c_library, name="not-isal")


@pytest.mark.usefixtures("multiplier")
@pytest.mark.parametrize(("k", "m"), [(1, 0), (1, 1), (4, 2), (10, 2), (20, 12), (1, 31), (31, 1)])
def test_cauchy_matrix_equals_that_of_isal(k: int, m: int) -> None:
    library = ctypes.CDLL(str(find_wheel_library()))
    theirs = np.zeros((k + m, k), np.uint8)
    library.gf_gen_cauchy1_matrix(ctypes.c_void_p(theirs.ctypes.data), k + m, k)
    assert np.array_equal(theirs, cauchy_generator(k, m))


@pytest.mark.usefixtures("multiplier")
def test_inverse_equals_that_of_isal_for_all_66_double_losses() -> None:
    library = ctypes.CDLL(str(find_wheel_library()))
    generator = cauchy_generator(10, 2)
    for lost in combinations(range(12), 2):
        rows = np.delete(generator, lost, axis=0)
        given, theirs = rows.copy(), np.zeros((10, 10), np.uint8)
        status = library.gf_invert_matrix(
            ctypes.c_void_p(given.ctypes.data), ctypes.c_void_p(theirs.ctypes.data), 10
        )
        assert status == 0, lost
        assert np.array_equal(theirs, invert(rows)), lost


def test_product_is_right_when_shards_go_in_pieces(
    multiplier: Multiplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isal, "PIECE_BYTES_MAX", 64)
    coefficients = cauchy_generator(4, 2)[4:]
    sources = np.random.default_rng(2).integers(0, 256, (3, 4, 200), dtype=np.uint8)
    made = run_product(multiplier, coefficients, sources)
    assert np.array_equal(made, expected_product(coefficients, sources))


STEPS_WANTED = 10


def most_steps_during_one_call(code: Code, *, calls_max: int) -> int:
    """How far another thread gets during a long call, the best of calls_max or first to reach 10.

    The switch interval is set so long that the caller is never asked to give up the GIL; the
    other thread offers it back at each step. So it steps only while a call lets it.
    """
    # One region serves as all 31 data shards: long calls without much memory.
    shard_bytes = 16 << 20
    region, parity = np.zeros(shard_bytes, np.uint8), np.zeros(shard_bytes, np.uint8)
    data_table = np.full((1, 31), region.ctypes.data, np.uintp)
    parity_table = np.full((1, 1), parity.ctypes.data, np.uintp)
    steps = most_steps = 0
    is_over = False

    def step() -> None:
        nonlocal steps
        while not is_over:
            steps += 1
            time.sleep(0)

    thread = threading.Thread(target=step)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        thread.start()
        for _ in range(calls_max):
            before = steps
            code.encode_at(data_table, parity_table, shard_bytes=shard_bytes)
            most_steps = max(most_steps, steps - before)
            if most_steps >= STEPS_WANTED:
                break
    finally:
        is_over = True
        sys.setswitchinterval(interval_s)
        thread.join()
    return most_steps


def test_encode_lets_other_threads_run_during_a_long_call(multiplier: Multiplier) -> None:
    # A busy machine may not schedule the other thread during each call, so there are many tries.
    assert most_steps_during_one_call(Code(31, 1, multiplier), calls_max=1_000) >= STEPS_WANTED


@pytest.mark.usefixtures("multiplier")
def test_other_threads_stand_still_when_the_library_is_called_without_dropping_the_gil() -> None:
    # The counterpart that shows what the test above would see: PyDLL keeps the GIL.
    holding = IsalMultiplier(ctypes.PyDLL(str(find_wheel_library())), name="holding-the-gil")
    assert most_steps_during_one_call(Code(31, 1, holding), calls_max=10) < STEPS_WANTED
