"""README's commands are run as a reader would: in order, in one folder, from a fresh shell each.

A block fenced as `sh` is run. One fenced as `sh slow`, or whose first line is a comment that begins
with `# not run in tests`, is not: those are the commands that install everything or take minutes.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT, project_paths, project_texts
from tests.patience import wait_until

EXCLUDED_BLOCKS_MAX = 3
BLOCK_TIMEOUT_S = 300.0
OUTPUT_TAIL_CHARACTERS = 4_000


@dataclass(frozen=True)
class Block:
    """One fenced `sh` block: the line it begins on, its commands, and whether it is run."""

    line: int
    commands: str
    is_run: bool


def find_blocks(text: str) -> list[Block]:
    """Return the `sh` blocks of a Markdown text in their order."""
    blocks = []
    for match in re.finditer(r"^```sh\b([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        words, commands = match.groups()
        is_slow = "slow" in words.split() or commands.startswith("# not run in tests")
        blocks.append(Block(text.count("\n", 0, match.start()) + 1, commands, not is_slow))
    return blocks


def readme_blocks() -> list[Block]:
    return find_blocks(project_texts()["README.md"])


@pytest.fixture
def working_folder(tmp_path: Path) -> Iterator[Path]:
    """Give a copy of the project with this environment as its `.venv`; end what is left running."""
    for path in project_paths():
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    yield tmp_path
    for pid in find_processes(tmp_path):
        os.kill(pid, signal.SIGKILL)


def find_processes(folder: Path) -> list[int]:
    """Return the processes that work in the folder or name it on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            place = os.readlink(entry / "cwd")
        except OSError:
            continue  # it has ended, or is another user's
        if str(folder).encode() in command or place.startswith(str(folder)):
            found.append(int(entry.name))
    return found


def run_block(block: Block, folder: Path) -> tuple[int, str]:
    """Run one block and return its exit status and the end of what it printed."""
    log = folder / f"readme-line-{block.line}.log"
    environment = os.environ | {"PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"}
    # Into a file: a daemon that a command leaves behind would keep a pipe open for ever.
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", block.commands],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(BLOCK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
    return status, log.read_text(errors="replace")[-OUTPUT_TAIL_CHARACTERS:]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_readme_commands_work(working_folder: Path) -> None:
    blocks = [block for block in readme_blocks() if block.is_run]
    assert blocks, "README shows no command"
    for block in blocks:
        status, output = run_block(block, working_folder)
        assert status == 0, (
            f"README.md:{block.line}: exit status {status}\n{block.commands}{output}"
        )
    # A reader who follows to the end is left with nothing running.
    wait_until(lambda: find_processes(working_folder) == [])


def test_few_readme_blocks_are_not_run() -> None:
    excluded = [block for block in readme_blocks() if not block.is_run]
    assert len(excluded) <= EXCLUDED_BLOCKS_MAX
    # `make` in the copy would install that copy into this environment.
    run = "\n".join(block.commands for block in readme_blocks() if block.is_run)
    assert not re.search(r"^\s*make\b", run, re.MULTILINE)


def test_blocks_are_found_by_their_fence() -> None:
    text = (
        "a\n```sh\nls\n```\n"
        "```sh slow\nmake demo\n```\n"
        "```sh\n# not run in tests: it takes an hour\n```\n"
        "```py\n```\n"
    )
    found = [(block.line, block.is_run) for block in find_blocks(text)]
    assert found == [(2, True), (5, False), (8, False)]


def test_block_fails_when_its_first_command_fails(tmp_path: Path) -> None:
    status, output = run_block(Block(1, "false\necho reached\n", True), tmp_path)
    assert (status, output) == (1, "")
