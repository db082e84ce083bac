"""Writes are done by the event loop itself until the device makes it wait."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.node.write_operation import SLOW_WRITE_S
from tests.kvstore.node.faulty_disk import FaultyDisk
from tests.kvstore.node.raw_client import make_shards
from tests.kvstore.node.served_node import served_node


@dataclass
class LateDisk(FaultyDisk):
    """Writes take long; `is_busy`: because the processor was at other work, not the device."""

    is_busy: bool = False

    def write(self, descriptor: int, views: Sequence[memoryview], offset: int) -> None:
        super().write(descriptor, views, offset)
        time.sleep(SLOW_WRITE_S)

    def count_waits(self) -> int:
        return 0 if self.is_busy else super().count_waits()


@pytest.mark.parametrize("is_busy", [False, True])
def test_threads_write_after_the_loop_had_to_wait_for_the_device(
    tmp_path: Path, rng: random.Random, is_busy: bool
) -> None:
    with served_node(tmp_path, disk=LateDisk(is_busy=is_busy)) as served:
        with served.client() as client:
            client.write(make_shards(rng, 1, 1000))
        assert bool(served.node.targets[0].slow_writes.current()) is not is_busy
