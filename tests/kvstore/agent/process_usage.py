"""What a process has taken of the system, as the kernel counts it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Usage:
    descriptors: int
    """All but those of `connections`."""
    connections: int
    """TCP sockets."""
    private_bytes: int
    """Memory that is its own: nothing that it shares."""


def usage_of(pid: int) -> Usage:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    private = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
    open_files = descriptors_of(pid)
    tcp = _tcp_sockets(pid)
    connections = sum(name in tcp for name in open_files.values())
    return Usage(len(open_files) - connections, connections, sum(private) * 1024)


def descriptors_of(pid: int) -> dict[int, str]:
    """What each open descriptor is, as the kernel names it: a path, or "socket:[...]"."""
    found = {}
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed just now
            found[int(number)] = os.readlink(f"/proc/{pid}/fd/{number}")
    return found


def _tcp_sockets(pid: int) -> set[str]:
    """All of the machine, named as descriptors are."""
    inode = 9
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {f"socket:[{row[inode]}]" for row in rows}
