"""Settings of an engine. None of them changes what it answers."""

from dataclasses import dataclass

from .errors import InvalidRequest
from .scheduler.cost import DEFAULT_COST, PrefillCost


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Bounds of an engine. Raises InvalidRequest for a count below 1 or a time below 0."""

    sequences_max: int = 64
    """Sequences that have blocks at one time."""

    queue_requests_max: int = 1024
    """Requests that wait, beyond those that were preempted."""

    loads_max: int = 8
    """Requests between the queue and their first pass that ask the source: being matched, waiting
    for blocks, being loaded. As many again may be there that do not ask it."""

    step_budget_s: float = 0.2
    """What the passes of a step may cost together. Prompts get what answers leave of it, and one
    block in any case."""

    cost: PrefillCost = DEFAULT_COST

    window_snapshots_max: int = 32
    """Records of window state that are kept for requests that begin alike."""

    room_deadline_s: float = 1.0
    """Longest time that a request waits for blocks while saves hold them; then saves that have not
    begun are given up, and after as long again the request, if nothing but saves is in its way."""

    close_deadline_s: float = 10.0
    """Longest time `close` waits for blocks that are still to be saved."""

    def __post_init__(self) -> None:
        for name in ("sequences_max", "queue_requests_max", "loads_max", "window_snapshots_max"):
            if getattr(self, name) < 1:
                raise InvalidRequest(name, given=getattr(self, name), expected="1 or more")
        for name in ("step_budget_s", "room_deadline_s", "close_deadline_s"):
            if not getattr(self, name) >= 0:
                raise InvalidRequest(name, given=getattr(self, name), expected="0 or more")
