"""The small files of a local cluster: what a disk that is full lets through."""

import json
import os
from pathlib import Path

import pytest

from kvstore.admin.local_folder import LocalFolder, NodeOptions, NodeRecord
from kvstore.admin.node_process import ENGINE

OPTIONS = NodeOptions(segment_size_bytes=1 << 20, sync="batch")


def fill_disk(path: Path) -> None:
    """Of the file that takes the place of `path` no byte can be written any more."""
    os.symlink("/dev/full", path.with_name(path.name + ".tmp"))


def record_of(pid: int) -> NodeRecord:
    return NodeRecord(node="b01", address="/c/b01.sock", pid=pid)


@pytest.fixture
def place(tmp_path: Path) -> LocalFolder:
    """Give a folder that has the records of engines."""
    place = LocalFolder(tmp_path, ENGINE)
    place.node_path("b01").mkdir(parents=True)
    return place


def test_file_with_the_same_content_is_left_as_it_is(place: LocalFolder) -> None:
    place.write_options(OPTIONS)
    before = place.options_path.stat()
    place.write_options(OPTIONS)
    after = place.options_path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize(("old", "new"), [(9, 99_999), (99_999, 9), (5, 6)])
def test_record_takes_the_room_of_the_last_one_when_the_disk_is_full(
    place: LocalFolder, old: int, new: int
) -> None:
    place.write_record(record_of(old))
    fill_disk(place.record_path("b01"))
    place.write_record(record_of(new))
    assert place.read_record("b01") == record_of(new)
    assert [path.name for path in place.node_path("b01").iterdir()] == ["engine.json"]
    place.write_record(record_of(old))
    assert place.read_record("b01") == record_of(old)


def test_first_record_is_not_written_when_the_disk_is_full(place: LocalFolder) -> None:
    fill_disk(place.record_path("b01"))
    with pytest.raises(OSError, match="No space left"):
        place.write_record(record_of(1))
    assert place.read_record("b01") is None
    assert list(place.node_path("b01").iterdir()) == []


def test_record_that_needs_more_room_than_the_last_one_has_is_not_written(
    place: LocalFolder,
) -> None:
    place.write_record(record_of(1))
    before = place.record_path("b01").read_text()
    fill_disk(place.record_path("b01"))
    with pytest.raises(OSError, match="No space left"):
        place.write_record(NodeRecord(node="b01", address="a" * 5000, pid=2))
    assert place.record_path("b01").read_text() == before
    assert json.loads(before)["pid"] == 1
