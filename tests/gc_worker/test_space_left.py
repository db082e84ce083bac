"""What the system says of the room for a target."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gc_worker.space_left import find_mount, read_space_left
from kvstore.node.container_memory import SystemRoots, read_container_left


def roots_of(folder: Path, files: dict[str, str]) -> SystemRoots:
    """A system that describes itself by these files."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return SystemRoots(proc=folder / "proc", cgroup=folder / "cgroup")


def mountinfo_of(folder: Path, kind: str) -> str:
    device = os.stat(folder).st_dev
    return f"36 35 {os.major(device)}:{os.minor(device)} / /x rw shared:1 - {kind} /dev/sdx1 rw\n"


def test_file_system_has_as_much_left_as_it_says(tmp_path: Path) -> None:
    left = read_space_left(tmp_path).left_bytes["file_system"]
    found = os.statvfs(tmp_path)
    assert left == pytest.approx(found.f_bavail * found.f_frsize, rel=0.05)


def test_missing_folder_is_named_as_unreadable(tmp_path: Path) -> None:
    space = read_space_left(tmp_path / "gone")
    assert space.left_bytes == {}
    assert space.unreadable == {"file_system": "No such file or directory"}


def test_container_counts_when_the_target_lies_in_memory(tmp_path: Path) -> None:
    roots = roots_of(
        tmp_path,
        {
            "proc/self/mountinfo": mountinfo_of(tmp_path, "tmpfs"),
            "proc/self/cgroup": "0::/a/b\n",
            "cgroup/a/b/memory.max": "max\n",
            "cgroup/a/b/memory.current": "7\n",
            "cgroup/a/memory.max": "1000\n",
            "cgroup/a/memory.current": "700\n",
            "cgroup/a/memory.stat": "anon 500\ninactive_file 150\n",
        },
    )
    assert read_space_left(tmp_path, roots).left_bytes["container"] == 1000 - 700 + 150


def test_container_does_not_count_when_the_target_lies_on_a_disk(tmp_path: Path) -> None:
    roots = roots_of(
        tmp_path,
        {
            "proc/self/mountinfo": mountinfo_of(tmp_path, "ext4"),
            "proc/self/cgroup": "0::/\n",
            "cgroup/memory.max": "1000\n",
            "cgroup/memory.current": "700\n",
        },
    )
    assert "container" not in read_space_left(tmp_path, roots).left_bytes


def test_container_of_version_1_is_read_too(tmp_path: Path) -> None:
    roots = roots_of(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/x/y\n0::/\n",
            "cgroup/memory/x/memory.limit_in_bytes": "5000\n",
            "cgroup/memory/x/memory.usage_in_bytes": "4000\n",
            "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "cgroup/memory/memory.usage_in_bytes": "4000\n",
        },
    )
    assert read_container_left(roots) == 1000


def test_container_has_no_limit_when_none_is_set(tmp_path: Path) -> None:
    roots = roots_of(tmp_path, {"proc/self/cgroup": "0::/\n", "cgroup/memory.max": "max\n"})
    assert read_container_left(roots) is None


def test_mount_is_found_by_its_device(tmp_path: Path) -> None:
    roots = roots_of(tmp_path, {"proc/self/mountinfo": "junk\n" + mountinfo_of(tmp_path, "xfs")})
    mount = find_mount(tmp_path, roots)
    assert mount is not None
    assert (mount.kind, mount.device) == ("xfs", "/dev/sdx1")


def test_mount_is_unknown_when_the_system_hides_it(tmp_path: Path) -> None:
    assert find_mount(tmp_path, SystemRoots(proc=tmp_path / "none", cgroup=tmp_path)) is None
