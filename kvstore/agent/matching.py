"""What of a prompt can be had: one match, one look for the one window state that could be used.

The rule is `kvstore.policy.plan_hit`. The keys come from the client, which has the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..agent_messages import PromptMatched
from ..errors import InvalidArgument
from ..key import Namespace
from ..layout import BLOCK_TOKENS
from ..policy import plan_dense_hit, plan_hit
from .counters import MatchCounters
from .parts import Store, Windows


def find_wanted_anchor(prompt_tokens: int, matched_blocks: int) -> int | None:
    """The one position at which a window state would be used, None if there is no hit anyway."""
    # With a state at every position the plan takes the one that it wants.
    everywhere = range(prompt_tokens + 1)
    return plan_hit(prompt_tokens, matched_blocks, everywhere).window_anchor


class PromptMatcher:
    """Answers matches, and counts them."""

    def __init__(self, store: Store, windows: Windows, clock: Callable[[], float]) -> None:
        self._store = store
        self._windows = windows
        self._clock = clock
        self.counters = MatchCounters()

    async def match(self, namespace: Namespace, keys: Sequence[bytes], deadline_s: float) -> int:
        """Number of leading blocks that are stored; see StoreClient.match."""
        begun_s = self._clock()
        matched = await self._store.match(namespace, keys, deadline_s=deadline_s)
        elapsed_s = self._clock() - begun_s
        self.counters.add_match(matched_blocks=matched, elapsed_s=elapsed_s)
        return matched

    async def match_prompt(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        *,
        prompt_tokens: int,
        is_dense: bool,
        deadline_s: float,
    ) -> PromptMatched:
        """The plan for a prompt of `prompt_tokens` tokens with the full blocks `keys`.

        Where time runs out before a window state is found there is none. Raises InvalidArgument
        if the prompt is too short for its keys.
        """
        if len(keys) > prompt_tokens // BLOCK_TOKENS:
            raise InvalidArgument(
                "keys",
                given=f"{len(keys)} for a prompt of {prompt_tokens} tokens",
                expected=f"at most {prompt_tokens // BLOCK_TOKENS}",
            )
        begun_s = self._clock()
        matched = await self.match(namespace, keys, deadline_s)
        matched_s = self._clock()
        anchor = None if is_dense else find_wanted_anchor(prompt_tokens, matched)
        host = None
        anchors = []
        if anchor is not None:
            left_s = begun_s + deadline_s - matched_s
            host = await self._find_window(keys[anchor // BLOCK_TOKENS - 1], left_s)
            if host is not None:
                anchors.append(anchor)
        if is_dense:
            plan = plan_dense_hit(prompt_tokens, matched)
        else:
            plan = plan_hit(prompt_tokens, matched, anchors)
        self.counters.add_prompt(
            plan, prompt_tokens=prompt_tokens, is_window_wanted=anchor is not None
        )
        return PromptMatched(
            matched_blocks=matched,
            hit_tokens=plan.hit_tokens,
            replay_tokens=plan.replay_tokens,
            window_anchor=plan.window_anchor,
            window_host=host or "",
            match_s=matched_s - begun_s,
            lookup_s=self._clock() - matched_s,
        )

    async def _find_window(self, key: bytes, deadline_s: float) -> str | None:
        if deadline_s <= 0:
            return None
        (host,) = await self._windows.lookup([key], deadline_s)
        return host
