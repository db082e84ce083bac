"""The choice of a back end: order, refusal, conflict, and that it is made once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from erasure.buffers import bytes_at
from erasure.choice import (
    ENVIRONMENT_VARIABLE,
    Backend,
    MultiplierChoice,
    check_multiplier,
    choose_multiplier,
)
from erasure.errors import (
    MultiplierConflictError,
    MultiplierRefusedError,
    MultiplierUnavailableError,
    UnknownMultiplierError,
)
from erasure.multiplier import Multiplier, ShardProduct
from erasure.table import TableMultiplier


class FaultyProduct(ShardProduct):
    """Does the product right, then harms what it wrote by a function."""

    def __init__(self, product: ShardProduct, harm: Callable[[int, int], None]) -> None:
        self._product = product
        self._harm = harm

    def apply_at(
        self,
        source_addresses: NDArray[np.uintp],
        target_addresses: NDArray[np.uintp],
        *,
        shard_bytes: int,
    ) -> None:
        self._product.apply_at(source_addresses, target_addresses, shard_bytes=shard_bytes)
        self._harm(int(target_addresses[-1, -1]), shard_bytes)


class FaultyMultiplier(TableMultiplier):
    """The numpy back end with one fault."""

    def __init__(self, harm: Callable[[int, int], None]) -> None:
        self._harm = harm

    def prepare(self, coefficients: NDArray[np.uint8]) -> ShardProduct:
        return FaultyProduct(super().prepare(coefficients), self._harm)


def flip_last_bit(address: int, shard_bytes: int) -> None:
    bytes_at(address, shard_bytes)[-1] ^= 1


def flip_tail_of_long_shards(address: int, shard_bytes: int) -> None:
    if shard_bytes > 64 and shard_bytes % 64:
        bytes_at(address, shard_bytes)[-1] ^= 0x80


def write_behind(address: int, shard_bytes: int) -> None:
    bytes_at(address + shard_bytes, 1)[0] = 0


def write_before(address: int, _: int) -> None:
    bytes_at(address - 1, 1)[0] = 0


def harm_nothing(_: int, __: int) -> None:
    pass


def missing() -> Multiplier:
    raise MultiplierUnavailableError("library", "nothing", "a file")


def backend(name: str, load: Callable[[], Multiplier], *, is_isal: bool = True) -> Backend:
    return Backend(name=name, load=load, is_isal=is_isal)


def refused() -> Multiplier:
    return FaultyMultiplier(flip_last_bit)


@pytest.mark.parametrize(
    "harm", [flip_last_bit, flip_tail_of_long_shards, write_behind, write_before]
)
def test_self_check_refuses_a_back_end_with_a_fault(harm: Callable[[int, int], None]) -> None:
    with pytest.raises(MultiplierRefusedError, match="self-check of erasure back end numpy"):
        check_multiplier(FaultyMultiplier(harm))


def test_self_check_accepts_the_same_back_end_without_its_fault() -> None:
    check_multiplier(FaultyMultiplier(harm_nothing))


def test_choice_takes_the_first_that_is_there(caplog: pytest.LogCaptureFixture) -> None:
    second = TableMultiplier()
    choice = MultiplierChoice(
        [backend("a", missing), backend("b", lambda: second), backend("c", missing)], {}
    )
    assert choice.choose() is second
    assert choice.choose() is second
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a not used: library: given nothing, expected a file" in caplog.text


def test_choice_goes_past_a_refused_isal_and_says_so_loudly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = TableMultiplier()
    choice = MultiplierChoice(
        [
            backend("a", refused),
            # A second build must not be loaded even though the first was refused.
            backend("b", TableMultiplier),
            backend("c", lambda: plain, is_isal=False),
        ],
        {},
    )
    assert choice.choose() is plain
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.ERROR, logging.WARNING, logging.WARNING]
    assert "back end a refused: self-check" in caplog.records[0].getMessage()
    assert "two builds of ISA-L" in caplog.records[1].getMessage()
    assert "without ISA-L, by c: slow" in caplog.records[2].getMessage()


def test_choice_gives_all_reasons_when_nothing_works() -> None:
    choice = MultiplierChoice([backend("a", missing), backend("b", refused)], {})
    with pytest.raises(MultiplierUnavailableError, match=r"library: given nothing.*self-check"):
        choice.choose()


@pytest.mark.parametrize(
    ("load", "error"),
    [(missing, MultiplierUnavailableError), (refused, MultiplierRefusedError)],
)
def test_choice_does_not_fall_back_from_a_back_end_that_was_named(
    load: Callable[[], Multiplier], error: type[Exception]
) -> None:
    backends = [backend("a", load), backend("b", TableMultiplier, is_isal=False)]
    with pytest.raises(error):
        MultiplierChoice(backends, {ENVIRONMENT_VARIABLE: "a"}).choose()
    with pytest.raises(error):
        MultiplierChoice(backends, {}).choose("a")


def test_choice_reads_the_environment_once() -> None:
    environment = {ENVIRONMENT_VARIABLE: "b"}
    choice = MultiplierChoice(
        [backend("a", TableMultiplier), backend("b", TableMultiplier)], environment
    )
    first = choice.choose()
    environment[ENVIRONMENT_VARIABLE] = "a"
    assert choice.choose() is first is choice.choose("b")


def test_choice_refuses_a_second_isal_but_not_a_missing_one_before_it() -> None:
    backends = [
        backend("absent", missing),
        backend("a", TableMultiplier),
        backend("b", TableMultiplier),
        backend("plain", TableMultiplier, is_isal=False),
    ]
    choice = MultiplierChoice(backends, {})
    with pytest.raises(MultiplierUnavailableError):
        choice.choose("absent")
    first = choice.choose("b")
    with pytest.raises(MultiplierConflictError, match="given a, expected b, which is loaded"):
        choice.choose("a")
    assert choice.choose("plain") is not first
    assert choice.choose() is first


@pytest.mark.parametrize("source", ["argument", "environment"])
def test_choice_lists_the_right_names_when_given_a_wrong_one(source: str) -> None:
    backends = [backend("a", TableMultiplier), backend("b", TableMultiplier)]
    is_argument = source == "argument"
    choice = MultiplierChoice(backends, {} if is_argument else {ENVIRONMENT_VARIABLE: "c"})
    with pytest.raises(UnknownMultiplierError, match="given 'c', expected one of a, b"):
        choice.choose("c" if is_argument else None)


def test_choice_loads_once_when_many_threads_ask_at_once() -> None:
    loads = []

    def load() -> Multiplier:
        loads.append(threading.get_ident())
        return TableMultiplier()

    choice = MultiplierChoice([backend("a", load)], {})
    barrier = threading.Barrier(8)
    chosen: list[Multiplier] = []

    def ask() -> None:
        barrier.wait(timeout=30)
        chosen.append(choice.choose())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1
    assert len(set(map(id, chosen))) == 1


def test_process_has_one_choice() -> None:
    assert choose_multiplier() is choose_multiplier()
    assert choose_multiplier(choose_multiplier().name) is choose_multiplier()
