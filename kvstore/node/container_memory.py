"""How much memory the container around this process has left, as its control groups say.

For whoever is about to take much: a target in a memory file system, an arena. Reads only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CGROUP_LIMIT_MIN_UNLIMITED = 1 << 60
"""Version 1 says "no limit" by a number of about 2^63."""


@dataclass(frozen=True, slots=True)
class SystemRoots:
    """Where the system describes itself; another place in tests."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")


SYSTEM = SystemRoots()


def read_container_left(roots: SystemRoots) -> int | None:
    """Bytes of memory that the tightest cgroup around this process has left; None: no limit.

    File cache that the kernel would drop first counts as left.
    """
    lines = (roots.proc / "self" / "cgroup").read_text().splitlines()
    groups = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    found = [
        left
        for _, controllers, path in groups
        if not controllers or "memory" in controllers.split(",")
        for folder in _group_folders(roots, path, is_v1=bool(controllers))
        if (left := _read_group_left(folder, is_v1=bool(controllers))) is not None
    ]
    return min(found, default=None)


def _group_folders(roots: SystemRoots, path: str, *, is_v1: bool) -> list[Path]:
    """The folder of a cgroup and those of all groups around it, as far as they are shown to us."""
    root = roots.cgroup / "memory" if is_v1 else roots.cgroup
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _read_group_left(folder: Path, *, is_v1: bool) -> int | None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ()
    limit_name, usage_name = names or ("memory.max", "memory.current")
    try:
        limit = (folder / limit_name).read_text().strip()
        used_bytes = int((folder / usage_name).read_text())
    except FileNotFoundError:
        return None
    if limit == "max" or int(limit) >= CGROUP_LIMIT_MIN_UNLIMITED:
        return None
    return max(int(limit) - used_bytes + _read_cache_bytes(folder), 0)


def _read_cache_bytes(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(None, 1) for line in lines if " " in line)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
