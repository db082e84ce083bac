"""What an engine asks of the place where prefixes come from. Everything happens behind its back.

    look_up -> (matched) -> begin -> (startable) -> (ended) -> outcome

The engine polls; `on_change` of the source is called from any thread when polling is worth while.
A fault of the store, or a deadline, is a shorter hit or none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from kvstore.policy import HitPlan


class LoadFellShort(Exception):
    """Less came than a pass had counted on: the pass ends, and the sequence begins anew with what
    did come. Not an error of an operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFound:
    """What is stored of a prompt: a hint. `plan` is `kvstore.policy`'s for it."""

    matched_blocks: int
    plan: HitPlan
    match_s: float


LoadStep: TypeAlias = Literal["match", "lease", "window", "fetch", "copy"]


@dataclass(frozen=True, slots=True)
class LoadEvent:
    """One step of a load, by the source's clock. `section` is the one that a "fetch" was waited for
    or that a "copy" moved, from its first byte to its last; None if the step is not of one
    section. On a GPU a "copy" is over when it was started."""

    step: LoadStep
    section: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOutcome:
    """What came. `blocks`: leading blocks that are in the pool whole and verified, those the engine
    had before included; `window`: the window state, if it was asked for and came."""

    blocks: int
    window: memoryview | None
    rejected_shards: int = 0
    fetch_s: float = 0.0
    """From `begin` until the last byte that was wanted was in shared memory (or had failed)."""
    swap_in_s: float = 0.0
    """Time that the copying thread spent: copying on a CPU, starting transfers on a GPU."""
    events: tuple[LoadEvent, ...] = ()
    """At most one for each step, and two for each section."""


class PrefixLoad(Protocol):
    """The prefix of one prompt on its way. Belongs to the engine's thread; never blocks but in
    `wait_for_section` and `confirm`."""

    @property
    def found(self) -> PrefixFound | None:
        """None until the match was answered."""

    def begin(self, plan: HitPlan, block_ids: Sequence[int], first_block: int) -> None:
        """Bring blocks first_block .. plan.stored_blocks - 1 into the pool's block_ids[...] (the
        list begins with the block of token 0; earlier ones are there already), and the window
        state at plan.window_anchor if there is one (an engine that has that state itself leaves the
        anchor out). The source holds references of its own to the blocks it writes, until nothing
        writes to them any more."""

    @property
    def is_startable(self) -> bool:
        """A pass may begin: the window state, if planned, is there, and section 0 of all blocks."""

    @property
    def window(self) -> memoryview | None:
        """The window state once it is there."""

    def wait_for_section(self, section: int) -> None:
        """Returns when all planned blocks have the section in the pool, for what the calling thread
        computes from now on: on a GPU, its current stream waits for bytes that are still being
        moved there. Raises LoadFellShort if they do not come, or not within the source's limit for
        a pass."""

    def confirm(self) -> None:
        """After a pass that waited for sections, before anything is made of it: returns when all
        of them are known to have been moved whole. Raises LoadFellShort if one was not: the pass
        has read what nobody knows."""

    @property
    def outcome(self) -> LoadOutcome | None:
        """None until nothing more comes; then it stays."""

    def give_up(self) -> None:
        """The request needs it no more; may be called at any time, and again."""


class PrefixSource(Protocol):
    """Gives loads. A bounded number of them is under way at one time; further ones wait in line."""

    on_change: Callable[[], None]
    """Called from any thread when polling is worth while; the engine puts its own here before it
    looks anything up. Must be short."""

    def look_up(self, prompt_ids: Sequence[int], keys: Sequence[bytes]) -> PrefixLoad:
        """Ask what is stored of a prompt. `keys` is the chain of its full blocks."""

    def close(self, deadline_s: float) -> bool:
        """End its threads; False if one hung."""
