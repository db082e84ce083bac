"""A device that fails is told from a store that does; one that is lost ends the engine, in one
line."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event
from typing import NoReturn, cast

import pytest
import torch

from engine.errors import (
    DeviceLost,
    RebuiltWrong,
    TransferFailed,
    TransferStuck,
    describe_in_one_line,
)
from engine.kv import cuda_transfer, polling
from engine.kv import mover as mover_module
from engine.kv.cuda_runtime import CudaRuntime
from engine.kv.cuda_transfer import EventTransfer, all_queued
from engine.kv.mover import Transfer, wait_at_close, wait_for_compute, wait_to_end
from engine.llm_engine import LLMEngine
from engine.request import TokenEvent
from engine.store_faults import StoreFaults
from engine.worker.engine_thread import EngineThread
from engine.worker.request_line import RequestLine
from kvstore.errors import StoreError
from tests.engine.llm_engine.engine_bench import llama
from tests.engine.waiting import DEADLINE_S

GPU = torch.device("cuda", 0)
ILLEGAL = (
    "CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call.\n"
)


def fail_illegally(*_: object) -> NoReturn:
    raise torch.AcceleratorError(ILLEGAL)


@dataclass
class FakeFunction:
    """A function of a library, which ctypes would be told the types of."""

    answer: object
    argtypes: tuple[object, ...] = ()
    restype: object = None

    def __call__(self, *_: object) -> object:
        return self.answer


class FakeLibrary:
    """libcudart, in which every copy ends with one status."""

    def __init__(self, status: int) -> None:
        self.cudaMemcpyAsync = FakeFunction(status)
        self.cudaMemcpy2DAsync = FakeFunction(status)
        self.cudaHostRegister = FakeFunction(status)
        self.cudaHostUnregister = FakeFunction(status)
        self.cudaGetLastError = FakeFunction(status)
        self.cudaGetErrorString = FakeFunction(b"words of CUDA")


@pytest.mark.parametrize(
    ("status", "is_lost"), [(1, False), (2, False), (700, True), (710, True), (719, True)]
)
def test_errors_behind_which_nothing_works_are_told_from_others(status: int, is_lost: bool) -> None:
    runtime = CudaRuntime(cast("ctypes.CDLL", FakeLibrary(status)))
    with pytest.raises(TransferFailed, match=f"CUDA error {status}") as raised:
        runtime.copy(1, 2, 3, 4)
    assert isinstance(raised.value, DeviceLost) is is_lost


@dataclass
class FakeEvent:
    """What torch has for an event of a device that is lost."""

    query: Callable[[], bool] = fail_illegally


def test_transfer_on_a_device_that_is_lost_says_so_in_one_line() -> None:
    transfer = EventTransfer(cast("torch.cuda.Event", FakeEvent()), GPU)
    for ask in (transfer.wait, transfer.order_compute, lambda: transfer.has_ended):
        with pytest.raises(DeviceLost) as raised:
            ask()
        assert str(raised.value) == (
            "cuda:0 has failed: CUDA error: an illegal memory access was encountered"
        )


def test_deadline_of_a_transfer_begins_when_the_pass_before_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_transfer, "DEADLINE_S", polling.POLL_FIRST_S)
    looks = iter([False, False, False, False, True])
    over = list[bool]()

    def end_pass() -> bool:
        over.append(next(looks))
        return over[-1]

    event = FakeEvent(query=lambda: bool(over) and over[-1])
    passes = (FakeEvent(query=lambda: True), FakeEvent(end_pass))
    transfer = EventTransfer(
        cast("torch.cuda.Event", event), GPU, behind=cast("tuple[torch.cuda.Event, ...]", passes)
    )
    transfer.wait()
    assert len(over) == 5
    never = EventTransfer(cast("torch.cuda.Event", FakeEvent(query=lambda: False)), GPU)
    with pytest.raises(TransferStuck):
        never.wait()


def test_what_is_computed_on_a_device_that_is_lost_ends_no_thread_of_a_sink() -> None:
    with pytest.raises(DeviceLost, match=r"illegal memory access was encountered$"):
        wait_for_compute(cast("torch.cuda.Event", FakeEvent()), "a save")


def test_pass_that_never_ends_is_told_again_and_again_and_given_up_in_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def look_once(
        is_over: Callable[[], bool], deadline_s: float, *, poll_max_s: float = 0.0
    ) -> bool:
        return is_over()

    monkeypatch.setattr(mover_module, "poll", look_once)
    never = cast("torch.cuda.Event", FakeEvent(query=lambda: False))
    with pytest.raises(TransferStuck, match=r"^a save: what was computed .* not ended for 600 s$"):
        wait_for_compute(never, "a save")
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == 19
    assert told[0] == "a save: what was computed before it has not ended for 30 s; it waits"
    with pytest.raises(TransferStuck, match=r"not ended for 45 s$"):
        wait_for_compute(never, "a load", deadline_s=45.0)


def test_pass_that_ends_late_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    looks = iter([False, False, True])
    wait_for_compute(cast("torch.cuda.Event", FakeEvent(query=lambda: next(looks))), "a save")
    assert next(looks, None) is None
    assert caplog.records == []


def test_streams_of_a_device_that_is_lost_take_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kv.cuda_transfer.record", fail_illegally)
    with pytest.raises(DeviceLost, match="cuda:0 has failed"):
        all_queued(GPU, cast("torch.cuda.Stream", object()))


class FailedTransfer:
    """Has failed, by whatever error."""

    def __init__(self, error: TransferFailed) -> None:
        self._error = error

    @property
    def has_ended(self) -> bool:
        raise self._error

    def wait(self) -> None:
        raise self._error

    def order_compute(self) -> None:
        raise self._error


@pytest.mark.parametrize("is_first", [True, False])
def test_loss_of_a_device_is_told_before_other_failures(is_first: bool) -> None:
    transfers: list[Transfer] = [
        FailedTransfer(DeviceLost("lost")),
        FailedTransfer(TransferFailed("failed")),
    ]
    with pytest.raises(DeviceLost):
        wait_to_end(*(transfers if is_first else transfers[::-1]))


class HangingTransfer:
    """Never ends. Counts how often it was waited for."""

    waits = 0

    @property
    def has_ended(self) -> bool:
        return False

    def wait(self) -> None:
        self.waits += 1
        raise TransferStuck("a transfer has not ended")

    def order_compute(self) -> None:
        """Nobody computes."""


@pytest.fixture
def left_behind() -> Iterator[list[object]]:
    before = len(mover_module.left_behind)
    yield mover_module.left_behind
    del mover_module.left_behind[before:]


def test_mover_that_is_closed_waits_once_for_a_device_that_hangs_and_says_what_it_leaves(
    left_behind: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    hanging, staging = [HangingTransfer() for _ in range(4)], object()
    assert not wait_at_close(hanging, "staged", staging)
    assert [one.waits for one in hanging] == [1, 0, 0, 0]
    assert "mover staged: 4 transfers have not ended; their memory stays taken" in caplog.text
    assert staging in left_behind


def test_transfers_that_have_failed_leave_nothing_behind(
    left_behind: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    before = list(left_behind)
    assert wait_at_close([FailedTransfer(DeviceLost("it is lost"))], "staged")
    assert left_behind == before
    assert "mover staged, at its end: it is lost" in caplog.text


def test_faults_are_counted_by_whose_they_are_and_the_first_of_each_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = StoreFaults()
    for _ in range(2):
        faults.note("fetch", TransferFailed("the copy has failed"))
        faults.note("fetch", DeviceLost("lost"))
        faults.note("save", StoreError("no agent"))
        faults.note("fetch", RebuiltWrong("block 1 is not what was stored"))
    assert (faults.count, faults.transfers) == (4, 4)
    assert [(one.levelno, one.getMessage()) for one in caplog.records] == [
        (
            logging.ERROR,
            "blocks were not moved: fetch failed, going on without it: the copy has failed",
        ),
        (logging.WARNING, "block store: save failed, going on without it: no agent"),
    ]


class LostEngine(LLMEngine):
    """Its first step meets the error of a device."""

    def step(self, wait_s: float = 0.0) -> list[TokenEvent]:
        fail_illegally()


def test_engine_on_a_device_that_is_lost_ends_with_one_line() -> None:
    ended, errors = Event(), list[BaseException | None]()

    def note(error: BaseException | None) -> None:
        errors.append(error)
        ended.set()

    with LostEngine(llama(8, 1)) as engine:
        line = RequestLine(1, clock=time.monotonic)
        thread = EngineThread(
            engine, None, line, ends_after_prefill=False, on_end=note, clock=time.monotonic
        )
        thread.start(lambda deliveries: None)
        assert ended.wait(DEADLINE_S)
        assert thread.stop(DEADLINE_S)
    (error,) = errors
    assert isinstance(error, DeviceLost)
    assert describe_in_one_line(error) == (
        "the device has failed: CUDA error: an illegal memory access was encountered"
    )
