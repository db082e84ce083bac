"""Steps that engines take again and again in tests."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstore import agent_messages as m
from kvstore.arena.region import RunMemory
from kvstore.layout import BlockLayout, Section

from .arena_runs import SectionedBlocks
from .raw_engine import RawEngine

WINDOW = BlockLayout(tuple(Section(f"w{index}", 1_056) for index in range(3)))
"""Sections of no whole cache lines, as those of V4.1-Flash."""
SETTLE_S = 10.0


def wait_until(condition: Callable[[], bool]) -> None:
    due_s = time.monotonic() + SETTLE_S
    while not condition():
        assert time.monotonic() < due_s, "it did not come about"
        time.sleep(0.02)


def fill(run: RunMemory, blocks: SectionedBlocks) -> None:
    for section in range(len(run.layout.layout.sections)):
        run.section(section)[:] = blocks.section(section, 0, blocks.count).data


def bytes_of(run: RunMemory, section: int, count: int) -> NDArray[np.uint8]:
    part = run.section(section)
    return np.frombuffer(part, np.uint8)[: len(part) // run.layout.blocks * count].copy()


def store(engine: RawEngine, namespace: int, blocks: SectionedBlocks) -> m.StoreEnded:
    leased = engine.lease(namespace, blocks.count)
    fill(engine.memory(leased, blocks.namespace.layout), blocks)
    request = m.StoreRun(
        run=leased.run,
        keys=b"".join(blocks.keys),
        first_block=0,
        ttl_class="chat",
        deadline_s=20.0,
    )
    return engine.ask(request, m.StoreEnded)


def fetch_request(run: int, blocks: SectionedBlocks, *, is_by_layer: bool = False) -> m.FetchRun:
    return m.FetchRun(
        run=run,
        keys=b"".join(blocks.keys),
        first_block=0,
        is_by_layer=is_by_layer,
        deadline_s=20.0,
    )


def put_window(engine: RawEngine, namespace: int, key: bytes, content: bytes) -> m.Done:
    leased = engine.lease(namespace, 1, is_window=True)
    run = engine.memory(leased, WINDOW)
    for section in range(3):
        run.section(section)[:] = content[section * 1_056 : (section + 1) * 1_056]
    done = engine.ask(m.PutWindow(namespace=namespace, key=key, run=leased.run), m.Done)
    engine.release(leased.run)
    return done
