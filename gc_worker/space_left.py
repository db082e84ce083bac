"""What the system says of the room for a target: file system, project quota, memory of a container.

Reads only; blocks, and may hang on a mount that does, so it is called in a thread. What cannot be
read is named with the reason, and does not count as a limit.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from .usage import CONTAINER, FILE_SYSTEM, PROJECT_QUOTA, SpaceLeft

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
FS_IOC_FSGETXATTR = 0x801C581F
_FSXATTR = struct.Struct("<IIIII8x")
"""struct fsxattr of linux/fs.h: the fourth number is the project."""
Q_GETQUOTA_PROJECT = (0x800007 << 8) | 2
"""QCMD(Q_GETQUOTA, PRJQUOTA) of linux/quota.h; the kernel answers it for XFS too."""
_DQBLK = struct.Struct("<QQQQQQQQI4x")
"""struct if_dqblk: limits in KiB, the space in use in bytes."""
CGROUP_LIMIT_MIN_UNLIMITED = 1 << 60
"""Version 1 says "no limit" by a number of about 2^63."""


@dataclass(frozen=True, slots=True)
class SystemRoots:
    """Where the system describes itself; another place in tests."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Mount:
    """The file system under a folder."""

    kind: str
    device: str


SYSTEM = SystemRoots()


def read_space_left(folder: Path, roots: SystemRoots = SYSTEM) -> SpaceLeft:
    """Bytes that a target in `folder` may still write, by limit."""
    left: dict[str, int] = {}
    unreadable: dict[str, str] = {}
    try:
        found = os.statvfs(folder)
        left[FILE_SYSTEM] = found.f_bavail * found.f_frsize
    except OSError as error:
        unreadable[FILE_SYSTEM] = error.strerror or str(error)
        return SpaceLeft(left_bytes=left, unreadable=unreadable)
    mount = find_mount(folder, roots)
    try:
        quota = _read_project_quota(folder, mount)
        if quota is not None:
            left[PROJECT_QUOTA] = quota
    except OSError as error:
        unreadable[PROJECT_QUOTA] = error.strerror or str(error)
    if mount is not None and mount.kind in MEMORY_FILE_SYSTEMS:
        # What lies in memory counts against the container; a file on a disk does not.
        try:
            container = read_container_left(roots)
            if container is not None:
                left[CONTAINER] = container
        except (OSError, ValueError) as error:
            unreadable[CONTAINER] = str(error)
    return SpaceLeft(left_bytes=left, unreadable=unreadable)


def find_mount(folder: Path, roots: SystemRoots) -> Mount | None:
    """The file system that a folder lies on, by its device number; None if the system hides it."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = (roots.proc / "self" / "mountinfo").read_text().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        # proc(5): id parent major:minor root mount-point options [fields] - type source options
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) > 2 and fields[2] == wanted and len(after.split()) >= 2:
            kind, source = after.split()[:2]
            return Mount(kind, source)
    return None


def _read_project_quota(folder: Path, mount: Mount | None) -> int | None:
    """What the folder's project may still write; None without a project or a limit.

    Raises OSError (EPERM as a rule) if it has a project whose quota we may not see. XFS and ext4
    then still show the quota as the size of the file system in statvfs.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        attributes = bytearray(_FSXATTR.size)
        fcntl.ioctl(descriptor, FS_IOC_FSGETXATTR, attributes)
        project = _FSXATTR.unpack(attributes)[3]
    except OSError:
        return None  # this file system has no projects
    finally:
        os.close(descriptor)
    if not project or mount is None:
        return None
    block = ctypes.create_string_buffer(_DQBLK.size)
    library = ctypes.CDLL(None, use_errno=True)
    if library.quotactl(Q_GETQUOTA_PROJECT, mount.device.encode(), project, block):
        number = ctypes.get_errno()
        raise OSError(number, f"quota of project {project}: {os.strerror(number)}")
    hard_kib, soft_kib, used_bytes = _DQBLK.unpack(block.raw)[:3]
    limit_kib = hard_kib or soft_kib
    return None if not limit_kib else max(limit_kib * 1024 - used_bytes, 0)


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
