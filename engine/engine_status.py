"""What an engine has done and what it is doing, as numbers."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class EngineCounts:
    """What happened since the engine began. Only ever grows."""

    steps: int = 0
    requests: int = 0
    """Taken; those of other engines that were attached are in `attached`."""
    refused: int = 0
    """Not taken because the queue was full."""
    attached: int = 0
    detached: int = 0
    finished: int = 0
    aborted: int = 0
    no_room: int = 0
    preemptions: int = 0
    changed_prefixes: int = 0
    """Answers that went on with another prefix than they were begun with: other bits."""
    short_loads: int = 0
    """Prefixes of which less came than was planned."""
    matched_tokens: int = 0
    hit_tokens: int = 0
    shared_tokens: int = 0
    prefill_tokens: int = 0
    answer_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """An engine at one moment. `counts` goes on counting."""

    counts: EngineCounts
    waiting: int
    entering: int
    """Being matched, waiting for blocks, or being loaded."""
    prefilling: int
    decoding: int
    held: int
    """Out of the schedule and not released: on their way to another engine, or from one."""
    free_blocks: int
    pool_blocks: int
    free_states: int
