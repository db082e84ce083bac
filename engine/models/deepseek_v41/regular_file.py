"""Files whose kind is not to be trusted: only regular ones are read, and nothing is waited for."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ...errors import MissingModel, ModelFileError


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """The file, open for reading, and its size in bytes.

    Raises MissingModel if there is no such file, or one that is not regular, and ModelFileError if
    it cannot be opened, or be read in the body of the `with`.
    """
    try:
        with _open(path) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise MissingModel(path, "it is not a regular file")
            yield file, status.st_size
    except ModelFileError:
        # MissingModel is a FileNotFoundError too.
        raise
    except (FileNotFoundError, IsADirectoryError) as error:
        raise MissingModel(path, "there is no such file") from error
    except OSError as error:
        raise ModelFileError(path, [f"cannot be read ({error})"]) from error


def read_regular(path: Path, *, bytes_max: int) -> bytes:
    """What is in a regular file of at most `bytes_max`; raises as `open_regular`."""
    with open_regular(path) as (file, size):
        if size > bytes_max:
            raise ModelFileError(path, [f"{size} bytes, expected at most {bytes_max}"])
        return file.read(size)


def _open(path: Path) -> BinaryIO:
    # Without O_NONBLOCK, a pipe opens only when someone writes to it.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb")
