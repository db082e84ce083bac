"""What an engine asks of a model, whatever its family: memory for sequences, and passes over them.

A runner computes what it is told. Which tokens, in which company, and which blocks they go to is
decided by the engine. The bits that it writes and returns depend on a sequence alone (its tokens,
the length of its prompt, and the position of a bounded replay), never on how it was cut into passes
nor on what ran beside it.
"""

from collections.abc import Callable
from collections.abc import Sequence as Run
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvstore.key import Namespace
from kvstore.layout import BlockLayout
from kvstore.policy import HitPlan

from .block_pool import BlockPool
from .sampling import FloatArray
from .sequence import Sequence
from .window_record import WindowRecord

Buffer: TypeAlias = bytes | bytearray | memoryview

Window: TypeAlias = Buffer | WindowRecord
"""Window state that came from a store, or that was made here."""

WaitForSection: TypeAlias = Callable[[int], None]
"""Returns when the section (by number, in the layout's order) of all blocks of the sequences in a
pass stands in the pool; raises to end the pass."""


def wait_for_nothing(section: int) -> None:
    """Every section is there."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The tokens computed_tokens .. end - 1 of a sequence, to be run in a pass."""

    sequence: Sequence
    end: int


class ModelRunner(Protocol):
    """One model over one pool of blocks. Not for use by two threads at once."""

    pool: BlockPool
    namespace: Namespace
    """Of its blocks; `namespace.layout` says how a block is cut into sections."""
    window_layout: BlockLayout | None
    """Of stored window state; None for a model without."""
    state_layout: BlockLayout | None
    """Of what a hand-over sends beside blocks; None for a model without."""
    context_tokens: int
    vocabulary: int

    @property
    def free_states(self) -> int:
        """How many sequences more can be opened."""

    def open(self, sequence: Sequence) -> None:
        """Give a sequence its state, at position 0: `computed_tokens` and `hit` are set back.
        Raises StateSlotsExhausted."""

    def close(self, sequence: Sequence) -> None:
        """Take the state back; the blocks are the caller's, and `hit` stays readable. May be called
        again."""

    def start_after(self, sequence: Sequence, plan: HitPlan, window: Window | None) -> None:
        """Go on behind a hit. For a sequence that was just opened; `hit` and `computed_tokens` are
        set. `window` is the window state at `plan.window_anchor`. Tokens hit_tokens ..
        hit_tokens + replay_tokens - 1 are run again with windows cut off at the first of them,
        and their blocks are not written."""

    def chunk_borders(self, sequence: Sequence) -> list[int]:
        """Positions, ascending, that no pass of its prompt may cross: there window state is copied.
        Beyond that a pass of a prompt ends at a multiple of 128 or at the prompt's end."""

    def compute(
        self, parts: Run[Part], *, wait_for_section: WaitForSection = wait_for_nothing
    ) -> list[FloatArray | None]:
        """Run the parts and advance their sequences (`computed_tokens`).

        For each part the logits, float32 [vocabulary], after its last token if that is the last one
        known of its sequence, else None. If `wait_for_section` raises, the sequences of the pass
        are lost: they must be closed and opened anew; complete blocks of others are as they were.
        """

    def window_anchor(self, sequence: Sequence) -> int | None:
        """The newest multiple of 128 at which the window can be copied now, None if there is
        none."""

    def copy_window(self, sequence: Sequence, anchor: int) -> WindowRecord:
        """The window state at `anchor`, a copy. Made behind what was computed and before what will
        be; the calling thread does not wait for that. Raises DeviceFull."""

    def pack_state(self, sequence: Sequence, into: memoryview | None) -> bytes:
        """What a hand-over sends beside blocks: the slot, copied into `into` (state_layout bytes;
        None for a model without), and the marks as bytes, which are returned."""

    def unpack_state(self, sequence: Sequence, marks: bytes, state: Buffer | None) -> None:
        """Put a sequence that was just opened where `pack_state` took it: `computed_tokens` and
        `hit` are set. Raises HandoverRefused, with the sequence as it was."""

    def open_block_bytes(self, sequence: Sequence) -> bytes:
        """The block that is not complete as a hand-over sends it: zero where nothing of this
        sequence stands; empty if computed_tokens is a multiple of 128."""
