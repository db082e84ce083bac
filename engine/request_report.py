"""What one request cost the engine that answered it. Not for totals of an engine: those are counted
in `engine_status`."""

from dataclasses import dataclass, field

from .save_receipt import SaveReceipt


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """Seconds and tokens of a request in one engine; what other engines did for it is not in it.

    Times add up over all the times that the request was begun (it may be preempted); tokens and
    `match_s` are those of the first time.
    """

    queue_s: float
    """From its arrival until it had its blocks, but for `match_s`."""
    match_s: float
    fetch_s: float
    """Until what was wanted of the store had come; passes may run meanwhile."""
    swap_in_s: float
    """Spent copying what came into the pool; passes may run meanwhile."""
    prefill_s: float
    """Of passes that had a part of its prompt."""
    ttft_s: float
    """From its arrival until its first token; 0 if it ended without."""
    decode_s: float
    """From its first token until its end."""
    prompt_tokens: int
    matched_tokens: int
    """What the store said that it has."""
    hit_tokens: int
    replay_tokens: int
    shared_tokens: int
    """Of the hit and the replay behind it, how many were in the pool already."""
    computed_tokens: int
    """Of the prompt and of what had been answered elsewhere, for the first token; like the hit, 0
    before it, and for a sequence that another engine has handed over."""
    answer_tokens: int
    """So far, with those that were answered elsewhere."""
    preemptions: int
    rejected_shards: int
    receipt: SaveReceipt = field(repr=False)
    """Goes on counting while blocks are saved behind the request."""
