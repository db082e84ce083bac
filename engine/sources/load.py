"""One prefix on its way: what the engine's thread sees of it, and what threads of a source tell it.

Nothing here knows where the bytes come from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition

from kvstore.policy import MISS, HitPlan

from ..block_pool import BlockPool
from ..errors import TransferFailed
from ..kv.mover import ComputeMark, Transfer, wait_for_compute
from ..prefix_source import LoadEvent, LoadFellShort, LoadOutcome, LoadStep, PrefixFound

CONFIRM_WAIT_S = 5.0
"""For a GPU to come to the end of transfers that were all started, from when it has done what it
had been given before. The store has nothing to do with it: a run that was lost is told at once."""
COMPUTE_WAIT_S = 60.0
"""For what it had been given before: the engine's thread stands still meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BringOrder:
    """What an engine asked for: blocks first_block .. plan.stored_blocks - 1 into `block_ids`, of
    which there is one for each, and the window state at the plan's anchor if it has one. Before
    `after` the blocks may still be read by what was computed for somebody else."""

    plan: HitPlan
    first_block: int
    block_ids: tuple[int, ...]
    begun_at_s: float
    after: ComputeMark = None


NOTHING_ORDERED = BringOrder(plan=MISS, first_block=0, block_ids=(), begun_at_s=0.0)


def mark_nothing() -> ComputeMark:
    """What was computed is done."""
    return None


