"""What the demo says of each request, checked against what came back. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.layout import BLOCK_TOKENS

from .replies import Reply, expect_hit_tokens


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence that says what was expected and what came; whether it holds."""

    text: str
    holds: bool


def claim_no_hit(reply: Reply) -> Claim:
    return Claim(f"no hit: {reply.hit_tokens} tokens taken", reply.hit_tokens == 0)


def claim_full_hit(reply: Reply, earlier: Sequence[Reply]) -> Claim:
    """Every block that an earlier request left in the store is taken."""
    expected = expect_hit_tokens(reply.prompt_ids, earlier)
    text = f"hit: {reply.hit_tokens} tokens taken, {expected} are stored"
    return Claim(text, reply.hit_tokens == expected > 0)


def claim_answer_hit(reply: Reply, answered: Reply) -> Claim:
    """The hit goes past the earlier prompt, into the answer that the model gave to it."""
    beyond = reply.hit_tokens - answered.prompt_tokens
    return Claim(f"hit reaches {beyond} tokens into the model's own answer", beyond > 0)


def claim_same_answer(reply: Reply, other: Reply, other_number: int) -> Claim:
    """To the same prompt, token for token the same answer."""
    is_same = reply.prompt_ids == other.prompt_ids and reply.token_ids == other.token_ids
    return Claim(f"answer equal to that of request {other_number}, token for token", is_same)


def claim_saved(reply: Reply) -> Claim:
    """Every block that this request completed is in the store now."""
    new_blocks = reply.complete_blocks - reply.hit_tokens // BLOCK_TOKENS
    text = f"{reply.blocks_stored} blocks saved, {reply.blocks_failed} not, {new_blocks} were new"
    return Claim(text, reply.blocks_stored == new_blocks and reply.blocks_failed == 0)


def claim_no_error(reply: Reply) -> Claim:
    return Claim(f"{reply.store_errors} errors of the store in the engine", reply.store_errors == 0)


def claim_blocks_rebuilt(count: int) -> Claim:
    return Claim(f"{count} blocks rebuilt from parity", count > 0)


def claim_damage_found(damaged: int, rejected_by_client: int, rejected_on_nodes: int) -> Claim:
    """The client turned damaged shards away, and their nodes took them out of use."""
    # A block's other shards may come first, and then the damaged one is not looked at.
    text = (
        f"of {damaged} damaged shards those that were read are rejected: {rejected_by_client}"
        f" by the client, {rejected_on_nodes} by the nodes"
    )
    return Claim(text, rejected_by_client >= 1 and rejected_on_nodes >= 1)


def claim_recovered(node: str, *, blocks: int | None, before: int | None) -> Claim:
    """A killed node knows again, from its slots, every block that it had."""
    text = f"{node}, killed before, is back with {blocks} of {before} blocks"
    return Claim(text, bool(blocks) and blocks == before)
