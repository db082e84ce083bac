"""What may be page-locked, as the system says it."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path

import numpy as np
import pytest

from engine.errors import ArenaNotPinned
from engine.kv.cuda_runtime import find_loaded_runtime
from engine.kv.lock_limits import (
    RESERVE_BYTES,
    LockLimits,
    find_lack,
    find_memlock_lack,
    left_in_group,
    missing_bytes,
    read_limits,
)
from engine.kv.nixl_mover import find_gdr_lacks

GIB = 1 << 30
MEMINFO = "MemTotal: 8388608 kB\nMemAvailable:    2097152 kB\n"


def limits(
    available: int | None = None, group: int | None = None, memlock: int | None = None
) -> LockLimits:
    return LockLimits(available_bytes=available, group_left_bytes=group, memlock_bytes=memlock)


@pytest.mark.parametrize(
    ("new_bytes", "given", "lack"),
    [
        (GIB, limits(), None),
        (GIB, limits(2 * GIB, 2 * GIB), None),
        (GIB, limits(GIB, 2 * GIB), "available in this host"),
        (GIB, limits(4 * GIB, GIB), "left in the control group"),
        (0, limits(RESERVE_BYTES, RESERVE_BYTES), None),
        (GIB, limits(memlock=8 << 20), None),
    ],
)
def test_what_there_is_no_memory_for_is_not_locked(
    new_bytes: int, given: LockLimits, lack: str | None
) -> None:
    found = find_lack(new_bytes, given)
    assert (found is None) == (lack is None)
    assert lack is None or lack in (found or "")


def test_limit_of_locked_memory_counts_for_those_who_are_held_to_it() -> None:
    assert find_memlock_lack(GIB, limits(memlock=GIB)) is None
    assert find_memlock_lack(GIB, limits()) is None
    found = find_memlock_lack(GIB, limits(memlock=8 << 20))
    assert "RLIMIT_MEMLOCK is 8388608" in (found or "")
    assert "RLIMIT_MEMLOCK: 8388608 bytes" in limits(memlock=8 << 20).describe()


@pytest.fixture
def system(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    return tmp_path


def found_limits(system: Path) -> LockLimits:
    return read_limits(system / "proc", system / "cgroup")


def test_tightest_control_group_around_the_process_counts(system: Path) -> None:
    (system / "proc/self/cgroup").write_text("0::/a/b\n")
    for group, limit, used in (("a/b", "max", "5"), ("a", str(3 * GIB), str(GIB)), (".", "", "")):
        folder = system / "cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        if limit:
            (folder / "memory.max").write_text(limit + "\n")
            (folder / "memory.current").write_text(used + "\n")
    found = found_limits(system)
    assert (found.available_bytes, found.group_left_bytes) == (2 * GIB, 2 * GIB)


@pytest.mark.parametrize(
    ("limit", "usage", "stat", "left"),
    [
        ("1000\n", "900\n", "anon 300\ninactive_file 500\nactive_file 100\n", 600),
        ("1000", "900", "anon 300\n", 100),
        ("1000", "900", "", 100),
        ("1000", "1200", "inactive_file 100", 0),
        ("1000", "100", "inactive_file 400", 1000),
        ("max", "900", "inactive_file 500", None),
        ("", "", "", None),
    ],
)
def test_pages_of_files_that_can_be_dropped_are_room(
    limit: str, usage: str, stat: str, left: int | None
) -> None:
    assert left_in_group(limit, usage, stat, "inactive_file") == left


def test_page_cache_of_a_group_is_room_in_what_the_system_says(system: Path) -> None:
    (system / "proc/self/cgroup").write_text("0::/a\n")
    folder = system / "cgroup/a"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(f"{4 * GIB}\n")
    (folder / "memory.current").write_text(f"{4 * GIB}\n")
    (folder / "memory.stat").write_text(f"anon {GIB}\ninactive_file {3 * GIB}\n")
    assert found_limits(system).group_left_bytes == 3 * GIB


def test_control_groups_of_the_first_version_are_read_too(system: Path) -> None:
    (system / "proc/self/cgroup").write_text("5:devices:/\n4:memory:/x\n0::/\n")
    folder = system / "cgroup/memory/x"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(GIB))
    (folder / "memory.usage_in_bytes").write_text(str(2 * GIB))
    (folder / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {GIB + 7}\n")
    (folder.parent / "memory.limit_in_bytes").write_text(str((1 << 63) - 4096))
    (folder.parent / "memory.usage_in_bytes").write_text("1")
    assert found_limits(system).group_left_bytes == 7


def test_system_that_says_nothing_sets_no_limit(tmp_path: Path) -> None:
    found = read_limits(tmp_path, tmp_path)
    assert (found.available_bytes, found.group_left_bytes) == (None, None)


@pytest.mark.parametrize(
    ("capabilities", "is_held"),
    [("0000000000000000", True), ("0000000000004000", False), ("000001ffffffbfff", True)],
)
def test_limit_of_locked_memory_holds_for_a_process_without_the_right_to_lock_all(
    system: Path, capabilities: str, is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    (system / "proc/self/status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    assert found_limits(system).memlock_bytes == (8 << 20 if is_held else None)


def test_only_pages_that_are_not_there_yet_count_as_missing() -> None:
    with mmap.mmap(-1, 64 * mmap.PAGESIZE) as area:
        view = np.frombuffer(area, np.uint8)
        view_address = view.ctypes.data
        before = missing_bytes(view_address, len(view))
        area[: 10 * mmap.PAGESIZE] = bytes([1]) * (10 * mmap.PAGESIZE)
        assert before - missing_bytes(view_address, len(view)) in (0, 10 * mmap.PAGESIZE)
        area[:] = bytes([1]) * len(area)
        assert missing_bytes(view_address, len(view)) == 0
        del view


def test_error_says_how_much_was_to_be_pinned_and_what_was_in_the_way() -> None:
    error = ArenaNotPinned(size_bytes=5, reason="there is none")
    assert str(error) == "arena of 5 bytes cannot be pinned: there is none"


@pytest.mark.parametrize(
    ("maps", "path"),
    [
        (
            "7f00-7f01 r-xp 00000000 08:01 1    /a b/lib/libcudart.so.13\n",
            "/a b/lib/libcudart.so.13",
        ),
        ("7f00-7f01 r--p 0 08:01 1 /x/libcudart-d0da41ae.so.11.0", "/x/libcudart-d0da41ae.so.11.0"),
        ("7f00-7f01 r-xp 00000000 08:01 1    /lib/libc.so.6\n7f01-7f02 rw-p 0 0:0 0\n", None),
    ],
)
def test_runtime_is_the_one_that_is_loaded(maps: str, path: str | None) -> None:
    assert find_loaded_runtime(maps) == path


def test_gdr_lacks_what_the_host_does_not_have(tmp_path: Path) -> None:
    def found(memlock: int | None = None) -> list[str]:
        return find_gdr_lacks(GIB, limits(memlock=memlock), tmp_path)

    assert any("RDMA port" in lack for lack in found())
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    assert any("of 1 in" in lack for lack in found())
    (port / "state").write_text("4: ACTIVE\n")
    (tmp_path / "module/nvidia_peermem").mkdir(parents=True)
    lacks = found(memlock=GIB)
    assert not any("RDMA port" in lack or "peermem" in lack or "lock" in lack for lack in lacks)
    assert any("RLIMIT_MEMLOCK is 8388608" in lack for lack in found(memlock=8 << 20))


def test_port_that_goes_away_while_it_is_read_is_one_that_is_not_active(tmp_path: Path) -> None:
    ports = tmp_path / "class/infiniband/mlx5_0/ports"
    (ports / "1/state").mkdir(parents=True)  # what cannot be read
    assert any("active (of 1" in lack for lack in find_gdr_lacks(0, limits(), tmp_path))
    (ports / "2").mkdir()
    (ports / "2/state").write_text("4: ACTIVE\n")
    assert not any("active" in lack for lack in find_gdr_lacks(0, limits(), tmp_path))
