"""The number of threads does not change a bit of what is computed, and the environment is kept."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NoReturn

import pytest

from engine import fit_cost
from engine.threads import SMALL_MODEL_BYTES, choose_threads, prepare_environment
from engine.worker.address import WorkerAddress
from engine.worker.main import run_worker
from engine.worker.options import Role, WorkerOptions
from tests.engine.tiny_model import TinyModel

# The widths of SmolLM2: below them the matrix library does not split a sum between threads.
WIDE = TinyModel(hidden=576, heads=9, kv_heads=3, intermediate=1536, layers=1)

PROGRAM = """
import hashlib, itertools, sys
from engine.threads import prepare_environment, set_thread_count
prepare_environment()
from engine.load import load_runner
from engine.model_runner import Part
from engine.request import Request
from engine.sequence import Sequence
token_ids = [i * i % 251 for i in range(200)]
for compute, threads in itertools.product(("float32", "bfloat16"), (1, 2, 3, 4)):
    if threads == 1:
        runner = load_runner(sys.argv[1], pool_blocks=2, state_slots=1, compute=compute).runner
    set_thread_count(threads)
    sequence = Sequence(Request(request_id="r", prompt_ids=token_ids, max_tokens=1))
    sequence.block_ids = runner.pool.allocate(2)
    runner.open(sequence)
    (logits,) = runner.compute([Part(sequence, 200)])
    digest = hashlib.sha256(runner.pool.buffer(sequence.block_ids[0]))
    digest.update(logits)
    runner.pool.release(sequence.block_ids)
    print(compute, digest.hexdigest())
"""


def test_number_of_threads_changes_no_bit(tmp_path: Path) -> None:
    model = WIDE.write(tmp_path / "wide.gguf")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)],
        check=True,
        capture_output=True,
        text=True,
        timeout=50,
    )
    counts = Counter(done.stdout.splitlines())
    assert sorted(line.split()[0] for line in counts) == ["bfloat16", "float32"]
    assert set(counts.values()) == {4}


def test_environment_keeps_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    # Set first, so that it is as before again after the test.
    monkeypatch.setenv("MKL_CBWR", "")
    monkeypatch.delenv("MKL_CBWR")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    prepare_environment()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert os.environ["MKL_CBWR"] == "AUTO,STRICT"


def test_environment_is_refused_when_it_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", pytest)
    with pytest.raises(AssertionError, match="read once, when torch is loaded"):
        prepare_environment()


def test_small_model_has_one_thread_and_a_large_one_all_cores() -> None:
    assert choose_threads(None, SMALL_MODEL_BYTES - 1, 8) == 1
    assert choose_threads(None, SMALL_MODEL_BYTES, 8) == 8
    assert choose_threads(3, 1, 8) == 3


class NoModel(Exception):
    """Nothing is to be loaded."""


@pytest.mark.parametrize("wanted", [None, 5])
def test_costs_are_measured_with_the_threads_that_a_worker_has(
    wanted: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> NoReturn:
        raise NoModel

    model = TinyModel().write(tmp_path / "model.gguf")
    set_to: list[int | None] = []
    monkeypatch.setattr("engine.threads.set_thread_count", set_to.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("engine.fit_cost.prepare_environment", lambda: None)
    monkeypatch.setattr("engine.load.load_runner", load)
    with pytest.raises(NoModel):
        fit_cost.fit(model=model, threads=wanted, time_s=1.0)
    monkeypatch.setattr("engine.worker.assembly.open_engine", load)
    monkeypatch.setattr("engine.worker.main.set_up_logging", lambda *_, **__: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    address = WorkerAddress(host="127.0.0.1", port=0)
    options = WorkerOptions(role=Role.BOTH, model=model, listen=address, threads=wanted)
    with pytest.raises(NoModel):
        run_worker(options)
    assert set_to == [wanted or 1] * 2
