"""Secrets in files that only their owner may read: of a cluster's control API, of its engines.

One token for all nodes of a cluster: whoever has it may change the policy and see everything but
the stored bytes. Another one for all its engines: whoever has it can make tickets of a hand-over.
Neither ever appears in a command line, a log or a URL.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from .errors import InvalidArgument

TOKEN_NAME = "control-token"
"""The usual name of the control API's, beside the cluster map."""
TOKEN_PATTERN = re.compile(r"[A-Za-z0-9_-]{32,128}")
TOKEN_RULE = "32 to 128 of A-Z a-z 0-9 _ -"
FILE_MODE = 0o600
FILE_BYTES_MAX = 1024


def read_token_file(path: Path, *, option: str = "token file") -> str:
    """The token in a file that nobody but its owner may read.

    Raises InvalidArgument for a missing file, one that others may read, and one without a token.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidArgument(
            option,
            given=f"{path}: {error.strerror}",
            expected="a file with the token that this user may read, of mode 0600 and its own",
        ) from error
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise InvalidArgument(option, given=path, expected="a regular file")
        if state.st_mode & 0o077:
            raise InvalidArgument(
                option,
                given=f"{path} with mode {stat.S_IMODE(state.st_mode):04o}",
                expected=f"mode 0600, as after `chmod 600 {path}`: others must not read it",
            )
        text = os.read(descriptor, FILE_BYTES_MAX).decode("ascii", errors="replace").strip()
    finally:
        os.close(descriptor)
    if not TOKEN_PATTERN.fullmatch(text):
        # The text itself is not shown: it may be a secret with one character too many.
        raise InvalidArgument(
            option, given=f"{path} with {len(text)} characters", expected=TOKEN_RULE
        )
    return text
