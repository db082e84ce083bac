"""A source and a sink in memory that go on when a test says so: with real bytes, without threads.

Both keep to their protocols. What is saved is what can be loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from engine.model_runner import ModelRunner
from engine.prefix_source import LoadFellShort, LoadOutcome, PrefixFound
from engine.save_receipt import SaveReceipt
from engine.window_record import WindowRecord
from kvstore.layout import BLOCK_TOKENS, BlockLayout
from kvstore.policy import MISS, HitPlan, plan_dense_hit, plan_hit


@dataclass(eq=False)
class Kept:
    """What is stored, by key."""

    blocks: dict[bytes, bytes] = field(default_factory=dict)
    windows: dict[bytes, bytes] = field(default_factory=dict)

    def put_block(self, key: bytes, data: bytes, *, is_dense: bool) -> bool:
        """Whether it was not there: what is there stays."""
        is_new = key not in self.blocks
        first = self.blocks.setdefault(key, data)
        # Equal keys are equal bits, but for what a bounded replay leads to.
        assert not is_dense or first == data
        return is_new

    def put_window(self, key: bytes, record: bytes) -> None:
        self.windows[key] = record


@dataclass(frozen=True, eq=False)
class SaveJob:
    keys: list[bytes]
    block_ids: list[int]
    receipt: SaveReceipt


class DrivenSink:
    """Saves at once; or, while `is_held`, when `save_next` is called."""

    def __init__(self, runner: ModelRunner, kept: Kept) -> None:
        self.is_held = False
        self.jobs: deque[SaveJob] = deque()
        self.ttl_classes: list[str] = []
        self.windows_saved = 0
        self.rooms_asked = 0
        self._pool = runner.pool
        self._kept = kept
        self._is_dense = runner.window_layout is None

    @property
    def references(self) -> list[int]:
        """Blocks that references are held to."""
        return [block_id for job in self.jobs for block_id in job.block_ids]

    def save_blocks(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        *,
        ttl_class: str,
        receipt: SaveReceipt,
    ) -> None:
        assert 0 < len(block_ids) <= len(keys)
        receipt.expect(len(block_ids))
        self._pool.retain(block_ids)
        self.ttl_classes.append(ttl_class)
        self.jobs.append(SaveJob(list(keys[-len(block_ids) :]), list(block_ids), receipt))
        if not self.is_held:
            self.save_next()

    def save_next(self) -> None:
        """The oldest save that waits is done."""
        job = self.jobs.popleft()
        stored = 0
        for key, block_id in zip(job.keys, job.block_ids, strict=True):
            data = bytes(self._pool.buffer(block_id))
            stored += self._kept.put_block(key, data, is_dense=self._is_dense)
        self._pool.release(job.block_ids)
        job.receipt.settle(stored=stored, known=len(job.block_ids) - stored)

    @property
    def dropped_windows(self) -> int:
        return 0

    def save_window(self, key: bytes, record: WindowRecord) -> None:
        self.windows_saved += 1
        self._kept.put_window(key, record.memory.numpy().tobytes())

    def make_room(self, blocks: int, deadline_s: float) -> None:
        self.rooms_asked += 1
        missing_blocks, drops = blocks - self._pool.free_blocks, []
        for job in self.jobs:
            freed_blocks = self._pool.count_last(job.block_ids) if missing_blocks > 0 else 0
            if freed_blocks:
                missing_blocks -= freed_blocks
                drops.append(job)
        for job in drops if missing_blocks <= 0 else []:
            self.jobs.remove(job)
            self._pool.release(job.block_ids)
            job.receipt.settle(dropped=len(job.block_ids))

    def flush(self, deadline_s: float) -> bool:
        while self.jobs:
            self.save_next()
        return True

    def close(self, deadline_s: float) -> bool:
        return self.flush(deadline_s)


class DrivenSource:
    """Answers and brings at once; or, while `is_held`, as each load is told to."""

    def __init__(self, runner: ModelRunner, kept: Kept) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.is_held = False
        self.are_slow_to_end = False
        """Loads that are given up write on, until they are told to end."""
        self.loads: list[DrivenLoad] = []
        self.runner = runner
        self.kept = kept
        self.is_closed = False

    @property
    def references(self) -> list[int]:
        return [block_id for load in self.loads for block_id in load.references]

    def look_up(self, prompt_ids: Sequence[int], keys: Sequence[bytes]) -> DrivenLoad:
        assert len(keys) == len(prompt_ids) // BLOCK_TOKENS
        load = DrivenLoad(self, len(prompt_ids), list(keys))
        self.loads.append(load)
        if not self.is_held:
            load.answer()
        return load

    def close(self, deadline_s: float) -> bool:
        self.is_closed = True
        for load in self.loads:
            load.give_up()
        return True


class DrivenLoad:
    """`answer` settles the match, `bring` copies sections, `end` says that no more comes."""

    def __init__(self, source: DrivenSource, prompt_tokens: int, keys: list[bytes]) -> None:
        self._source = source
        self._prompt_tokens = prompt_tokens
        self._keys = keys
        self._pool = source.runner.pool
        self._layout = source.runner.namespace.layout
        self._found: PrefixFound | None = None
        self._outcome: LoadOutcome | None = None
        self._window: memoryview | None = None
        self._plan = MISS
        self._first = 0
        self._sections_done = 0
        self.references: list[int] = []
        self.comes_while_waited_for = False
        """Sections come when a pass waits for them."""
        self.confirmations = 0
        self.is_lost_in_the_pass = False
        """The pass has read what nobody knows."""
        self.is_given_up = False
        self._blocks: dict[bytes, bytes] = {}
        self._windows: dict[bytes, bytes] = {}

    # For the engine -------------------------------------------------------------------------------

    @property
    def found(self) -> PrefixFound | None:
        return self._found

    @property
    def outcome(self) -> LoadOutcome | None:
        return self._outcome

    @property
    def window(self) -> memoryview | None:
        return self._window

    @property
    def is_startable(self) -> bool:
        has_window = self._plan.window_anchor is None or self._window is not None
        return self.is_begun and self._sections_done > 0 and has_window

    def begin(self, plan: HitPlan, block_ids: Sequence[int], first_block: int) -> None:
        assert not self.is_begun
        assert first_block <= plan.stored_blocks <= len(self._keys)
        self._plan, self._first = plan, first_block
        self.references = list(block_ids[first_block : plan.stored_blocks])
        self._pool.retain(self.references)
        if not self._source.is_held:
            self.bring()
            self.end()

    def wait_for_section(self, section: int) -> None:
        if self._sections_done <= section and self.comes_while_waited_for:
            self.bring(section + 1)
        if self._sections_done <= section:
            raise LoadFellShort

    def confirm(self) -> None:
        self.confirmations += 1
        if self.is_lost_in_the_pass:
            raise LoadFellShort

    def give_up(self) -> None:
        if self._outcome is not None:
            return
        self.is_given_up = True
        if not (self._source.are_slow_to_end and self.is_begun):
            self.end(blocks=0)

    # For the test ---------------------------------------------------------------------------------

    @property
    def is_begun(self) -> bool:
        return self._plan != MISS

    def answer(self, *, is_lost: bool = False) -> None:
        """What is stored; nothing, if the store `is_lost`. What was matched can be had later."""
        kept = self._source.kept
        self._blocks, self._windows = dict(kept.blocks), dict(kept.windows)
        matched = 0
        while not is_lost and matched < len(self._keys):
            if self._keys[matched] not in self._blocks:
                break
            matched += 1
        self._found = PrefixFound(
            matched_blocks=matched, plan=self._plan_for(matched), match_s=0.25
        )
        self._source.on_change()

    def bring_window(self) -> None:
        anchor = self._plan.window_anchor
        if anchor is not None:
            record = self._windows[self._keys[anchor // BLOCK_TOKENS - 1]]
            self._window = memoryview(bytearray(record))

    def bring(self, sections: int | None = None) -> None:
        """Copy the first `sections` sections of all blocks, all of them by default."""
        self.bring_window()
        count = len(self._layout.sections) if sections is None else sections
        ranges = _section_ranges(self._layout)[self._sections_done : count]
        for number, block_id in enumerate(self.references):
            data = self._blocks[self._keys[self._first + number]]
            for section in ranges:
                self._pool.buffer(block_id)[section] = data[section]
        self._sections_done = max(self._sections_done, count)
        self._source.on_change()

    @property
    def is_whole(self) -> bool:
        return self._sections_done == len(self._layout.sections)

    def end_short(self, blocks: int, *, with_window: bool = True) -> None:
        """Nothing more comes, and no more than the first `blocks` of those asked for are whole."""
        for number in range(blocks):
            data = self._blocks[self._keys[self._first + number]]
            self._pool.buffer(self.references[number])[:] = data
        self.end(blocks, with_window=with_window)

    def end(self, blocks: int | None = None, *, with_window: bool = True) -> None:
        """Nothing more comes; `blocks` of those asked for are whole, all that came by default."""
        if blocks is None:
            blocks = len(self.references) if self.is_whole else 0
        self._pool.release(self.references)
        self.references = []
        if not with_window:
            self._window = None
        self._outcome = LoadOutcome(
            blocks=self._first + blocks, window=self._window, fetch_s=0.5, swap_in_s=0.125
        )
        self._source.on_change()

    def _plan_for(self, matched: int) -> HitPlan:
        if self._source.runner.window_layout is None:
            return plan_dense_hit(self._prompt_tokens, matched)
        anchors = {
            (index + 1) * BLOCK_TOKENS
            for index, key in enumerate(self._keys)
            if key in self._windows
        }
        return plan_hit(self._prompt_tokens, matched, anchors)


def _section_ranges(layout: BlockLayout) -> list[slice]:
    ends = list(accumulate(section.bytes for section in layout.sections))
    return [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]
