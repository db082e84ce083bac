"""What a request gave and what it cost."""

from dataclasses import dataclass, field

from .request import FinishReason
from .save_receipt import SaveReceipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds of one request. `ttft_s`, time to first token, holds the others but `decode_s`;
    fetch, swap-in (copies into the pool) and prefill overlap."""

    match_s: float
    fetch_s: float
    swap_in_s: float
    prefill_s: float
    ttft_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The answer to one request and what it cost.

    `token_ids` ends with the stop token if `finish_reason` is "stop"; `text` is without it.
    `matched_tokens` is what the store said it has. `hit_tokens` were not computed: the store had
    them, or the pool still. `replay_tokens` behind them were computed again to rebuild window
    state. `receipt` goes on counting while blocks are saved behind the request.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    timings: Timings
    matched_tokens: int
    hit_tokens: int
    replay_tokens: int
    rejected_shards: int
    receipt: SaveReceipt = field(repr=False)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def decode_tokens_per_s(self) -> float:
        """Rate after the first token; 0 if there was only one."""
        decoded = len(self.token_ids) - 1
        return decoded / self.timings.decode_s if decoded else 0.0
