"""The error of commands that need nodes which do not answer."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import StoreError
from .exit_codes import ExitCode


class NodesDown(StoreError):
    """Nodes do not answer; `failure` is what could not be done then, if it was begun."""

    exit_code = ExitCode.NODE

    def __init__(self, nodes: Sequence[str], failure: StoreError | None = None) -> None:
        super().__init__(
            f"{f'{failure}; ' if failure else ''}no answer from {', '.join(nodes)};"
            " `cachalot up --dir D` starts the nodes of a local cluster"
        )
        self.nodes = list(nodes)
