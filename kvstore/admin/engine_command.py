"""`cachalot engine`: an engine worker. Its command line is read by its own process, which this one
becomes: the packages of the store know nothing of engines."""

import os
import sys
from typing import Annotated

import typer

from .node_process import ENGINE
from .node_start import CODE_ROOT


def engine(
    words: Annotated[
        list[str] | None, typer.Argument(help="Options of the worker; --help lists them.")
    ] = None,
) -> None:
    """Run an engine worker: it computes prompts, or goes on with them, for clients.

    `cachalot engine --help` shows its options.
    """
    path = os.pathsep.join(filter(None, [str(CODE_ROOT), os.environ.get("PYTHONPATH")]))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(
        sys.executable,
        [sys.executable, "-m", ENGINE.module, *(words or [])],
        os.environ | {"PYTHONPATH": path},
    )
