"""Errors of the system, in words for whoever gave the file or the address."""

import errno
import os
from pathlib import Path

import pytest

from kvstore.errors import (
    ADVICE,
    SHOWN_CHARACTERS_MAX,
    InvalidArgument,
    describe_os_error,
    shorten,
    shown,
)


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


def test_long_value_keeps_its_beginning_and_its_end() -> None:
    longest = "x" * SHOWN_CHARACTERS_MAX
    assert shorten(longest) == longest
    assert shorten(f"a{longest}z") == f"a{'x' * 239} ...(2 characters)... {'x' * 59}z"
    assert shown("b" * 100_000).startswith("'bbb")
    assert shown("b" * 100_000).endswith("bbb'")
    assert (shown(None), shown("a b"), shown(5)) == ("nothing", "'a b'", "5")


def test_what_was_given_never_hides_the_rule() -> None:
    error = InvalidArgument("--node", given="x" * 100_000, expected="one of the map")
    assert str(error).startswith("--node: given xxx")
    assert str(error).endswith("xxx, expected one of the map")
    assert len(str(error)) < 400
    assert error.given == "x" * 100_000
