"""A sequence of tokens and the pool blocks that hold its KV cache."""

from dataclasses import dataclass, field

from kvstore.layout import BLOCK_TOKENS


@dataclass(slots=True, kw_only=True)
class TokenSequence:
    """Tokens of a prompt and its answer so far.

        0            hit_tokens      computed_tokens       len(token_ids)
        | from store     | computed here    | known, not computed |

    `block_ids[i]` holds K and V of tokens 128 i to 128 i + 127; there may be more blocks than
    tokens.
    """

    token_ids: list[int]
    block_ids: list[int]
    hit_tokens: int = 0
    computed_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.hit_tokens % BLOCK_TOKENS == 0, self.hit_tokens
        assert self.hit_tokens < len(self.token_ids), "no token is left to compute logits from"
        self.computed_tokens = self.hit_tokens

    @property
    def complete_blocks(self) -> int:
        """Leading blocks all of whose tokens are computed or come from the store."""
        return self.computed_tokens // BLOCK_TOKENS
