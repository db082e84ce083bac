"""The command line of `gc_worker`, as values. Reads no file and starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.node.arguments import DaemonParser

EXIT_CODES = """exit codes:
  0  stopped by SIGTERM or SIGINT
  1  the control API cannot be served, or a fault in the program (with a traceback)
  2  wrong arguments
  3  the cluster map is missing or has mistakes
  5  another gc_worker looks after one of the node's targets, or a folder cannot be used
"""

CONTROL_OF_MAP = "map"
"""In place of an address: the one that the cluster map has for the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerArguments:
    """What the command line says."""

    cluster_path: Path
    """The cluster map's file."""
    node: str
    """The name in the map of the node to look after."""
    control: str | None = None
    """host:port of the control API, or CONTROL_OF_MAP; None: none is served."""
    control_fd: int | None = None
    """An inherited listening socket in place of one on `control`."""
    is_control_remote: bool = False
    """Whether `control` may be an address that other machines can reach."""
    token_path: Path | None = None
    """The file with the control API's token."""
    is_log_json: bool = False
    """Whether log lines are JSON objects."""

    @property
    def has_control(self) -> bool:
        """Whether the control API is to be served."""
        return self.control is not None or self.control_fd is not None


def parse_arguments(words: Sequence[str]) -> WorkerArguments:
    """The arguments in `words`; ends the process with status 2 if they are wrong."""
    parser = DaemonParser(
        "gc_worker",
        "Looks after one storage node: TTL, LRU and watermarks, scrub, repair, policy.",
        EXIT_CODES,
    )
    add = parser.add_argument
    add("--cluster", type=Path, required=True, metavar="FILE", help="the cluster map")
    add(
        "--node",
        required=True,
        metavar="NAME",
        help="the name in the map of the node to look after",
    )
    add(
        "--control",
        metavar="HOST:PORT",
        help="serve the control API there, or where the map says (`map`); needs --token-file",
    )
    add("--control-fd", type=int, metavar="FD", help="the same on an inherited listening socket")
    add(
        "--control-remote",
        action="store_true",
        help="allow a --control address that other machines can reach",
    )
    add("--token-file", type=Path, metavar="FILE", help="the control API's token, mode 0600")
    add("--log-json", action="store_true", help="write each log line as a JSON object")
    found = parser.parse_args(words)
    arguments = WorkerArguments(
        cluster_path=found.cluster,
        node=found.node,
        control=found.control,
        control_fd=found.control_fd,
        is_control_remote=found.control_remote,
        token_path=found.token_file,
        is_log_json=found.log_json,
    )
    if found.control is not None and found.control_fd is not None:
        parser.error("--control and --control-fd: give one of them")
    if arguments.has_control != (found.token_file is not None):
        parser.error("--control (or --control-fd) and --token-file: give both or none of them")
    return arguments
