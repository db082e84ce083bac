"""What an engine knows of the prefix of a request, and which prefix it begins with.

The rules are those of `scheduler.prefix_choice`; here is where their facts come from: the pool, the
windows kept in the engine, and what a source has said or brought.
"""

from kvstore.layout import BLOCK_TOKENS
from kvstore.policy import WINDOW_RING_TOKENS, HitPlan

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
        """In the pool, and by the source's answer if there is one."""
        keys = self.keys_to_match(job)
        found = None if job.load is None else job.load.found
        anchors = self._anchors(keys)
        if found is not None and found.plan.window_anchor is not None:
            anchors |= {found.plan.window_anchor}
        return KnownPrefix(
            shared_blocks=self.index.count(keys),
            stored_blocks=0 if found is None else min(found.matched_blocks, len(keys)),
            anchors=anchors,
        )

    def come(self, job: Job, outcome: LoadOutcome) -> KnownPrefix:
        """What a load that has ended brought, and what was there before it."""
        anchors = self._anchors(self.keys_to_match(job))
        if outcome.window is not None and job.plan.window_anchor is not None:
            anchors |= {job.plan.window_anchor}
        return KnownPrefix(stored_blocks=outcome.blocks, anchors=anchors)

    def is_all_here(self, job: Job) -> bool:
        """Whether no store could give it a better prefix than the pool does."""
        keys = self.keys_to_match(job)
        here = KnownPrefix(shared_blocks=self.index.count(keys), anchors=self._anchors(keys))
        farthest = (job.sequence.prompt_tokens - WINDOW_RING_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS
        everything = KnownPrefix(stored_blocks=len(keys), anchors=frozenset({farthest}))
        return self.choose(job, here) == self.choose(job, everything)

    def window_at(self, job: Job, anchor: int | None) -> WindowRecord | None:
        """The window state that is kept in the engine for this position, if there is one."""
        if anchor is None:
            return None
        return self._snapshots.get(job.keys()[anchor // BLOCK_TOKENS - 1])

    def _anchors(self, keys: list[bytes]) -> frozenset[int]:
        if not self._has_windows:
            return frozenset()
        ends = range(BLOCK_TOKENS, len(keys) * BLOCK_TOKENS + 1, BLOCK_TOKENS)
        return frozenset(end for end, key in zip(ends, keys, strict=True) if key in self._snapshots)
