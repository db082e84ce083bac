"""Runs `cachalot` as a user does, and looks at processes from outside.

Command lines that leave nothing running are run in this process: to start one takes longer than
most of what it is asked. Those of `start_cachalot`, and the rest, have a process of their own.
"""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvstore.admin.cli import run

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "kvstore.admin.cli"]
TIMEOUT_S = 40.0
QUICK_COMMANDS = {
    *("down", "drain", "gc", "inspect", "policy"),
    *("settings", "status", "ttl", "verify", "watermark"),
}
"""Those that leave nothing running."""

Result = subprocess.CompletedProcess[str]


def cachalot(*words: str | Path, code: int | None = 0) -> Result:
    """Run a command line and check its exit code (None: any) and that no traceback is shown."""
    given = tuple(map(str, words))
    is_quick = given[:1] and given[0] in QUICK_COMMANDS
    result = _run_here(given) if is_quick else _run_process(given)
    assert "Traceback" not in result.stderr, result.stderr
    assert code is None or result.returncode == code, (result.returncode, result.stderr)
    return result


def cachalot_here(*words: str | Path, code: int) -> Result:
    """The same in this process, also of others: for command lines that fail at once."""
    result = _run_here(tuple(map(str, words)))
    assert result.returncode == code, (result.returncode, result.stderr)
    return result


def _run_process(words: tuple[str, ...]) -> Result:
    return subprocess.run(
        [*COMMAND, *words],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def _run_here(words: tuple[str, ...]) -> Result:
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        patch.object(sys, "argv", ["cachalot", *words]),
        patch.object(sys, "excepthook", sys.excepthook),
        patch.object(sys, "stdin", io.StringIO()),
        patch.dict(os.environ, {"COLUMNS": "200"}),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        code = run()
    assert isinstance(code, int | None), code
    return Result(words, code or 0, stdout.getvalue(), stderr.getvalue())


def cachalot_json(*words: str | Path, code: int = 0) -> dict[str, Any]:
    """The same with --json: what it answered, which must be all of stdout."""
    found = json.loads(cachalot(*words, "--json", code=code).stdout)
    assert isinstance(found, dict)
    return found


def start_cachalot(*words: str | Path) -> subprocess.Popen[str]:
    """Start a command line and do not wait for it."""
    return subprocess.Popen(
        [*COMMAND, *map(str, words)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def one_line(result: Result) -> str:
    """The only line on stderr; nothing may be on stdout."""
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended; asks the kernel and none of our code."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def find_running(folder: Path) -> list[int]:
    """The pids of all processes that name the folder on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        pid = int(entry.name)
        if str(folder).encode() in command and pid != os.getpid() and is_running(pid):
            found.append(pid)
    return sorted(found)
