"""Programs of the engine, as processes and in this one.

To load the tensor library takes a process longer than most of what it is asked: so what a program
says of its arguments is asked in this process, and processes are for what only they can show.
"""

from __future__ import annotations

import io
import logging
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from types import ModuleType
from unittest.mock import patch

import pytest


@dataclass(frozen=True, slots=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


def run_here(program: ModuleType, *words: object) -> Ended:
    """Run `program.main()` with one thread for tensors, as a process of its own would.

    The environment that the program prepares has been prepared: the tensor library is loaded.
    """
    out, error = io.StringIO(), io.StringIO()
    arguments = [program.__name__, "--threads", "1", *map(str, words)]
    root = logging.getLogger()
    # Without handlers, as in a fresh process: what is logged goes to stderr.
    handlers, root.handlers = root.handlers, []
    try:
        with (
            patch.object(sys, "argv", arguments),
            patch.object(program, "prepare_environment", lambda: None),
            redirect_stdout(out),
            redirect_stderr(error),
            pytest.raises(SystemExit) as ended,
        ):
            program.main()
    finally:
        root.handlers = handlers
    code = ended.value.code
    assert isinstance(code, int), code
    return Ended(code, out.getvalue(), error.getvalue())
