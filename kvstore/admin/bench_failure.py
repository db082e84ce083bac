"""The error of `cachalot bench`, and of the processes that it starts to measure against."""

from collections.abc import Sequence

from ..errors import StoreError


class BenchFailed(StoreError):
    """What was to be measured did not do its work, or did not do it in time."""

    exit_code = 1


class NodesDown(StoreError):
    """Nodes do not answer; `failure` is what could not be measured then, if it was begun."""

    exit_code = 4

    def __init__(self, nodes: Sequence[str], failure: BenchFailed | None = None) -> None:
        super().__init__(
            f"{f'{failure}; ' if failure else ''}no answer from {', '.join(nodes)};"
            " `cachalot up --dir D` starts the nodes of a local cluster"
        )
        self.nodes = list(nodes)
