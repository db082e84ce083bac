"""What an engine knows of a request beside its sequence: where it stands, and what it took."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from kvstore.key import KeyChain
from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import MISS, HitPlan

from .engine_status import EngineCounts
from .model_runner import Window
from .prefix_source import LoadOutcome, PrefixLoad
from .request import FinishReason, Request
from .request_report import RequestReport
from .save_receipt import SaveReceipt
from .scheduler.preemption import Standing
from .scheduler.prefix_choice import Begun
from .sequence import Sequence
from .window_record import WindowRecord

WINDOWS_KEPT = 2
"""Window states of an answer that are saved at its end: the next turn's hit may end at either."""


ATTACHED_AHEAD = 1 << 62
"""Places in line by which a sequence from another engine is before all that were asked for here: it
was in line elsewhere. Among each other they keep their order."""


class Phase(Enum):
    """WAITING and MATCHING have no blocks, MATCHED waits for them, all others hold some."""

    WAITING = auto()
    MATCHING = auto()
    MATCHED = auto()
    LOADING = auto()
    PREFILL = auto()
    DECODING = auto()
    ENDING = auto()
    """The answer is complete; its last token fills a block and is computed for the next turn."""
    PREFILLED = auto()
    """Out of the schedule: the rest is another engine's."""


@dataclass(slots=True, kw_only=True)
class Costs:
    """Clock times of events (None: not yet), and seconds and tokens that add up to a report."""

    arrived_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    match_s: float = 0.0
    fetch_s: float = 0.0
    swap_in_s: float = 0.0
    prefill_s: float = 0.0
    matched_tokens: int = 0
    hit_tokens: int = 0
    replay_tokens: int = 0
    shared_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    rejected_shards: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A request in an engine. Belongs to the engine's thread.

    `order` is its place in the line, lower is earlier. `tokens_max` bounds prompt and answer.
    `shared_blocks` leading blocks were in the pool before; those up to `saved_blocks` were given
    to be saved. `window` is the window state that `plan` begins with, if this engine had it.
    """

    request: Request
    sequence: Sequence
    order: int
    tokens_max: int
    chain: KeyChain
    costs: Costs
    counts: EngineCounts
    """Of the engine, to which its costs are added."""
    phase: Phase = Phase.WAITING
    replay_first: int | None = None
    load: PrefixLoad | None = None
    plan: HitPlan = MISS
    window: Window | None = None
    shared_blocks: int = 0
    is_started: bool = False
    is_cold: bool = False
    """Since its start: nothing it is computed from came from a store, or what did is its own."""
    is_window_cold: bool = False
    """Of `window`, when it was taken: another one may have its key since."""
    is_begun_cold: bool | None = None
    """`is_cold` of the run that its answer hangs on, once one was preempted here."""
    has_changed: bool = False
    """Since its start: its answer is not known to have the bits that it began with."""
    longest: HitPlan | None = None
    """The prefix that it would begin with if a store had everything, once that was asked for."""
    has_fallen_short: bool = False
    """The store has been asked and has not kept its word: it is not asked again."""
    waits_for_end: bool = False
    """A pass found that its prefix comes too slowly: no other one before it is all there."""
    borders: tuple[int, ...] = ()
    indexed_blocks: int = 0
    saved_blocks: int = 0
    window_blocks: int = 0
    """Blocks at whose ends window state was looked after."""
    windows: deque[tuple[bytes, WindowRecord]] = field(
        default_factory=lambda: deque(maxlen=WINDOWS_KEPT)
    )
    receipt: SaveReceipt = field(default_factory=SaveReceipt)
    short_since_s: float | None = None
    """Since when blocks are lacking."""
    short_at: tuple[int, ...] = ()
    """What room there had been, and what was shared, when they were last found lacking."""
    short_looked_s: float = 0.0
    """When that was."""
    finish_reason: FinishReason | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def answer_tokens(self) -> int:
        return len(self.sequence.token_ids) - self.sequence.prompt_tokens

    @property
    def standing(self) -> Standing:
        return Standing(self.answer_tokens, self.order)

    @property
    def begun(self) -> Begun | None:
        """Not None if a part of the answer has been given out: its bits are bound."""
        if not self.answer_tokens:
            return None
        return Begun(self.replay_first, self.is_begun_cold)

    def keys(self) -> list[bytes]:
        """Keys of all full blocks of the tokens known. Grows in place; not to be changed."""
        chain = self.chain
        if chain.token_count < len(self.sequence.token_ids):
            chain.append(self.sequence.token_ids[chain.token_count :])
        return chain.keys

    def short_for_s(self, now_s: float) -> float:
        """For how long blocks have been lacking."""
        return 0.0 if self.short_since_s is None else now_s - self.short_since_s

    def begin_anew(self) -> None:
        """It lost its blocks and its state. What was saved of it stays saved."""
        self.sequence.computed_tokens, self.sequence.hit = 0, MISS
        self.plan, self.window, self.borders, self.longest = MISS, None, (), None
        self.shared_blocks = self.indexed_blocks = self.window_blocks = 0
        self.is_started = self.is_cold = self.is_window_cold = self.has_changed = False
        self.waits_for_end = self.has_fallen_short = False
        self.short_since_s, self.short_at = None, ()
        self.windows.clear()

    def note_begun(self) -> None:
        """Its answer hangs on this run."""
        self.replay_first, self.is_begun_cold = self.sequence.replay_first, self.is_cold

    def attach_here(self, *, is_cold: bool) -> None:
        """Its sequence was begun, computed so far and saved by another engine. `is_cold`: it is
        known to have the bits of a cold run."""
        sequence = self.sequence
        self.order -= ATTACHED_AHEAD
        self.phase = Phase.DECODING
        self.is_started = True
        self.plan, self.is_cold = sequence.hit, is_cold
        self.saved_blocks = self.window_blocks = sequence.complete_blocks
        self.costs.admitted_s = self.costs.first_token_s = self.costs.arrived_s

    def note_hit(self) -> None:
        """Its first token came with this prefix."""
        costs, plan = self.costs, self.plan
        costs.hit_tokens = plan.hit_tokens
        costs.replay_tokens = plan.replay_tokens
        costs.shared_tokens = self.shared_blocks * BLOCK_TOKENS
        costs.computed_tokens = self.sequence.computed_tokens - plan.hit_tokens

    def note_outcome(self, outcome: LoadOutcome) -> None:
        self.costs.fetch_s += outcome.fetch_s
        self.costs.swap_in_s += outcome.swap_in_s
        self.costs.rejected_shards += outcome.rejected_shards
        self.counts.fetch_s += outcome.fetch_s
        self.counts.swap_in_s += outcome.swap_in_s
        self.counts.rejected_shards += outcome.rejected_shards

    def drop_load(self) -> None:
        """The load is not needed any more; what it took is noted, as far as that is known."""
        if self.load is None:
            return
        if self.load.outcome is not None:
            self.note_outcome(self.load.outcome)
        self.load.give_up()
        self.load = None

    def report(self, now_s: float) -> RequestReport:
        costs = self.costs
        admitted_s = now_s if costs.admitted_s is None else costs.admitted_s
        first_s = costs.first_token_s
        return RequestReport(
            queue_s=max(0.0, admitted_s - costs.arrived_s - costs.match_s),
            match_s=costs.match_s,
            fetch_s=costs.fetch_s,
            swap_in_s=costs.swap_in_s,
            prefill_s=costs.prefill_s,
            ttft_s=0.0 if first_s is None else first_s - costs.arrived_s,
            decode_s=0.0 if first_s is None else now_s - first_s,
            prompt_tokens=self.sequence.prompt_tokens,
            matched_tokens=costs.matched_tokens,
            hit_tokens=costs.hit_tokens,
            replay_tokens=costs.replay_tokens,
            shared_tokens=costs.shared_tokens,
            computed_tokens=costs.computed_tokens,
            answer_tokens=self.answer_tokens,
            preemptions=costs.preemptions,
            rejected_shards=costs.rejected_shards,
            receipt=self.receipt,
        )
