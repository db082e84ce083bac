"""Paths from a command line that cannot be what they are for: said before anything is loaded."""

from __future__ import annotations

import stat
from pathlib import Path

from kvstore.model_place import find_model_faults
from kvstore.socket_file import check_socket_path

from .errors import InvalidRequest, MissingModel, ModelFileError


def check_model_path(path: Path) -> None:
    """That a model could be there. Raises MissingModel, ModelFileError."""
    faults = find_model_faults(path)
    if not path.exists():
        raise MissingModel(path, *faults)
    if faults:
        raise ModelFileError(path, faults)


def check_agent_path(path: Path) -> None:
    """That an agent could be there. One that is not there yet may come: all is computed until then.

    Raises InvalidRequest, InvalidArgument.
    """
    check_socket_path(path, "--agent")
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise InvalidRequest(
            "--agent",
            given=f"{path}, which is no socket",
            expected="the socket of this host's agent",
        )
