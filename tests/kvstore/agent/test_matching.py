"""The match of a prompt: one match, at most one question for a window state, the hit rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.agent.matching import PromptMatcher, find_wanted_anchor
from kvstore.agent.parts import WindowOutcome
from kvstore.agent_messages import PromptMatched
from kvstore.client.statistics import NodeReport
from kvstore.errors import InvalidArgument
from kvstore.key import Namespace
from kvstore.layout import BLOCK_TOKENS, BlockLayout
from kvstore.policy import WINDOW_RING_TOKENS, plan_hit

from .arena_runs import SectionedBlocks

BLOCKS = SectionedBlocks(40, sections=(2_048,), seed=1)


class ScriptedStore:
    """Has the first `stored` blocks of any chain; a match takes `takes_s` of the clock."""

    def __init__(self, stored: int, *, takes_s: float = 0.0) -> None:
        self.stored = stored
        self.takes_s = takes_s
        self.now_s = 50.0

    async def match(
        self, namespace: Namespace, keys: Sequence[bytes], *, deadline_s: float = 1.0
    ) -> int:
        self.now_s += self.takes_s
        return min(self.stored, len(keys))

    async def forget(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        *,
        first_block: int = 0,
        deadline_s: float = 1.0,
    ) -> int:
        raise AssertionError("a match forgets nothing")

    async def node_reports(self, *, deadline_s: float = 1.0) -> list[NodeReport]:
        raise AssertionError("a match asks no node for a report")


class ScriptedWindows:
    """Knows where the records of some keys are, and notes what it was asked."""

    def __init__(self, hosts: dict[bytes, str]) -> None:
        self.hosts = hosts
        self.asked: list[bytes] = []

    async def lookup(self, keys: Sequence[bytes], deadline_s: float) -> list[str | None]:
        self.asked += keys
        return [self.hosts.get(key) for key in keys]

    def put(
        self, key: bytes, namespace_id: bytes, layout: BlockLayout, data: memoryview | bytearray
    ) -> bool:
        raise AssertionError("a match puts nothing")

    async def fetch(
        self,
        namespace_id: bytes,
        layout: BlockLayout,
        key: bytes,
        into: memoryview,
        deadline_s: float,
    ) -> WindowOutcome:
        raise AssertionError("a match fetches nothing")

    def describe(self) -> dict[str, Any]:
        return {}


async def match(
    store: ScriptedStore,
    windows: ScriptedWindows,
    prompt_tokens: int,
    *,
    is_dense: bool = False,
    deadline_s: float = 1.0,
) -> PromptMatched:
    matcher = PromptMatcher(store, windows, lambda: store.now_s)
    return await matcher.match_prompt(
        BLOCKS.namespace,
        BLOCKS.keys[: prompt_tokens // BLOCK_TOKENS],
        prompt_tokens=prompt_tokens,
        is_dense=is_dense,
        deadline_s=deadline_s,
    )


@given(prompt_tokens=st.integers(0, 6_000), matched=st.integers(0, 60))
def test_wanted_anchor_is_the_border_of_the_hit_rule(prompt_tokens: int, matched: int) -> None:
    anchor = find_wanted_anchor(prompt_tokens, matched)
    reach = min(matched * BLOCK_TOKENS, prompt_tokens - WINDOW_RING_TOKENS)
    border = max(reach, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    assert anchor == (border or None)
    if anchor is not None:
        assert plan_hit(prompt_tokens, matched, {anchor}).window_anchor == anchor


async def test_window_state_is_asked_for_at_the_one_border_that_could_use_it() -> None:
    windows = ScriptedWindows({BLOCKS.keys[4]: "10.0.0.7:900"})
    found = await match(ScriptedStore(5), windows, 2_000)
    assert windows.asked == [BLOCKS.keys[4]]
    assert (found.matched_blocks, found.hit_tokens, found.replay_tokens) == (5, 640, 0)
    assert (found.window_anchor, found.window_host) == (640, "10.0.0.7:900")


async def test_last_block_is_replayed_when_nobody_has_the_window_state() -> None:
    found = await match(ScriptedStore(5), ScriptedWindows({}), 2_000)
    assert (found.hit_tokens, found.replay_tokens, found.window_anchor) == (512, 128, None)
    assert found.window_host == ""


async def test_nobody_is_asked_when_there_is_no_hit() -> None:
    windows = ScriptedWindows({})
    assert (await match(ScriptedStore(0), windows, 2_000)).hit_tokens == 0
    assert (await match(ScriptedStore(9), windows, 200)).hit_tokens == 0
    assert windows.asked == []


async def test_model_without_window_state_asks_for_none() -> None:
    windows = ScriptedWindows({})
    found = await match(ScriptedStore(15), windows, 15 * BLOCK_TOKENS, is_dense=True)
    assert (found.hit_tokens, found.replay_tokens) == (14 * BLOCK_TOKENS, 0)
    assert windows.asked == []


async def test_window_state_is_not_asked_for_when_the_match_took_all_the_time() -> None:
    windows = ScriptedWindows({BLOCKS.keys[4]: ""})
    found = await match(ScriptedStore(5, takes_s=2.0), windows, 2_000, deadline_s=1.0)
    assert windows.asked == []
    assert (found.hit_tokens, found.replay_tokens) == (512, 128)
    assert found.match_s == pytest.approx(2.0)


async def test_prompt_shorter_than_its_keys_is_refused() -> None:
    matcher = PromptMatcher(ScriptedStore(1), ScriptedWindows({}), lambda: 0.0)
    with pytest.raises(InvalidArgument, match="expected at most 1"):
        await matcher.match_prompt(
            BLOCKS.namespace, BLOCKS.keys[:2], prompt_tokens=255, is_dense=True, deadline_s=1.0
        )
