"""A worker says if its cost was measured on something else than what it runs."""

import logging
from pathlib import Path
from typing import NoReturn

import pytest

from engine.scheduler.cost import DEFAULT_COST, MeasuredCost
from engine.worker.address import WorkerAddress
from engine.worker.assembly import choose_config
from engine.worker.main import run_worker
from engine.worker.options import Role, WorkerOptions
from tests.engine.tiny_model import TinyModel


class Begun(Exception):
    """All that is said before the model is loaded has been said."""


@pytest.fixture
def begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> "Begin":
    def load(*_: object, **__: object) -> NoReturn:
        raise Begun

    monkeypatch.setattr("engine.threads.set_thread_count", lambda threads: None)
    monkeypatch.setattr("engine.worker.assembly.open_engine", load)
    monkeypatch.setattr("engine.worker.main.set_up_logging", lambda *_, **__: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return Begin(TinyModel().write(tmp_path / "model.gguf"), caplog)


class Begin:
    """Begins a worker with a cost; gives the warnings."""

    def __init__(self, model: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.model = model
        self._caplog = caplog

    def __call__(self, cost: MeasuredCost | None) -> list[str]:
        options = WorkerOptions(
            role=Role.BOTH,
            model=self.model,
            listen=WorkerAddress(host="127.0.0.1", port=0),
            cost=cost,
            threads=3,
        )
        assert choose_config(options).cost == (DEFAULT_COST if cost is None else cost.cost)
        with self._caplog.at_level(logging.WARNING), pytest.raises(Begun):
            run_worker(options)
        return [record.getMessage() for record in self._caplog.records]


def test_worker_warns_in_one_line_when_its_cost_is_of_another_model_and_other_threads(
    begin: Begin,
) -> None:
    cost = MeasuredCost(DEFAULT_COST, Path("cost.json"), model="v41-mini", device="cpu", threads=2)
    assert begin(cost) == [
        "cost file cost.json was measured with model 'v41-mini', not model.gguf;"
        " threads 2, not 3: chunks of prompts may be too long or too short"
    ]


def test_worker_says_nothing_when_its_cost_is_its_own(begin: Begin) -> None:
    own = MeasuredCost(DEFAULT_COST, Path("cost.json"), model="model.gguf", device="cpu", threads=3)
    assert begin(own) == []


def test_worker_without_a_cost_has_the_default_and_says_nothing(begin: Begin) -> None:
    assert begin(None) == []
