"""What an agent has done since it was started, for its status document. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..agent_messages import FetchEnded
from ..histogram import Histogram
from ..layout import BLOCK_TOKENS
from ..policy import HitPlan


@dataclass(slots=True)
class FetchCounters:
    """Fetches into runs. `ended`: fetches by the value of their FetchEnd."""

    running: int = 0
    asked_blocks: int = 0
    blocks: int = 0
    bytes: int = 0
    decoded_blocks: int = 0
    left_blocks: int = 0
    rejected_shards: int = 0
    given_up: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    latency: Histogram = field(default_factory=Histogram)

    def add(self, ended: FetchEnded, *, asked_blocks: int, block_bytes: int) -> None:
        """Count a fetch that ended."""
        self.asked_blocks += asked_blocks
        self.blocks += ended.blocks
        self.bytes += ended.blocks * block_bytes
        self.decoded_blocks += ended.decoded_blocks
        self.left_blocks += ended.left_blocks
        self.rejected_shards += ended.rejected_shards
        self.ended[ended.ended] = self.ended.get(ended.ended, 0) + 1
        self.latency.add(ended.elapsed_s)

    def describe(self) -> dict[str, Any]:
        return {
            "running": self.running,
            "asked_blocks": self.asked_blocks,
            "blocks": self.blocks,
            "bytes": self.bytes,
            "decoded": self.decoded_blocks,
            "left": self.left_blocks,
            "rejected": self.rejected_shards,
            "given_up": self.given_up,
            "ended": dict(self.ended),
            "latency": self.latency.to_values(),
        }


@dataclass(slots=True)
class MatchCounters:
    """Matches of keys alone, and of prompts."""

    count: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    hit_tokens: int = 0
    replay_tokens: int = 0
    windows_wanted: int = 0
    """Prompts of which a window state could have been used."""
    windows_found: int = 0
    latency: Histogram = field(default_factory=Histogram)

    def add_match(self, *, matched_blocks: int, elapsed_s: float) -> None:
        """Count a match, of whatever kind."""
        self.count += 1
        self.matched_tokens += matched_blocks * BLOCK_TOKENS
        self.latency.add(elapsed_s)

    def add_prompt(self, plan: HitPlan, *, prompt_tokens: int, is_window_wanted: bool) -> None:
        """Count what came of the match of a prompt."""
        self.prompts += 1
        self.prompt_tokens += prompt_tokens
        self.hit_tokens += plan.hit_tokens
        self.replay_tokens += plan.replay_tokens
        self.windows_wanted += is_window_wanted
        self.windows_found += plan.window_anchor is not None

    def describe(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "prompts": self.prompts,
            "prompt_tokens": self.prompt_tokens,
            "matched_tokens": self.matched_tokens,
            "hit_tokens": self.hit_tokens,
            "replay_tokens": self.replay_tokens,
            "windows_wanted": self.windows_wanted,
            "windows_found": self.windows_found,
            "latency": self.latency.to_values(),
        }
