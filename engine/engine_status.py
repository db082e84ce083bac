"""What an engine has done and what it is doing, as numbers. They are added up by passes, steps and
requests, never by tokens."""

from dataclasses import dataclass, field

from kvstore.histogram import Histogram

from .save_receipt import SaveSummary

# fmt: off
FIRST_TOKEN_BOUNDS_S = (
    5e-3, 10e-3, 20e-3, 50e-3, 100e-3, 200e-3, 500e-3, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0,
)
# fmt: on


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
    """Answers that went on from a prefix not known to have the bits they were begun with."""
    short_loads: int = 0
    """Prefixes of which less came than was planned."""
    matched_tokens: int = 0
    hit_tokens: int = 0
    replay_tokens: int = 0
    shared_tokens: int = 0
    prefill_tokens: int = 0
    answer_tokens: int = 0
    rejected_shards: int = 0
    fetch_s: float = 0.0
    """From the beginning of each load until all that was wanted had come, or had failed."""
    swap_in_s: float = 0.0
    """Of threads that copy what came into the pool."""
    arrival_wait_s: float = 0.0
    """That passes stood still because a section of their prefix was not there yet."""


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """How long steps and requests took since the engine began."""

    step: Histogram = field(default_factory=Histogram)
    """Of steps that computed something."""
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS_S))
    """From the arrival of a request until its first token here; not of those that were attached."""


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
    saves: SaveSummary
    """What became of the blocks that were given to be saved, since the engine began."""
    dropped_windows: int
    """Window states that were not kept, for whatever reason."""
