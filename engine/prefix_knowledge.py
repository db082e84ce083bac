"""What an engine knows of the prefix of a request, and which prefix it begins with.

The rules are those of `scheduler.prefix_choice`; here is where their facts come from: the pool, the
windows kept in the engine, and what a source has said or brought.
"""

from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import MISS, WINDOW_RING_TOKENS, HitPlan

from .job import Job
from .prefix_index import PrefixIndex
from .prefix_source import LoadOutcome
from .scheduler.prefix_choice import KnownPrefix, choose_dense_prefix, choose_prefix
from .window_record import WindowRecord
from .window_snapshots import WindowSnapshots


class PrefixKnowledge:
    """Belongs to the engine's thread. `has_windows`: the model has window state."""

    def __init__(
        self, index: PrefixIndex, snapshots: WindowSnapshots, *, has_windows: bool
    ) -> None:
        self.index = index
        self._snapshots = snapshots
        self._has_windows = has_windows

    @property
    def additions(self) -> int:
        """As long as it stays the same no prefix has grown here: not in the pool, nor by a window
        state."""
        return self.index.additions + self._snapshots.additions

    def tokens_to_match(self, job: Job) -> int:
        """A prompt and its answer; with window state the prompt alone, whose length binds bits."""
        sequence = job.sequence
        return sequence.prompt_tokens if self._has_windows else len(sequence.token_ids)

    def keys_to_match(self, job: Job) -> list[bytes]:
        return job.keys()[: self.tokens_to_match(job) // BLOCK_TOKENS]

    def choose(self, job: Job, known: KnownPrefix) -> HitPlan:
        if self._has_windows:
            return choose_prefix(job.sequence.prompt_tokens, known, job.begun)
        return choose_dense_prefix(len(job.sequence.token_ids), known)

    def known(self, job: Job) -> KnownPrefix:
        """In the pool, and by the source's answer if there is one: of both what it may go on from.
        An answer that was begun cold takes nothing that may be of another origin."""
        keys = self.keys_to_match(job)
        found = None if job.load is None else job.load.found
        stored_blocks = 0 if found is None else min(found.matched_blocks, len(keys))
        if self._must_be_cold(job):
            return KnownPrefix(
                shared_blocks=self.index.count_cold(keys),
                stored_blocks=min(stored_blocks, _own_blocks(job)),
                anchors=self._anchors(job, keys),
            )
        anchors = self._anchors(job, keys)
        if found is not None and found.plan.window_anchor is not None:
            anchors |= {found.plan.window_anchor}
        return KnownPrefix(
            shared_blocks=self.index.count(keys), stored_blocks=stored_blocks, anchors=anchors
        )

    def come(self, job: Job, outcome: LoadOutcome) -> KnownPrefix:
        """What a load that has ended brought, and what was there before it."""
        anchors = self._anchors(job, self.keys_to_match(job))
        if outcome.window is not None and job.plan.window_anchor is not None:
            anchors |= {job.plan.window_anchor}
        return KnownPrefix(stored_blocks=outcome.blocks, anchors=anchors)

    def is_all_here(self, job: Job) -> bool:
        """Whether no store could give it a better prefix than the pool does. Cheap where the end
        of the best one is not there."""
        longest = self._longest(job)
        if longest != MISS and not self._must_be_cold(job):
            last_key = job.keys()[longest.stored_blocks - 1]
            has_window = longest.window_anchor is None or last_key in self._snapshots
            if not (has_window and self.index.has(last_key)):
                return False
        return self.is_longest(job, self.choose(job, self.known(job)))

    def is_longest(self, job: Job, plan: HitPlan) -> bool:
        """Whether no store could give it a better prefix than this one."""
        if self._must_be_cold(job) and _own_blocks(job) == 0:
            return True
        return plan == self._longest(job)

    def is_cold(self, job: Job, plan: HitPlan) -> bool:
        """Whether what a request goes on from, with the blocks and the window that it has taken and
        this plan for the rest, is known to be what a cold run gives."""
        if not self._has_windows or plan == MISS:
            return True
        if plan.window_anchor is None:
            return False
        if self._must_be_cold(job):
            return True  # nothing else was there to choose from
        keys = job.keys()[: plan.stored_blocks]
        # A block that is in use stays the one of its key in the pool; a window may be replaced.
        is_here = job.shared_blocks == len(keys) == self.index.count_cold(keys)
        return is_here and job.is_window_cold

    def take_window(self, job: Job, anchor: int | None) -> WindowRecord | None:
        """The window state that is kept in the engine for this position, if there is one; whether
        it is a cold run's is noted."""
        job.is_window_cold = False
        if anchor is None:
            return None
        key = job.keys()[anchor // BLOCK_TOKENS - 1]
        job.is_window_cold = self._snapshots.is_cold(key)
        return self._snapshots.get(key)

    def _longest(self, job: Job) -> HitPlan:
        """The prefix that it would begin with if a store had everything."""
        if job.longest is None:
            blocks = self.tokens_to_match(job) // BLOCK_TOKENS
            farthest = job.sequence.prompt_tokens - WINDOW_RING_TOKENS
            anchors = frozenset({farthest // BLOCK_TOKENS * BLOCK_TOKENS})
            job.longest = self.choose(job, KnownPrefix(stored_blocks=blocks, anchors=anchors))
        return job.longest

    def _must_be_cold(self, job: Job) -> bool:
        return self._has_windows and job.begun is not None and job.begun.is_cold is True

    def _anchors(self, job: Job, keys: list[bytes]) -> frozenset[int]:
        if not self._has_windows:
            return frozenset()
        has = self._snapshots.is_cold if self._must_be_cold(job) else self._snapshots.__contains__
        ends = range(BLOCK_TOKENS, len(keys) * BLOCK_TOKENS + 1, BLOCK_TOKENS)
        return frozenset(end for end, key in zip(ends, keys, strict=True) if has(key))


def _own_blocks(job: Job) -> int:
    """Leading blocks that a store is known to have from this request and from nobody before it."""
    return job.saved_blocks if job.receipt.summary().stored >= job.saved_blocks else 0
