"""The secret of a cluster's control API: a file that only its owner may read.

One token for all nodes of a cluster. Whoever has it may change the policy and see everything but
the stored bytes. It never appears in a command line, a log or a URL.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path

from ..errors import InvalidArgument

TOKEN_NAME = "control-token"
"""The file's usual name, beside the cluster map."""
TOKEN_BYTES = 32
TOKEN_PATTERN = re.compile(r"[A-Za-z0-9_-]{32,128}")
TOKEN_RULE = "32 to 128 of A-Z a-z 0-9 _ -"
FILE_MODE = 0o600
FILE_BYTES_MAX = 1024


def make_token_file(path: Path) -> None:
    """Write a new token to `path` unless there is a file already. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
            file.flush()
            os.fsync(descriptor)
        # A link and not a rename: of two that are made at once the first one stays.
        os.link(temporary, path)
    except FileExistsError:
        return
    finally:
        os.unlink(temporary)


def read_token_file(path: Path) -> str:
    """The token in a file that nobody but its owner may read.

    Raises InvalidArgument for a missing file, one that others may read, and one without a token.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidArgument(
            "token file", given=f"{path}: {error.strerror}", expected="a file with the token"
        ) from error
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise InvalidArgument("token file", given=path, expected="a regular file")
        if state.st_mode & 0o077:
            raise InvalidArgument(
                "token file",
                given=f"{path} with mode {stat.S_IMODE(state.st_mode):04o}",
                expected=f"mode 0600, as after `chmod 600 {path}`: others must not read it",
            )
        text = os.read(descriptor, FILE_BYTES_MAX).decode("ascii", errors="replace").strip()
    finally:
        os.close(descriptor)
    if not TOKEN_PATTERN.fullmatch(text):
        # The text itself is not shown: it may be a secret with one character too many.
        raise InvalidArgument(
            "token file", given=f"{path} with {len(text)} characters", expected=TOKEN_RULE
        )
    return text
