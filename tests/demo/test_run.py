"""The demo as a user runs it, with a short document: it ends well, and leaves nothing behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT

COMMAND = [sys.executable, "-m", "demo", "--tokens", "600"]
SHORT = """
import runpy
from demo import scenario
scenario.SHORT_ANSWER_TOKENS = scenario.Scenario._ask.__kwdefaults__["max_tokens"] = 16
scenario.LONG_ANSWER_TOKENS = 40
runpy.run_module("demo", run_name="__main__")
"""
"""The same with answers that are shorter than it has them."""
START_DEADLINE_S = 90.0
END_DEADLINE_S = 60.0


def find_processes(folder: Path, program: str = "") -> list[int]:
    """Processes that name the folder on their command line: its storage nodes, its agent."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue  # it has ended meanwhile
            if str(folder).encode() in command and program.encode() in command:
                found.append(int(entry.name))
    return found


@pytest.fixture
def temporary_folder() -> Iterator[Path]:
    """Where the demo makes its folder; ends what a broken demo left running. Its name is short,
    because the path of the agent's socket must be."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="ca-"))
    yield folder
    for pid in find_processes(folder):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder)


def start_demo(
    folder: Path, *words: str, command: Sequence[str] = COMMAND
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, *words],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As from a terminal, where Ctrl-C goes to every process of the foreground group.
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demo_keeps_all_its_claims(temporary_folder: Path) -> None:
    command = [sys.executable, "-c", SHORT, "--tokens", "600"]
    with start_demo(temporary_folder, "--json", command=command) as demo:
        said, complaints = demo.communicate(timeout=280)
    assert demo.returncode == 0, complaints
    found = json.loads(said)
    assert found["all_claims_hold"] is True
    requests = found["requests"]
    assert [request["number"] for request in requests] == [1, 2, 3, 4, 5, 6, 7]
    hits = [request["hit_tokens"] for request in requests]
    assert hits[0] == hits[6] == 0
    assert min(hits[1:6]) >= 256
    assert requests[5]["hit_tokens"] > requests[1]["prompt_tokens"]
    assert requests[4]["rejected_shards"] >= 1
    assert len({request["text"] for request in requests if request["number"] in (1, 3, 4, 5)}) == 1
    assert requests[5]["text"] == requests[6]["text"]
    assert complaints == ""
    assert list(temporary_folder.iterdir()) == []
    assert find_processes(temporary_folder) == []


@pytest.mark.torture  # a minute for its last line: what is shown is tested beside the displays
@pytest.mark.timeout(300)
def test_demo_ends_with_its_one_line_when_a_person_runs_it(temporary_folder: Path) -> None:
    with start_demo(temporary_folder) as demo:
        said, complaints = demo.communicate(timeout=280)
    assert (demo.returncode, complaints) == (0, "")
    assert "  agent a01 serves the engines through " in said
    last = said.splitlines()[-1]
    found = re.fullmatch(r"time to first token ([0-9.]+) s -> ([0-9.]+) s \(.*\)", last)
    assert found is not None, last
    assert float(found[1]) > 0 < float(found[2])
    assert "WRONG" not in said
    assert list(temporary_folder.iterdir()) == []


def wait_for_nodes(demo: subprocess.Popen[str], folder: Path) -> None:
    """Until the first storage nodes run: the demo is then in the middle of starting them."""
    due_s = time.monotonic() + START_DEADLINE_S
    while not find_processes(folder / "cachalot-demo-") and time.monotonic() < due_s:
        assert demo.poll() is None
        time.sleep(0.02)


def wait_for_first_request(demo: subprocess.Popen[str], folder: Path) -> None:
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith("1. cold"):
            return


@pytest.mark.torture
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("wait", "number"),
    [
        pytest.param(wait_for_nodes, signal.SIGTERM, id="SIGTERM while nodes start"),
        pytest.param(wait_for_first_request, signal.SIGINT, id="Ctrl-C while a request runs"),
    ],
)
def test_demo_cleans_up_when_interrupted(
    temporary_folder: Path, wait: object, number: signal.Signals
) -> None:
    assert callable(wait)
    with start_demo(temporary_folder) as demo:
        wait(demo, temporary_folder)
        os.killpg(demo.pid, number)
        _, complaints = demo.communicate(timeout=END_DEADLINE_S)
    assert demo.returncode == 128 + number, complaints
    assert "Traceback" not in complaints
    assert find_processes(temporary_folder) == []
    assert list(temporary_folder.iterdir()) == []


@pytest.mark.torture
@pytest.mark.timeout(180)
def test_demo_says_which_claim_is_broken_and_cleans_up(temporary_folder: Path) -> None:
    with start_demo(temporary_folder) as demo:
        wait_for_first_request(demo, temporary_folder)
        # Three of twelve: nothing can be saved any more, which request 1 claims it was.
        for pid in find_processes(temporary_folder, "kvstore.node")[:3]:
            os.kill(pid, signal.SIGKILL)
        said, complaints = demo.communicate(timeout=END_DEADLINE_S)
    assert demo.returncode == 1
    assert complaints.startswith("demo: request 1 (cold: nothing is stored yet): not so: 0 blocks")
    assert complaints.count("\n") == 1
    assert "time to first token" not in said
    assert find_processes(temporary_folder) == []
    assert list(temporary_folder.iterdir()) == []


def test_demo_refuses_a_document_of_the_wrong_length(temporary_folder: Path) -> None:
    with start_demo(temporary_folder, "--tokens", "20") as demo:
        _, complaints = demo.communicate(timeout=END_DEADLINE_S)
    assert demo.returncode == 2
    assert "--tokens" in complaints
    assert list(temporary_folder.iterdir()) == []
