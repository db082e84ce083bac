"""The number of threads does not change a bit of what is computed, and the environment is kept."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.threads import prepare_environment
from tests.engine.tiny_model import TinyModel

# The widths of SmolLM2: below them the matrix library does not split a sum between threads.
WIDE = TinyModel(hidden=576, heads=9, kv_heads=3, intermediate=1536, layers=1)

PROGRAM = """
import hashlib, sys
from engine.threads import prepare_environment, set_thread_count
prepare_environment()
from engine.load import load_runner
from engine.model_runner import Part
from engine.request import Request
from engine.sequence import Sequence
runner = load_runner(sys.argv[1], pool_blocks=2, state_slots=1, compute=sys.argv[2]).runner
token_ids = [i * i % 251 for i in range(200)]
for threads in (1, 2, 3, 4):
    set_thread_count(threads)
    sequence = Sequence(Request(request_id="r", prompt_ids=token_ids, max_tokens=1))
    sequence.block_ids = runner.pool.allocate(2)
    runner.open(sequence)
    (logits,) = runner.compute([Part(sequence, 200)])
    digest = hashlib.sha256(runner.pool.buffer(sequence.block_ids[0]))
    digest.update(logits)
    runner.pool.release(sequence.block_ids)
    print(digest.hexdigest())
"""


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_number_of_threads_changes_no_bit(tmp_path: Path, compute: str) -> None:
    model = WIDE.write(tmp_path / "wide.gguf")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), compute],
        check=True,
        capture_output=True,
        text=True,
        timeout=50,
    )
    digests = done.stdout.split()
    assert len(digests) == 4
    assert len(set(digests)) == 1


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
