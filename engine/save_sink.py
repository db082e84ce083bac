"""Where an engine puts what it wants kept. Nothing here waits for a store."""

from collections.abc import Sequence
from typing import Protocol

from .save_receipt import SaveReceipt
from .window_record import WindowRecord


class SaveSink(Protocol):
    """Takes blocks and window state to be saved behind the engine's back: bounded, the oldest
    dropped and counted. Calls return within microseconds."""

    def save_blocks(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        *,
        ttl_class: str,
        receipt: SaveReceipt,
    ) -> None:
        """Save complete blocks of the pool as the last ones of the chain `keys`. References to them
        are held until they are read."""

    @property
    def dropped_windows(self) -> int:
        """Window states that were not kept, for whatever reason. From any thread."""

    def save_window(self, key: bytes, record: WindowRecord) -> None:
        """Keep the window state at the end of the block that has this key."""

    def make_room(self, blocks: int, deadline_s: float) -> None:
        """Try to have so many blocks free in the pool: let saves end, then give up the oldest that
        have not begun, no more than needed and none that frees nothing. If all of them together
        are not enough, none is."""

    def flush(self, deadline_s: float) -> bool:
        """Wait until nothing is queued or running; False if that took longer."""

    def close(self, deadline_s: float) -> bool:
        """Flush, drop what is left and end; False if something was dropped or hung. May be called
        again."""
