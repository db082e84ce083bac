"""How many blocks a sequence needs, and whether it may have them now. Pure."""

from kvstore.layout import BLOCK_TOKENS

TOKENS_IN_FLIGHT = 1
"""Tokens that a pass adds to a sequence: the one chosen from its logits."""


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def blocks_needed(known_tokens: int, tokens_max: int) -> int:
    """Blocks for the tokens known and the one in flight, of a sequence of `tokens_max` at most."""
    return blocks_of(min(known_tokens + TOKENS_IN_FLIGHT, tokens_max))


def may_begin(*, free_blocks: int, needed_blocks: int, growing_sequences: int) -> bool:
    """Whether a sequence may begin: after it, each of those before it must find one block more.

    So it is not thrown out again at once by them, who need a block each in the next 128 steps.
    """
    return free_blocks - needed_blocks >= growing_sequences
