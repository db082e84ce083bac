"""One answered request, from an engine in this process or in another one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from kvstore.layout import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a request gave. Seconds are the engine's own; `ttft_s` is time to first token."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    hit_tokens: int
    match_s: float
    fetch_s: float
    prefill_s: float
    ttft_s: float
    rejected_shards: int
    blocks_stored: int
    blocks_failed: int
    """Blocks that the store did not take, for whatever reason."""
    store_errors: int
    """Calls to the store that ended in an error since the engine began."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def complete_blocks(self) -> int:
        """Whole blocks of prompt and answer: what a store can know of this request afterwards."""
        return (len(self.prompt_ids) + len(self.token_ids)) // BLOCK_TOKENS


def read_reply(found: dict[str, Any]) -> Reply:
    """The reply in an object that `python -m engine.generate --json` printed."""
    timings, blocks = found["timings"], found["blocks"]
    return Reply(
        prompt_ids=tuple(found["prompt_token_ids"]),
        token_ids=tuple(found["token_ids"]),
        text=found["answer"],
        hit_tokens=found["hit_tokens"],
        match_s=timings["match_s"],
        fetch_s=timings["fetch_s"],
        prefill_s=timings["prefill_s"],
        ttft_s=timings["ttft_s"],
        rejected_shards=found["rejected_shards"],
        blocks_stored=blocks["stored"],
        blocks_failed=blocks["failed"] + blocks["dropped"] + blocks["pending"],
        store_errors=found["store_errors"],
    )


def expect_hit_tokens(prompt_ids: Sequence[int], earlier: Sequence[Reply]) -> int:
    """Tokens of a prompt that a store which lost nothing has, after these requests.

    Whole blocks of the longest run that the prompt shares with an earlier prompt and its answer;
    the prompt's last token is always computed, because its logits give the answer's first one.
    """
    shared = [
        _shared_tokens(prompt_ids, (*reply.prompt_ids, *reply.token_ids)) for reply in earlier
    ]
    reach = min(max(shared, default=0), len(prompt_ids) - 1)
    return max(reach, 0) // BLOCK_TOKENS * BLOCK_TOKENS


def _shared_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
