"""The programs in docs/engines.md run as they stand there."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.worker.options import Role
from tests.architecture.source_tree import ROOT, project_texts
from tests.engine.worker.worker_process import WorkerProcess
from tests.kvstore.agent.agent_process import short_folder

pytestmark = pytest.mark.slow


@pytest.fixture
def engines() -> Iterator[Path]:
    """Give the folder of the socket of a worker that answers alone."""
    folder = short_folder()
    worker = WorkerProcess("b01", Role.BOTH, folder, ROOT / "models" / "v41-mini", agent=None)
    worker.start()
    try:
        worker.wait_until_ready()
        yield folder
    finally:
        worker.kill()
        shutil.rmtree(folder)


def example_with(text: str) -> str:
    page = project_texts()["docs/engines.md"]
    examples = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (example,) = (one for one in examples if text in one)
    return str(example)


def run_example(example: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_example_of_an_engine_answers_streams_and_aborts() -> None:
    lines = run_example(example_with("LLMEngine("))
    aborted, *answered, first, _, _, _, _, _, _, last = lines
    assert aborted.startswith("c aborted ")
    assert [line.split()[:2] for line in answered] == [["a", "length"], ["b", "length"]]
    assert re.fullmatch(r"0 \(\d+,\) None", first)
    assert re.fullmatch(r"7 \(\d+,\) length", last)


def test_example_of_a_client_prints_parts_and_text(engines: Path) -> None:
    example = example_with("EngineClient(")
    assert example.count('"D/engines"') == 1
    *parts, text = run_example(example.replace('"D/engines"', repr(str(engines))))
    assert re.fullmatch(r"0 \(\d+,.*\) None", parts[0])
    assert re.fullmatch(r"\d+ \(.*\) (length|stop)", parts[-1])
    assert len(text) > len("''")
