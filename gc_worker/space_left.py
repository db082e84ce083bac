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

from kvstore.node.container_memory import SYSTEM, SystemRoots, read_container_left

from .usage import CONTAINER, FILE_SYSTEM, PROJECT_QUOTA, SpaceLeft

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
FS_IOC_FSGETXATTR = 0x801C581F
_FSXATTR = struct.Struct("<IIIII8x")
"""struct fsxattr of linux/fs.h: the fourth number is the project."""
Q_GETQUOTA_PROJECT = (0x800007 << 8) | 2
"""QCMD(Q_GETQUOTA, PRJQUOTA) of linux/quota.h; the kernel answers it for XFS too."""
_DQBLK = struct.Struct("<QQQQQQQQI4x")
"""struct if_dqblk: limits in KiB, the space in use in bytes."""


@dataclass(frozen=True, slots=True)
class Mount:
    """The file system under a folder."""

    kind: str
    device: str


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
