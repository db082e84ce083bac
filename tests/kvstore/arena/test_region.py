"""Shared memory that nobody can pull away, and that two processes see alike."""

import fcntl
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.arena.region import ARENA_BYTES_MAX, ARENA_BYTES_MIN, ArenaRegion
from kvstore.arena.run_layout import RunLayout
from kvstore.errors import InvalidArgument, StoreError
from tests.kvstore.runs import V41_FLASH

SIZE = 4 << 20


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = ArenaRegion.create(SIZE)
    yield made
    os.close(made)


def test_a_region_is_as_long_as_asked_and_full_of_zeros(descriptor: int) -> None:
    with ArenaRegion(descriptor) as region:
        assert region.size_bytes == len(region.view) == SIZE
        assert not np.frombuffer(region.view, np.uint8).any()


@pytest.mark.parametrize(
    "size", [0, ARENA_BYTES_MIN // 2, ARENA_BYTES_MIN + 1, ARENA_BYTES_MAX * 2]
)
def test_a_size_that_cannot_be_is_named(size: int) -> None:
    with pytest.raises(InvalidArgument, match=f"arena: given {size}, expected"):
        ArenaRegion.create(size)


def test_nobody_can_shrink_grow_or_unseal_it(descriptor: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, SIZE // 2)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, SIZE * 2)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", SIZE)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(descriptor).st_size == SIZE


def test_no_shared_memory_but_a_sealed_one_is_mapped() -> None:
    unsealed = os.memfd_create("other", os.MFD_CLOEXEC)
    os.ftruncate(unsealed, SIZE)
    try:
        with pytest.raises(InvalidArgument, match="arena: given a descriptor with seals"):
            ArenaRegion(unsealed)
    finally:
        os.close(unsealed)
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        with pytest.raises(InvalidArgument, match="seals 0x0"):
            ArenaRegion(file.fileno())


def test_a_process_that_tries_to_pull_it_away_kills_nobody(descriptor: int) -> None:
    """A reader goes through all of it while another process tries to shrink it."""
    attack = (
        "import os, sys\n"
        "fd = int(sys.argv[1])\n"
        "for call in (lambda: os.ftruncate(fd, 0), lambda: os.truncate(f'/proc/self/fd/{fd}', 0),\n"
        "             lambda: os.open(f'/proc/self/fd/{fd}', os.O_RDWR | os.O_TRUNC)):\n"
        "    try:\n"
        "        call()\n"
        "    except PermissionError:\n"
        "        continue\n"
        "    sys.exit('it could be shrunk')\n"
    )
    with ArenaRegion(descriptor) as region:
        done = subprocess.run(
            [sys.executable, "-c", attack, str(descriptor)],
            pass_fds=[descriptor],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert int(np.frombuffer(region.view, np.uint8).sum()) == 0


def test_two_processes_see_the_same_bytes(descriptor: int) -> None:
    write = (
        "import sys\n"
        "from kvstore.arena.region import ArenaRegion\n"
        "with ArenaRegion(int(sys.argv[1])) as region:\n"
        "    assert bytes(region.view[8192:8197]) == b'hello'\n"
        "    region.view[12288:12293] = b'world'\n"
    )
    with ArenaRegion(descriptor) as region:
        region.view[8192:8197] = b"hello"
        done = subprocess.run(
            [sys.executable, "-c", write, str(descriptor)],
            pass_fds=[descriptor],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert bytes(region.view[12288:12293]) == b"world"


def test_a_run_is_where_it_was_asked_for(descriptor: int) -> None:
    layout = RunLayout(V41_FLASH, 5)
    with ArenaRegion(descriptor) as region:
        run = region.run(8192, layout)
        assert run.address == region.address + 8192
        assert len(run.view) == layout.run_bytes
        for section in range(4):
            for block in range(5):
                run.part(section, block)[:] = bytes([16 * section + block]) * (
                    layout.layout.sections[section].bytes
                )
        for section in range(4):
            size = layout.layout.sections[section].bytes
            start, end = layout.section_range(section)
            assert bytes(region.view[8192 + start : 8192 + end]) == bytes(run.section(section))
            assert [run.section(section)[b * size] for b in range(5)] == [
                16 * section + b for b in range(5)
            ]
        del run


@pytest.mark.parametrize("offset", [-4096, 100, SIZE - 4096, SIZE])
def test_a_run_that_does_not_fit_is_refused(descriptor: int, offset: int) -> None:
    with (
        ArenaRegion(descriptor) as region,
        pytest.raises(InvalidArgument, match="whole pages within the arena's"),
    ):
        region.run(offset, RunLayout(V41_FLASH, 1))


def test_a_run_that_is_held_outlives_the_region(descriptor: int) -> None:
    """Unmapping memory that somebody works with would end the process."""
    region = ArenaRegion(descriptor)
    run = region.run(0, RunLayout(V41_FLASH, 1))
    array = np.frombuffer(region.view, np.uint8)
    region.close()
    region.close()
    run.view[100] = 7
    assert array[100] == 7
    del array, run
    region.close()
    with pytest.raises(ValueError, match="released"):
        region.view[0]


def test_a_descriptor_that_cannot_be_had_is_a_store_error(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))

    def refuse(descriptor: int, size: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(StoreError, match=f"arena of {SIZE} bytes: Cannot allocate memory"):
        ArenaRegion.create(SIZE)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_mapping_keeps_the_region_when_its_descriptor_is_closed() -> None:
    made = ArenaRegion.create(SIZE)
    region = ArenaRegion(made)
    other = mmap.mmap(made, SIZE)
    os.close(made)
    region.view[5] = 9
    assert other[5] == 9
    other.close()
    region.close()
