"""Gives sequences their blocks and their state, and takes them back: each once.

Not for deciding who gets them; that is the scheduler's.
"""

from collections.abc import Sequence as Run

from .model_runner import ModelRunner
from .save_sink import SaveSink
from .sequence import Sequence


class SequenceMemory:
    """The pool and the states of a runner, as one thing that sequences are opened in."""

    def __init__(self, runner: ModelRunner, sink: SaveSink | None, *, sequences_max: int) -> None:
        self.pool = runner.pool
        self._runner = runner
        self._sink = sink
        self._sequences_max = sequences_max
        self._open: set[Sequence] = set()
        self.held: set[Sequence] = set()
        """Those open that are out of the schedule, on their way to or from another engine."""

    @property
    def open_sequences(self) -> int:
        return len(self._open)

    @property
    def growing_sequences(self) -> int:
        """Those that may need a block more; not the ones that are held."""
        return len(self._open) - len(self.held)

    @property
    def has_state(self) -> bool:
        """Whether one more sequence can be opened, if there are blocks for it."""
        return len(self._open) < self._sequences_max and self._runner.free_states > 0

    def is_open(self, sequence: Sequence) -> bool:
        return sequence in self._open

    def open(self, sequence: Sequence, shared_ids: Run[int], new_blocks: int) -> None:
        """Open a sequence over blocks that it has references to and so many new ones. The caller
        has seen that there are enough."""
        assert not sequence.block_ids, "the sequence has blocks"
        self._runner.open(sequence)
        sequence.block_ids = [*shared_ids, *self.pool.allocate(new_blocks)]
        self._open.add(sequence)

    def begin_anew(self, sequence: Sequence) -> None:
        """Bring the state back to position 0; the blocks stay."""
        self._runner.close(sequence)
        self._runner.open(sequence)

    def grow(self, sequence: Sequence, blocks: int) -> bool:
        """Give a sequence so many blocks more, if they are free."""
        if self.pool.free_blocks < blocks:
            self.make_room(blocks)
        if self.pool.free_blocks < blocks:
            return False
        sequence.block_ids += self.pool.allocate(blocks)
        return True

    def make_room(self, blocks: int) -> None:
        """Give up saves that have not begun until so many blocks are free. Does not wait."""
        if self._sink is not None:
            self._sink.make_room(blocks, deadline_s=0.0)

    def give_back(self, sequence: Sequence) -> None:
        """Take everything from a sequence. Its tokens stay."""
        self._open.remove(sequence)
        self.held.discard(sequence)
        self._runner.close(sequence)
        # The deepest first, so that it is the first to be handed out anew: a block is of no use
        # without those before it.
        self.pool.release(reversed(sequence.block_ids))
        sequence.block_ids = []
