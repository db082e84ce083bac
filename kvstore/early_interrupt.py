"""Ctrl-C while a program is still being loaded, when nobody can catch it.

A `KeyboardInterrupt` inside an import is a traceback, and inside the tensor library's an abort:
C++ is not left by an exception of Python's. There is nothing to clean up yet, so the process just
ends. A program that a person starts says so before its other imports; it must stay cheap to import.
"""

import os
import signal
from typing import NoReturn

INTERRUPTED = 130


def end_at_interrupt() -> None:
    """From now on Ctrl-C ends this process at once, without a word, unless it is ignored, as by the
    background processes of a script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_at_interrupt() -> None:
    """All is loaded: from now on Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_number: int, _frame: object) -> NoReturn:
    os._exit(INTERRUPTED)
