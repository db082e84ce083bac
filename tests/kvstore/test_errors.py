"""Errors of the system, in words for whoever gave the file or the address."""

import errno
import os
from pathlib import Path

import pytest

from kvstore.errors import ADVICE, describe_os_error


def test_error_of_the_system_is_said_with_its_file_and_what_may_help() -> None:
    with pytest.raises(OSError, match="none") as caught:
        Path("/none/at/all").read_bytes()
    assert describe_os_error(caught.value) == (
        "/none/at/all: No such file or directory; name one that is there"
    )
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert describe_os_error(full) == (
        "No space left on device; make room on its disk, or name a place on another one"
    )
    assert describe_os_error(OSError(errno.EIO, os.strerror(errno.EIO))) == "Input/output error"
    assert describe_os_error(OSError("of Python's own")) == "of Python's own"


@pytest.mark.parametrize("number", ADVICE)
def test_no_advice_leaves_the_number_of_an_error(number: int) -> None:
    said = describe_os_error(OSError(number, os.strerror(number), "file"))
    assert said == f"file: {os.strerror(number)}; {ADVICE[number]}"
