"""One request while an engine works on it: its tokens, its blocks, and how far it is computed."""

from typing import Any

from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import MISS, HitPlan

from .request import Request


class Sequence:
    """Tokens of a prompt and of its answer so far, and where their KV cache lies.

        0                hit_tokens  + replay_tokens  computed_tokens         len(token_ids)
        | blocks from store | computed again | computed here | known, not computed |

    `block_ids[i]` is the pool's block of tokens 128 i .. 128 i + 127; there may be more blocks than
    tokens. The sequence holds one reference to each. `state` is what the runner keeps beside the
    blocks (None for a model that has nothing). Belongs to the thread of its engine.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.token_ids = [*request.prompt_ids, *request.answered_ids]
        self.prompt_tokens = len(request.prompt_ids)
        self.block_ids: list[int] = []
        self.computed_tokens = 0
        self.hit: HitPlan = MISS
        self.state: Any = None

    @property
    def complete_blocks(self) -> int:
        """Leading blocks all of whose tokens are computed or come from the store."""
        return self.computed_tokens // BLOCK_TOKENS

    @property
    def answer_ids(self) -> list[int]:
        return self.token_ids[self.prompt_tokens :]

    @property
    def replay_first(self) -> int | None:
        """Where the bounded replay began that its cache comes from, None without one."""
        return self.hit.hit_tokens if self.hit.replay_tokens else None
