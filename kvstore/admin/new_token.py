"""Makes the files of secrets that `kvstore.token_file` reads."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from ..token_file import FILE_MODE

TOKEN_BYTES = 32


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
