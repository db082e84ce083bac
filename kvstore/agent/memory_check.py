"""Whether this machine has the memory that an agent is told to take, before it takes any.

The pages of an arena are taken one by one as they are first used. Without this check an agent that
was promised too much would start well, and be killed by the kernel hours later.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidArgument
from ..node.container_memory import SYSTEM, SystemRoots, read_container_left
from .options import format_size


@dataclass(frozen=True, slots=True)
class MemoryLeft:
    """Bytes that the machine and the container around us can still give; None: it does not say."""

    machine_bytes: int | None
    container_bytes: int | None


def read_memory_left(roots: SystemRoots = SYSTEM) -> MemoryLeft:
    """What the system says now."""
    try:
        container_bytes = read_container_left(roots)
    except (OSError, ValueError):
        container_bytes = None
    return MemoryLeft(_read_available(roots), container_bytes)


def check_memory(arena_bytes: int, window_bytes: int, left: MemoryLeft) -> None:
    """Raises InvalidArgument if arena and window memory together are more than is left."""
    wanted_bytes = arena_bytes + window_bytes
    for name, left_bytes in (
        ("this machine", left.machine_bytes),
        ("the container's memory limit", left.container_bytes),
    ):
        if left_bytes is not None and wanted_bytes > left_bytes:
            given = f"{format_size(arena_bytes)} of arena"
            given += f" and {format_size(window_bytes)} of window records" if window_bytes else ""
            raise InvalidArgument(
                "memory",
                given=given,
                expected=f"together at most what {name} has left, {format_size(left_bytes)}",
            )


def _read_available(roots: SystemRoots) -> int | None:
    try:
        lines = (roots.proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        # proc(5): "MemAvailable:   12345 kB"
        words = line.split()
        if len(words) == 3 and words[0] == "MemAvailable:" and words[1].isdigit():
            return int(words[1]) * 1024
    return None
