"""How much memory may be page-locked, by what the system says of itself before it is tried.

Pages that are locked cannot be given back, so a lack shows itself as the end of some other process.
CUDA's driver does not count what it locks against RLIMIT_MEMLOCK, so that limit is named where
locking fails, and refuses nothing; whoever registers memory with a NIC is held to it by the kernel.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
from dataclasses import dataclass
from pathlib import Path

import numpy as np

RESERVE_BYTES = 256 << 20
"""Left to everybody else, in the host and in the control group."""

_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_FILES = ("memory.max", "memory.current", "inactive_file")
"""Of a group: its limit, what it uses, and the line of memory.stat of what it can do without."""
_CAP_IPC_LOCK = 14
_UNLIMITED_BYTES = 1 << 60
"""Version 1 says that there is no limit by a number of about 2^63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockLimits:
    """None: no limit, or none that can be read."""

    available_bytes: int | None
    """Of the host, without swapping (MemAvailable)."""
    group_left_bytes: int | None
    """Until the control group is full."""
    memlock_bytes: int | None
    """RLIMIT_MEMLOCK of this process, if it is held to it."""

    def describe(self) -> str:
        """For people who wonder why it failed."""
        return (
            f"memory available: {_sized(self.available_bytes)}, left in the control group: "
            f"{_sized(self.group_left_bytes)}, RLIMIT_MEMLOCK: {_sized(self.memlock_bytes)}"
        )


def find_lack(new_bytes: int, limits: LockLimits) -> str | None:
    """Why so many bytes that have no pages yet cannot be locked, None if they can."""
    for left, of_what in (
        (limits.available_bytes, "available in this host"),
        (limits.group_left_bytes, "left in the control group"),
    ):
        if left is not None and new_bytes + RESERVE_BYTES > left:
            return (
                f"{new_bytes} more bytes of memory are needed, beside {RESERVE_BYTES} for others, "
                f"and {left} are {of_what}; give the agent a smaller --arena"
            )
    return None


def find_memlock_lack(locked_bytes: int, limits: LockLimits) -> str | None:
    """Why so many bytes, with pages or without, cannot be locked by those whom the kernel holds to
    RLIMIT_MEMLOCK; None if they can."""
    if limits.memlock_bytes is None or locked_bytes <= limits.memlock_bytes:
        return None
    return (
        f"{locked_bytes} bytes are to be locked, and RLIMIT_MEMLOCK is {limits.memlock_bytes}; "
        "raise it (ulimit -l, LimitMEMLOCK=)"
    )


def missing_bytes(address: int, size_bytes: int) -> int:
    """Bytes of a mapping that have no page of memory yet (mincore(2)), all if that cannot be
    read. `address` begins a page."""
    pages = -(-size_bytes // mmap.PAGESIZE)
    resident = np.zeros(pages, np.uint8)
    status = ctypes.CDLL(None).mincore(
        ctypes.c_void_p(address),
        ctypes.c_size_t(size_bytes),
        ctypes.c_void_p(resident.ctypes.data),
    )
    missing = pages if status != 0 else int(np.count_nonzero(resident & 1 == 0))
    return missing * mmap.PAGESIZE


def left_in_group(limit: str, usage: str, stat: str, reclaimable: str) -> int | None:
    """Bytes until a control group is full, None for one without a limit. The texts are those of its
    files. Pages of files that nobody has used lately (the line `reclaimable` of memory.stat) are
    counted as used, and make room without a loss: a node that has just written its segments fills
    its group with them."""
    texts = limit.strip(), usage.strip()
    if not all(text.isdigit() for text in texts) or int(limit) >= _UNLIMITED_BYTES:
        return None
    lines = (line.split() for line in stat.splitlines())
    found = [int(line[1]) for line in lines if len(line) == 2 and line[0] == reclaimable]
    used_bytes = max(0, int(usage) - sum(found))
    return max(0, int(limit) - used_bytes)


def read_limits(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> LockLimits:
    """What the system says now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_unlimited = soft == resource.RLIM_INFINITY or _may_lock_all(proc)
    return LockLimits(
        available_bytes=_read_available(proc),
        group_left_bytes=_read_group_left(proc, groups),
        memlock_bytes=None if is_unlimited else soft,
    )


def _may_lock_all(proc: Path) -> bool:
    """Whether the process has CAP_IPC_LOCK (capabilities(7)): no limit holds for it then."""
    for line in _read(proc / "self" / "status").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> _CAP_IPC_LOCK & 1)
    return False


def _read_available(proc: Path) -> int | None:
    for line in _read(proc / "meminfo").splitlines():
        words = line.split()  # proc(5): "MemAvailable:   12345 kB"
        if len(words) == 3 and words[0] == "MemAvailable:":
            return int(words[1]) * 1024
    return None


def _read_group_left(proc: Path, groups: Path) -> int | None:
    """Of the tightest control group around this process: its pages are charged there."""
    found = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        limit, usage, reclaimable = _V1_FILES if controllers else _V2_FILES
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            stat = _read(group / "memory.stat")
            left_bytes = left_in_group(
                _read(group / limit), _read(group / usage), stat, reclaimable
            )
            if left_bytes is not None:
                found.append(left_bytes)
            if group == root:
                break
    return min(found, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # a system that does not say sets no limit


def _sized(size_bytes: int | None) -> str:
    return "not limited" if size_bytes is None else f"{size_bytes} bytes"
