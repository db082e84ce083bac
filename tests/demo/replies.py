"""Replies for tests: only what a test is about has to be said."""

from collections.abc import Sequence

from demo.replies import Reply


def make_reply(
    *,
    prompt_ids: Sequence[int] = range(300),
    token_ids: Sequence[int] = (1, 2, 3),
    hit_tokens: int = 0,
    rejected_shards: int = 0,
    blocks_stored: int = 0,
    blocks_failed: int = 0,
    store_errors: int = 0,
    ttft_s: float = 1.25,
    text: str = "An answer.",
) -> Reply:
    return Reply(
        prompt_ids=tuple(prompt_ids),
        token_ids=tuple(token_ids),
        text=text,
        hit_tokens=hit_tokens,
        match_s=0.002,
        fetch_s=0.09,
        prefill_s=ttft_s - 0.092,
        ttft_s=ttft_s,
        rejected_shards=rejected_shards,
        blocks_stored=blocks_stored,
        blocks_failed=blocks_failed,
        store_errors=store_errors,
    )
