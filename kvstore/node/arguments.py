"""The command line of `kvstored`, as values. Reads no file and starts nothing."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ..errors import shorten
from .node import SyncPolicy

MEMORY_BYTES_MIN = 1 << 20
SEGMENT_BYTES_MIN = 64 << 10
SEGMENT_BYTES_MAX = 64 << 30

_SIZE = re.compile(r"(\d{1,15})\s?(|B|KiB|MiB|GiB|TiB)")
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

EXIT_CODES = """exit codes:
  0  stopped by SIGTERM or SIGINT
  1  cannot listen, or a fault in the program (with a traceback)
  2  wrong arguments
  3  the cluster map is missing or has mistakes
  5  a target cannot be served: locked, damaged, or somebody else's
"""


class DaemonParser(argparse.ArgumentParser):
    """Reads the command line of a daemon: options are spelt out, and long words shown in short."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """End the process with status 2 and a line for a person."""
        super().error(shorten(message))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeArguments:
    """What the command line says."""

    cluster_path: Path
    """The cluster map's file."""
    node: str
    """The name in the map of the node to be."""
    listen_fd: int | None = None
    """An inherited listening socket, in place of one on the map's address."""
    sync: SyncPolicy = SyncPolicy.INTERVAL
    """When written shards are put on the device."""
    segment_bytes: int = 256 << 20
    """Length of new segment files."""
    memory_bytes: int = 256 << 20
    """Limit of all buffers for shards on their way."""
    is_log_json: bool = False
    """Whether log lines are JSON objects."""


def parse_arguments(words: Sequence[str]) -> NodeArguments:
    """The arguments in `words`; ends the process with status 2 if they are wrong."""
    parser = DaemonParser(
        "kvstored",
        "Keeps shards of KV blocks on the targets of one storage node and serves them.",
        EXIT_CODES,
    )
    add = parser.add_argument
    add("--cluster", type=Path, required=True, metavar="FILE", help="the cluster map")
    add("--node", required=True, metavar="NAME", help="this node's name in the map")
    add("--listen-fd", type=int, metavar="FD", help="an inherited listening socket")
    add(
        "--sync",
        choices=[policy.value for policy in SyncPolicy],
        default=SyncPolicy.INTERVAL.value,
        help="when shards are put on the device: never by us, once a second, or before each"
        " acknowledgement (default: interval)",
    )
    add(
        *("--segment-size", "--segment-bytes"),
        type=_size(SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX),
        default="256MiB",
        metavar="SIZE",
        help="length of new segment files (default: 256MiB)",
    )
    add(
        "--memory",
        type=_size(MEMORY_BYTES_MIN, 1 << 50),
        default="256MiB",
        metavar="SIZE",
        help="limit of all buffers for shards on their way (default: 256MiB)",
    )
    add("--log-json", action="store_true", help="write each log line as a JSON object")
    found = parser.parse_args(words)
    return NodeArguments(
        cluster_path=found.cluster,
        node=found.node,
        listen_fd=found.listen_fd,
        sync=SyncPolicy(found.sync),
        segment_bytes=found.segment_size,
        memory_bytes=found.memory,
        is_log_json=found.log_json,
    )


def _size(bytes_min: int, bytes_max: int) -> Callable[[str], int]:
    """A parser of sizes such as 256MiB within limits."""

    def parse(text: str) -> int:
        found = _SIZE.fullmatch(text)
        if found is None:
            raise argparse.ArgumentTypeError(f"given {text!r}, expected a size such as 256MiB")
        size_bytes = int(found[1]) * _UNITS[found[2]]
        if not bytes_min <= size_bytes <= bytes_max:
            raise argparse.ArgumentTypeError(
                f"given {size_bytes} bytes, expected {bytes_min} to {bytes_max}"
            )
        return size_bytes

    return parse
