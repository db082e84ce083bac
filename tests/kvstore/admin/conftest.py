"""Folders for local clusters, of which no process is left when a test has ended."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.admin.local_cluster import LocalCluster
from tests.kvstore.admin.command_line import find_running
from tests.patience import PATIENCE_S


def end_all(folder: Path) -> None:
    """Kill what still runs for a folder; pytest's folders are nobody else's."""
    due_s = time.monotonic() + PATIENCE_S
    while found := find_running(folder):
        assert time.monotonic() < due_s, found
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Give a folder that does not exist yet, below one that is the test's own."""
    yield tmp_path / "cluster"
    end_all(tmp_path)


@pytest.fixture
def running(folder: Path) -> Iterator[Path]:
    """Give the folder of a cluster of two nodes, code 1+1, that runs."""
    with LocalCluster.start(folder, nodes=2, k=1, m=1, target_size_bytes=8 << 20):
        yield folder
