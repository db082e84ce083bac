"""Window state and sections come beside one another: neither waits for the other."""

from __future__ import annotations

import time
from threading import Event
from typing import cast

from engine.sources.agent_source import AgentSource
from engine.sources.threaded_source import LoadLimits
from engine.store_faults import StoreFaults
from kvstore.client import BlockingAgentClient
from kvstore.client.agent_results import WindowFetch
from kvstore.key import Namespace
from tests.engine.stored_prompt import LAYOUT, WINDOW, StoredPrompt
from tests.engine.waiting import DEADLINE_S, wait_until
from tests.patience import OPERATION_S

BLOCKS = 12
ANCHOR = (BLOCKS - 1) * 128
PATIENT = LoadLimits(
    match_deadline_s=OPERATION_S, fetch_deadline_s=OPERATION_S, section_wait_s=OPERATION_S
)


class LateWindow:
    """A client whose window state comes when a test lets it; all else is the client's own."""

    def __init__(self, client: BlockingAgentClient) -> None:
        self.may_come = Event()
        self._client = client

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)

    def fetch_window(
        self, namespace: Namespace, key: bytes, record: bytearray, *, deadline_s: float
    ) -> WindowFetch:
        assert self.may_come.wait(DEADLINE_S)
        return self._client.fetch_window(namespace, key, record, deadline_s=OPERATION_S)


def test_sections_do_not_wait_for_window_state_that_is_late(client: BlockingAgentClient) -> None:
    prompt, late = StoredPrompt(BLOCKS), LateWindow(client)
    prompt.save(client)
    client.open_namespace(prompt.namespace, window_layout=WINDOW)
    assert client.put_window(prompt.namespace, prompt.keys[ANCHOR // 128 - 1], prompt.window)
    pool = prompt.pool(BLOCKS)
    source = AgentSource(
        cast("BlockingAgentClient", late),
        namespace=prompt.namespace,
        pool=pool,
        window_layout=WINDOW,
        faults=StoreFaults(),
        limits=PATIENT,
        clock=time.monotonic,
    )
    load = source.look_up(prompt.tokens, prompt.keys)
    wait_until(lambda: load.found is not None)
    assert load.found is not None
    block_ids = pool.allocate(load.found.plan.stored_blocks)
    load.begin(load.found.plan, block_ids, 0)
    load.wait_for_section(len(LAYOUT.sections) - 1)
    assert not load.is_startable
    late.may_come.set()
    wait_until(lambda: load.outcome is not None)
    assert load.outcome is not None
    assert load.outcome.window is not None
    assert bytes(load.outcome.window) == prompt.window
    assert load.outcome.blocks == BLOCKS - 1
    for block_id, expected in zip(block_ids, prompt.blocks, strict=False):
        assert pool.buffer(block_id) == expected
    assert source.close(DEADLINE_S)
