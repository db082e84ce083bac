"""Where a benchmark's files are, and that they are read from there."""

from pathlib import Path

import pytest

from benchmarks.page_cache import (
    IN_MEMORY,
    drop_pages,
    file_system_of,
    find_file_system,
    resident_bytes,
)

MOUNTS = r"""
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:20 / /dev/shm rw shared:2 - tmpfs tmpfs rw
23 21 0:21 / /mnt/a\040b rw - xfs /dev/sdb rw
24 21 0:22 / /tmp rw - ext4 /dev/sdc rw
25 24 0:23 / /tmp rw shared:3 master:1 - tmpfs tmpfs rw
""".strip()


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/usr/x", "ext4"),
        ("/dev/shm/run", "tmpfs"),
        ("/dev/shmx", "ext4"),
        ("/mnt/a b/c", "xfs"),
        ("/tmp", "tmpfs"),
    ],
)
def test_file_system_is_that_of_the_innermost_mount(folder: str, kind: str) -> None:
    assert find_file_system(MOUNTS, Path(folder)) == kind


def test_system_of_this_process_names_one() -> None:
    assert file_system_of(Path("/proc")) == "proc"


def test_pages_that_were_dropped_are_not_in_memory(tmp_path: Path) -> None:
    """On a disk: files of tmpfs stay."""
    files = [tmp_path / "a", tmp_path / "empty"]
    files[0].write_bytes(bytes(1 << 20))
    files[1].touch()
    before = resident_bytes(files)
    assert before <= 1 << 20
    drop_pages(files)
    after = resident_bytes(files)
    assert after < before or file_system_of(tmp_path) in IN_MEMORY