class ThreadedLoad:
    """A `PrefixLoad` that threads of a source work for.

    The engine's half is the protocol; the source's half are `settle_match`, `take`,
    `publish_sections`, `confirm_sections`, `publish_window`, `note` and `finish`. `finish` comes
    exactly once for every load that was begun, by whoever has it, and gives back the references to
    the blocks.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        keys: Sequence[bytes],
        *,
        sections: int,
        pool: BlockPool,
        section_wait_s: float,
        bring: Callable[["ThreadedLoad"], bool],
        on_change: Callable[[], None],
        clock: Callable[[], float],
        mark_compute: Callable[[], ComputeMark] = mark_nothing,
    ) -> None:
        """`bring` puts the load in line to be brought; False if nobody will. `sections` are those
        of a block. `mark_compute`: a mover's."""
        self.prompt_ids = prompt_ids
        self.keys = keys
        self.order = NOTHING_ORDERED
        self.is_fault_noted = False
        """An error of the store has been counted; a store that is lost fails all that follows."""
        self.has_met_deadline = False
        """Something that was asked of the store for it took all the time that it had."""
        self._sections = sections
        self._pool = pool
        self._section_wait_s = section_wait_s
        self._bring = bring
        self._mark_compute = mark_compute
        self._on_change = on_change
        self._clock = clock
        self._changed = Condition()
        self._found: PrefixFound | None = None
        self._is_taken = False
        self._is_given_up = False
        self._end_early: Callable[[], None] | None = None
        self._sections_done = 0
        self._transfers: dict[int, tuple[Transfer, ...]] = {}
        """Of sections that were published while they were being moved."""
        self._is_confirmed = True
        """Nothing that was published is being moved."""
        self._window: memoryview | None = None
        self._outcome: LoadOutcome | None = None
        self._events: dict[tuple[LoadStep, int | None], LoadEvent] = {}
        self._last_section = self._sections
        self._wait_left_s = 0.0

    # For the engine -----------------------------------------------------------------------------

    @property
    def found(self) -> PrefixFound | None:
        return self._found

    def begin(self, plan: HitPlan, block_ids: Sequence[int], first_block: int) -> None:
        assert self.order is NOTHING_ORDERED, "a load begins once"
        assert not self._is_given_up
        assert 0 <= first_block <= plan.stored_blocks <= min(len(block_ids), len(self.keys))
        written = tuple(block_ids[first_block : plan.stored_blocks])
        self._pool.retain(written)
        with self._changed:
            self.order = BringOrder(
                plan=plan,
                first_block=first_block,
                block_ids=written,
                begun_at_s=self._clock(),
                after=self._mark_compute() if written else None,
            )
            if not written:
                self._sections_done = self._sections
        is_in_line = False
        try:
            is_in_line = self._bring(self)
        finally:
            if not is_in_line and self.take():
                self.finish()

    @property
    def is_startable(self) -> bool:
        with self._changed:
            if self.order is NOTHING_ORDERED or self._sections_done == 0:
                return False
            plan, outcome = self.order.plan, self._outcome
            has_window = self._window is not None or plan.window_anchor is None
            return has_window and (outcome is None or outcome.blocks == plan.stored_blocks)

    @property
    def window(self) -> memoryview | None:
        return self._window

    def wait_for_section(self, section: int) -> None:
        """A pass asks for sections in ascending order, so one that is not above the last begins a
        new pass, which may wait anew."""
        assert 0 <= section < self._sections, section
        with self._changed:
            if section <= self._last_section:
                self._wait_left_s = self._section_wait_s
            self._last_section = section
            while self._sections_done <= section:
                if self._outcome is not None or self._wait_left_s <= 0:
                    raise LoadFellShort
                waits_from_s = self._clock()
                self._changed.wait(self._wait_left_s)
                self._wait_left_s -= self._clock() - waits_from_s
            transfers = self._transfers.get(section, ())
        try:
            for transfer in transfers:
                transfer.order_compute()
        except TransferFailed as error:  # the thread that brings it tells of it too
            raise LoadFellShort from error

    def confirm(self) -> None:
        if self._is_confirmed:
            return
        if self._outcome is not None:
            raise LoadFellShort
        if self._is_confirmed_behind(self.order.after):
            return
        # Transfers have one order: some before them may wait for what was computed later.
        later = self._mark_compute()
        if later is None or not self._is_confirmed_behind(later):
            raise LoadFellShort

    def _is_confirmed_behind(self, mark: ComputeMark) -> bool:
        """Whether it is, a while after `mark`: a pass that transfers stand behind may take longer
        than they may. Raises LoadFellShort if it never will be."""
        try:
            what = "the confirmation of a load"
            wait_for_compute(mark, what, deadline_s=COMPUTE_WAIT_S)
        except TransferFailed as error:  # the next pass meets it too
            raise LoadFellShort from error
        with self._changed:
            end_s = self._clock() + CONFIRM_WAIT_S
            while not self._is_confirmed:
                if self._outcome is not None:
                    raise LoadFellShort
                left_s = end_s - self._clock()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return True

    @property
    def outcome(self) -> LoadOutcome | None:
        return self._outcome

    def give_up(self) -> None:
        with self._changed:
            is_whole = self._sections_done == self._sections  # then it ends by itself, and soon
            if self._is_given_up or self._outcome is not None or is_whole:
                return
            self._is_given_up = True
            end_early = self._end_early
        if self.take():
            self.finish()
        elif end_early is not None:
            end_early()

    # For the source -----------------------------------------------------------------------------

    @property
    def is_given_up(self) -> bool:
        return self._is_given_up

    def settle_match(self, found: PrefixFound) -> None:
        with self._changed:
            self._found = found
        self._on_change()

    @property
    def is_late(self) -> bool | None:
        """Whether it met a deadline and nothing of what was ordered came; None if it was given up
        before anything came. Of a load that has ended."""
        outcome = self._outcome
        assert outcome is not None
        if outcome.blocks > self.order.first_block or outcome.window is not None:
            return False
        return None if self._is_given_up else self.has_met_deadline

    def take(self) -> bool:
        """Whether the caller is the one to bring it and to call `finish`."""
        with self._changed:
            is_mine, self._is_taken = not self._is_taken, True
        return is_mine

    def on_give_up(self, end_early: Callable[[], None]) -> None:
        """Have something called by the thread that gives the load up; at once if it has been."""
        with self._changed:
            self._end_early = end_early
            is_late = self._is_given_up
        if is_late:
            end_early()

    def publish_sections(self, sections: int, transfers: Sequence[Transfer] = ()) -> None:
        """The first `sections` sections of all blocks ordered are in the pool, the last of them
        when `transfers` have ended: `confirm_sections` has to follow if there are any."""
        with self._changed:
            self._sections_done = sections
            if transfers:
                self._transfers[sections - 1] = tuple(transfers)
                self._is_confirmed = False
            self._changed.notify_all()
        self._on_change()

    def confirm_sections(self) -> None:
        """Every section was published, and is known to stand whole in the pool."""
        assert self._sections_done == self._sections
        with self._changed:
            self._is_confirmed = True
            self._transfers.clear()
            self._changed.notify_all()

    def publish_window(self, window: memoryview) -> None:
        with self._changed:
            self._window = window
        self._on_change()

    def note(self, step: LoadStep, section: int | None, start_s: float, end_s: float) -> None:
        """Put down when a step was taken; one that is taken in parts lasts from first to last."""
        with self._changed:
            before = self._events.get((step, section))
            first_s = start_s if before is None else before.start_s
            self._events[step, section] = LoadEvent(step, section, first_s, end_s)

    def finish(
        self,
        blocks: int = 0,
        *,
        rejected_shards: int = 0,
        fetch_s: float = 0.0,
        swap_in_s: float = 0.0,
    ) -> None:
        """Nothing writes to the pool any more; `blocks` leading ones of those ordered are whole."""
        order = self.order
        assert 0 <= blocks <= len(order.block_ids), (blocks, order)
        assert self._is_taken
        assert self._outcome is None
        self._pool.release(order.block_ids)
        with self._changed:
            self._end_early = None
            self._transfers.clear()  # ended, and they hold on to the arena
            self._outcome = LoadOutcome(
                blocks=order.first_block + blocks,
                window=self._window,
                rejected_shards=rejected_shards,
                fetch_s=fetch_s,
                swap_in_s=swap_in_s,
                events=tuple(sorted(self._events.values(), key=lambda event: event.start_s)),
            )
            self._changed.notify_all()
        self._on_change()
